"""How many nodes of a head's tree pay on this machine: tokens per step by replay against the time of a step.

A larger tree is right more often and costs more to verify. Both are measured here, by no table of other machines.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headstart.core import Budget, Report
from headstart.drafters.base import Drafter
from headstart.evaluate.cost import target_cost
from headstart.replay import Spoken, first_state, replay
from headstart.sampling import Coin, Sampling
from headstart.targets.base import Target

SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CONTEXT = 256
ROUNDS = 9


class Size(NamedTuple):
    """One size of the tree. `speedup` is modelled: tokens per step times a plain step over a drafted one; what the
    loop adds to both is not in it."""

    nodes: int
    tokens_per_step: float
    target_ms: float
    draft_ms: float
    speedup: float


def sizes(
    target: Target,
    make: Callable[[int], Drafter],
    texts: Sequence[Spoken],
    largest: int,
    report: Report | None = None,
) -> list[Size]:
    """Every size up to `largest` nodes, best first. `make` builds the drafter with a tree of so many nodes; `texts`
    are answers of the target's, with what the head reads."""
    counts = sorted({*(n for n in SIZES if n < largest), largest})
    context = max(1, min(CONTEXT, target.can.max_positions - largest))
    cost = target_cost(target, (context,), (1, *counts), report=report)[context]
    out = []
    for i, nodes in enumerate(counts):
        if report is not None:
            report(f"trees of {nodes} nodes", i / len(counts))
        drafter = make(nodes)
        rate = replay(drafter, texts).tokens_per_step
        draft = draft_ms(drafter, texts[0])
        out.append(Size(nodes, rate, cost[nodes], draft, rate * cost[1] / (cost[nodes] + draft)))
    return sorted(out, key=lambda size: (-size.speedup, size.nodes))


def draft_ms(drafter: Drafter, text: Spoken, rounds: int = ROUNDS) -> float:
    """Median milliseconds of a draft behind the prompt of a stored answer."""
    state = first_state(drafter, [text])
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        drafter.draft(state, Budget([1024], 1024), [Sampling()], [Coin(0)]).token_BN.tolist()
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds[1:])
