"""Many answers at once from a stock target: one pass a step over a large batch, chosen on tensors.

`generate` serves requests and keeps every promise of `Sampling`; here only greedy and plain nucleus sampling are
offered, and in return a step of 128 rows costs little more than its pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.core import Taps
from headstart.errors import BadInput
from headstart.targets.base import Target, first_max, prefill
from headstart.tree import chain

SORTED = 256  # nucleus sampling looks at this many of the most likely tokens; the rest is never drawn
LOOP_RUN, LOOP_TIMES = 8, 3  # an answer ends when a run of 8 tokens stands in it for the third time
DROP = 0.125  # finished rows leave the batch when they are this share of it: each departure copies the cache
PREFILL_TOKENS = 2048  # per pass: more only makes the scratch tensors leave the caches


@dataclass(frozen=True, kw_only=True)
class How:
    """temperature 0 is greedy. `seed` fixes a batch's draws as long as its prompts are the same. `cut_loops` ends an
    answer that repeats itself: what follows teaches nothing new."""

    max_new_tokens: int = 192
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    cut_loops: bool = True

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or not 0 <= self.temperature < float("inf") or not 0 < self.top_p <= 1:
            raise BadInput(
                f"{self}: expected max_new_tokens of at least 1, a finite temperature of at least 0, top_p in (0, 1]."
            )


class Answer(NamedTuple):
    """`ids` include the stop id. `ended`: "stop", "length", or "loop" (cut because it repeats itself)."""

    ids: list[int]
    ended: str


Tick = Callable[[int], None]  # told of tokens as they come


@torch.inference_mode()
def rollout(
    target: Target, prompts: Sequence[Sequence[int]], how: How, stops: Sequence[int], tick: Tick | None = None
) -> list[Answer]:
    """Answer all prompts as one batch. Greedy answers are those of `generate` in fp32, cut where they loop.

    Raises BadInput for a prompt that is empty or leaves no room in the context, or for too many of them.
    """
    if not prompts:
        return []
    _demand_room(target, prompts, how)
    rows = [_Row(frozenset(stops), how) for _ in prompts]
    generator = torch.Generator(device="cpu").manual_seed(how.seed)
    alive = list(range(len(prompts)))
    cache, logits_BV = _prefill(target, prompts)
    while True:
        token_B = _choose(logits_BV, how, generator)
        tokens = token_B.tolist()
        for row, token in zip(alive, tokens, strict=True):
            rows[row].take(token)
        if tick is not None:
            tick(sum(not rows[r].frozen for r in alive))
        going = [i for i, r in enumerate(alive) if not rows[r].ended]
        if not going:
            return [Answer(row.ids, row.ended) for row in rows]
        if len(going) <= (1 - DROP) * len(alive):
            alive, token_B, cache = [alive[i] for i in going], token_B[going], target.select(cache, going)
        out, _ = target.extend(cache, token_B[:, None].to(target.device), chain(len(alive), 1, target.device), Taps())
        cache = target.commit(cache, [[0]] * len(alive))
        logits_BV = out.project(out.hidden_BND[:, 0])


class _Row:
    """One answer while it grows."""

    def __init__(self, stops: frozenset[int], how: How) -> None:
        self.stops, self.how = stops, how
        self.ids: list[int] = []
        self.ended = ""
        self.frozen = False  # ended before this step: what its row computes is thrown away
        self._runs: Counter[tuple[int, ...]] = Counter()

    def take(self, token: int) -> None:
        self.frozen = bool(self.ended)
        if self.ended:
            return
        self.ids.append(token)
        run = tuple(self.ids[-LOOP_RUN:])
        self._runs[run] += 1  # a shorter one, at the start, stands there once
        if token in self.stops:
            self.ended = "stop"
        elif self.how.cut_loops and self._runs[run] >= LOOP_TIMES:
            self.ended = "loop"
        elif len(self.ids) == self.how.max_new_tokens:
            self.ended = "length"


def _demand_room(target: Target, prompts: Sequence[Sequence[int]], how: How) -> None:
    target.can.demand("rollback", "Answering in batches")
    if len(prompts) > target.can.max_batch:
        raise BadInput(f"{len(prompts)} prompts in one batch; this target takes at most {target.can.max_batch}.")
    shortest, longest = (f(map(len, prompts)) for f in (min, max))
    if not shortest or longest + how.max_new_tokens > target.can.max_positions:
        raise BadInput(
            f"Prompts of {shortest} to {longest} tokens: expected at least one, and room for {how.max_new_tokens} more "
            f"in a context of {target.can.max_positions}. Lower the number of new tokens or leave long prompts out."
        )


def _prefill(target: Target, prompts: Sequence[Sequence[int]]) -> tuple[Any, Tensor]:
    """Run the prompts; what they all begin with (a system prompt) is run once and its cache copied to every row."""
    shared = next((i for i, column in enumerate(zip(*prompts, strict=False)) if len(set(column)) > 1), 0)
    cache = target.empty(len(prompts))
    if shared:
        cache, _, _ = prefill(target, target.empty(1), [prompts[0][:shared]], Taps())
        cache = target.select(cache, [0] * len(prompts))
    chunk = max(8, PREFILL_TOKENS // len(prompts))
    cache, rows, _ = prefill(target, cache, [p[shared:] for p in prompts], Taps(), chunk)
    return cache, rows.project(rows.hidden_BND[:, 0])


def _choose(logits_BV: Tensor, how: How, generator: torch.Generator) -> Tensor:
    """The next token of every row; randomness is spent on all rows alike, so it depends on the batch only."""
    if how.temperature == 0:
        return first_max(logits_BV).cpu()
    score_BK, token_BK = logits_BV.float().topk(min(SORTED, logits_BV.shape[1]))
    p_BK = torch.softmax(score_BK / how.temperature, -1)
    before_BK = p_BK.cumsum(-1) - p_BK
    p_BK = (p_BK * (before_BK < how.top_p)).cpu()
    pick_B1 = torch.multinomial(p_BK, 1, generator=generator)
    return token_BK.cpu().gather(1, pick_B1)[:, 0]
