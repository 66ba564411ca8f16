"""Tokens per step along stored text: the drafter drafts for real, and the stored greedy text takes the target's part.

Greedy decoding is deterministic, so what a drafted tree would have been accepted for is known without a target pass:
the path along the text. In the dtype that the text and features were made in, this is what decoding gives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.core import Budget, Committed, Features
from headstart.drafters.base import Drafter
from headstart.sampling import Coin, Sampling

BATCH = 32  # texts that draft side by side


class Spoken(NamedTuple):
    """A stored answer: `ids[prompt:]` was said by the target; features `[T, D]` of positions from `start` on.

    `start` may not lie behind the prompt's last position.
    """

    ids: list[int]
    prompt: int
    features: Features
    start: int = 0


class Replayed(NamedTuple):
    """`trace[i]`: the accepted length of every step along text i, in order; a step emits one token more."""

    trace: list[list[int]]

    def only(self, texts: Sequence[int]) -> Replayed:
        """The same for some of the texts."""
        return Replayed([self.trace[i] for i in texts])

    @property
    def accepted(self) -> dict[int, int]:
        """Steps by accepted length."""
        return dict(sorted(Counter(k for steps in self.trace for k in steps).items()))

    @property
    def steps(self) -> int:
        """Over all texts."""
        return sum(map(len, self.trace))

    @property
    def tokens(self) -> int:
        """Emitted by steps: without the first of each text."""
        return sum(map(sum, self.trace)) + self.steps

    @property
    def per_text(self) -> list[tuple[int, int]]:
        """(tokens, steps) of each text."""
        return [(sum(steps) + len(steps), len(steps)) for steps in self.trace]

    @property
    def tokens_per_step(self) -> float:
        """Pooled over texts; 0.0 where no step was needed."""
        return self.tokens / self.steps if self.steps else 0.0

    def unconditional(self) -> list[float]:
        """Share of steps that accepted at least d tokens, for d = 1, 2, ..."""
        accepted = self.accepted
        return [
            sum(n for k, n in accepted.items() if k >= d) / self.steps for d in range(1, max(accepted, default=0) + 1)
        ]

    def conditional(self) -> list[float]:
        """Share of the steps that accepted d - 1 tokens or more which also accepted the d-th."""
        reach = [1.0, *self.unconditional()]
        return [b / a for a, b in pairwise(reach)]


def replay(drafter: Drafter, texts: Sequence[Spoken], max_nodes: int = 1024) -> Replayed:
    """Draft along every text until its end. Texts of one token have no step."""
    trace: list[list[int]] = []
    for start in range(0, len(texts), BATCH):
        trace += _batch(drafter, texts[start : start + BATCH], max_nodes)
    return Replayed(trace)


def first_state(drafter: Drafter, texts: Sequence[Spoken]) -> Any:
    """The prompts absorbed up to their last tokens; the answers' first tokens are the first roots."""
    spans = {i: (text.start, text.prompt) for i, text in enumerate(texts)}
    return drafter.absorb(drafter.start(len(texts)), _committed(texts, spans))


def along(drafter: Drafter, text: Spoken) -> Iterator[tuple[int, Any]]:
    """Every position of an answer that can be a root, with the state to draft from: one token absorbed at a time. The
    state is to be drafted from and left as it is."""
    state = first_state(drafter, [text])
    for root in range(text.prompt, len(text.ids) - 1):
        if root > text.prompt:
            state = drafter.absorb(state, _committed([text], {0: (root - 1, root)}))
        yield root, state


def _batch(drafter: Drafter, texts: Sequence[Spoken], max_nodes: int) -> list[list[int]]:
    """Accepted length of every step, per text."""
    out: list[list[int]] = [[] for _ in texts]
    alive = [i for i, text in enumerate(texts) if len(text.ids) > text.prompt + 1]
    if not alive:
        return out
    at = {i: texts[i].prompt for i in alive}
    state = first_state(drafter, [texts[i] for i in alive])
    greedy = Sampling()
    while alive:
        budget = Budget([len(texts[i].ids) - at[i] - 2 for i in alive], max_nodes)
        draft = drafter.draft(state, budget, [greedy] * len(alive), [Coin(0)] * len(alive))
        rows = zip(draft.token_BN.tolist(), draft.parent_BN.tolist(), draft.valid_BN.tolist(), strict=True)
        spans = {}
        for i, (tokens, parents, valid) in zip(alive, rows, strict=True):
            kept = _walk(tokens, parents, valid, texts[i].ids[at[i] + 1 :])
            out[i].append(kept)
            spans[i] = (at[i], at[i] + kept + 1)
            at[i] += kept + 1
        going = [n for n, i in enumerate(alive) if at[i] + 1 < len(texts[i].ids)]
        state = drafter.absorb(state, _committed(texts, spans))
        if len(going) < len(alive):
            state = drafter.select(state, going)
            alive = [alive[n] for n in going]
    return out


def _walk(tokens: list[int], parents: list[int], valid: list[bool], truth: list[int]) -> int:
    """Tokens of the draft that lie on the text's path."""
    node = depth = 0
    for child in range(1, len(tokens)):  # parents come first, so one pass follows the path
        if valid[child] and parents[child] == node and depth < len(truth) and tokens[child] == truth[depth]:
            node, depth = child, depth + 1
    return depth


def _committed(texts: Sequence[Spoken], spans: dict[int, tuple[int, int]]) -> Committed:
    """Positions `[start, end)` of each text as if a target had just committed them; the token at `end` is the root."""
    tokens = [texts[i].ids[start:end] for i, (start, end) in spans.items()]
    roots = [texts[i].ids[end] for i, (_, end) in spans.items()]
    width = max(map(len, tokens))

    def rows(x_TD: Tensor, text: Spoken, start: int, end: int) -> Tensor:
        part = x_TD[start - text.start : end - text.start]
        return torch.nn.functional.pad(part, (0, 0, 0, width - len(part)))

    def stack(pick: int | None) -> Tensor:
        out = []
        for i, (start, end) in spans.items():
            source = texts[i].features.final if pick is None else texts[i].features.layers[pick]
            assert source is not None
            out.append(rows(source, texts[i], start, end))
        return torch.stack(out)

    sample = texts[next(iter(spans))].features
    final = None if sample.final is None else stack(None)
    return Committed(tokens, roots, [[-1] * len(t) for t in tokens],
                     Features(final, tuple(stack(n) for n in range(len(sample.layers)))))  # fmt: skip
