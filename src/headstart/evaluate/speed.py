"""Wall clock of several ways to decode the same prompts: interleaved, on one target object, in one process, with one
token counter, and where the time of a step goes."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.core import Features, Report, Taps
from headstart.drafters.base import Drafter
from headstart.generation import prepare, run
from headstart.sampling import Sampling
from headstart.targets.base import Rows, Target
from headstart.tree import Tree

VERBS = ("draft", "target", "verify", "commit", "absorb")
REST = "rest"  # of a step: text pieces, counters, the generators themselves
DRAWS = 2000  # of the bootstrap


class Answer(NamedTuple):
    """One prompt's answer. `seconds` are those of the steps: the prompt's own pass, which both arms need, is apart.
    `tokens` are those emitted by steps, so the first token does not count."""

    ids: list[int]
    tokens: int
    steps: int
    seconds: float
    prompt_seconds: float
    accepted: Counter[int]
    parts: dict[str, float]


class Arm(NamedTuple):
    """One way to decode, over all prompts."""

    answers: list[Answer]

    @property
    def tokens_per_step(self) -> float:
        """Pooled; 0.0 where no step was needed."""
        steps = sum(a.steps for a in self.answers)
        return sum(a.tokens for a in self.answers) / steps if steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Pooled, prompts' passes apart."""
        return sum(a.tokens for a in self.answers) / max(sum(a.seconds for a in self.answers), 1e-9)

    @property
    def accepted(self) -> Counter[int]:
        """Steps by accepted length."""
        return sum((a.accepted for a in self.answers), Counter[int]())

    def step_ms(self) -> dict[str, float]:
        """Mean milliseconds of a step by verb; with `rest` they sum to `step`."""
        steps = max(sum(a.steps for a in self.answers), 1)
        out = {verb: 1e3 * sum(a.parts[verb] for a in self.answers) / steps for verb in VERBS}
        whole = 1e3 * sum(a.seconds for a in self.answers) / steps
        return {**out, REST: whole - sum(out.values()), "step": whole}


class _Watch:
    """Sums seconds by verb. A target pass ends at logits: their projection, done in verification, counts with it."""

    def __init__(self, device: torch.device) -> None:
        self._wait = device.type != "cpu"
        self.parts = dict.fromkeys(VERBS, 0.0)
        self._projected = 0.0
        self.restart()

    def now(self) -> float:
        """Seconds, once all queued work is done."""
        if self._wait:
            torch.accelerator.synchronize()
        return time.perf_counter()

    def restart(self) -> float:
        """A step begins."""
        self._last = self.now()
        return self._last

    def lap(self, verb: str) -> None:
        """A verb has ended."""
        now = self.now()
        self.parts[verb] += now - self._last
        self._last = now
        if verb == "verify":
            self.parts["verify"] -= self._projected
            self.parts["target"] += self._projected
            self._projected = 0.0

    def projecting(self, project: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """The same, timed."""

        def timed(hidden_RD: Tensor) -> Tensor:
            start = self.now()
            logits_RV = project(hidden_RD)
            self._projected += self.now() - start
            return logits_RV

        return timed

    def clear(self) -> None:
        """What the prompt's pass projected is not a step's."""
        self._projected = 0.0


class _Timed:
    """A target whose projections are timed."""

    def __init__(self, target: Target, watch: _Watch) -> None:
        self._target, self._watch = target, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def extend(self, cache: Any, token_BN: Tensor, tree: Tree, needs: Taps) -> tuple[Rows, Features]:
        """One pass."""
        rows, features = self._target.extend(cache, token_BN, tree, needs)
        return Rows(rows.hidden_BND, self._watch.projecting(rows.project)), features


def answer(
    target: Target, prompt: list[int], drafter: Drafter | None, max_new_tokens: int, sampling: Sampling | None = None
) -> Answer:
    """Decode one prompt as `stream` would, with a stop-watch."""
    watch = _Watch(target.device)
    job = prepare(target, prompt, drafter, max_new_tokens, sampling, None)
    job.target = _Timed(target, watch)
    began = watch.restart()
    first = began
    output = None
    accepted: Counter[int] = Counter()
    for number, piece in enumerate(run(job, lap=watch.lap)):
        now = watch.restart()
        if number == 0:
            first = now
            watch.clear()
        else:
            accepted[piece.accepted] += 1
        output = piece.output
    assert output is not None
    return Answer(
        output.token_ids, len(output.token_ids) - 1, output.stats.passes, watch.now() - first, first - began, accepted,
        watch.parts,
    )  # fmt: skip


def race(
    target: Target,
    prompts: Sequence[list[int]],
    arms: Mapping[str, Drafter | None],
    max_new_tokens: int,
    report: Report | None = None,
) -> dict[str, Arm]:
    """All arms on every prompt, in an order that alternates, so that a slow minute of the machine hits all of them."""
    found: dict[str, list[Answer]] = {name: [] for name in arms}
    for drafter in arms.values():
        answer(target, prompts[0], drafter, 8)  # a first pass costs more than the others
    for i, prompt in enumerate(prompts):
        for name in list(arms) if i % 2 == 0 else list(arms)[::-1]:
            found[name].append(answer(target, prompt, arms[name], max_new_tokens))
        if report is not None:
            report(f"{i + 1} of {len(prompts)} prompts timed", (i + 1) / len(prompts))
    return {name: Arm(answers) for name, answers in found.items()}


def speedup(plain: Arm, fast: Arm) -> tuple[float, list[float]]:
    """Ratio of tokens per second, with a 95 % bootstrap interval over prompts (seeded)."""
    pairs = list(zip(plain.answers, fast.answers, strict=True))
    rng = random.Random(0)
    spread = sorted(_ratio(rng.choices(pairs, k=len(pairs))) for _ in range(DRAWS))
    return _ratio(pairs), [spread[int(0.025 * DRAWS)], spread[int(0.975 * DRAWS)]]


def _ratio(pairs: Sequence[tuple[Answer, Answer]]) -> float:
    plain, fast = (Arm(list(side)) for side in zip(*pairs, strict=True))
    return fast.tokens_per_s / max(plain.tokens_per_s, 1e-9)
