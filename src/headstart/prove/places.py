"""Was every emitted token a draw from the target's own law? Exact tests on one run, without a second one.

The law of each emitted token is computed again, by plain passes over the finished text. A token's place in its law,
with the drafted candidates listed first and a random point inside its own stretch (the randomised probability-integral
transform), is uniform on [0, 1] and independent of everything before it if and only if the token was drawn from that
law. So accepting too readily piles places up below the candidates' mass, a wrong residual bends those above it, and a
random number used twice shows between neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

LEAST = 20  # places below which a test says nothing
VARIANCE = 10.0  # of the number of acceptances, below which it is not near enough to a normal law


class Place(NamedTuple):
    """Where a token lies in its law: `at` in [0, 1], candidates first. In the order of ids, which is that of inverse
    transform sampling: `middle` of its stretch, counted from 1/2, and the `variance` of such middles under the law;
    their mean is 0. `mass` of the candidates that were tried; was it one of them?"""

    at: float
    middle: float
    variance: float
    mass: float
    accepted: bool
    possible: bool


def place(law_V: Tensor, token: int, tried: Sequence[int], inside: float) -> Place:
    """`tried` are distinct tokens in the order they were tested; the rest follow by falling probability, then id."""
    p_V = law_V.double()
    p_V = p_V / p_V.sum()
    own = float(p_V[token])
    mass = float(p_V[list(tried)].sum()) if tried else 0.0
    if token in tried:
        before = float(p_V[list(tried[: tried.index(token)])].sum())
    else:
        above_V = p_V > own
        above_V[:token] |= p_V[:token] == own
        above_V[list(tried)] = False
        before = mass + float(p_V[above_V].sum())
    middle = float(p_V[:token].sum()) + own / 2 - 0.5
    variance = (1 - float((p_V**3).sum())) / 12
    return Place(min(before + inside * own, 1.0), middle, variance, mass, token in tried, own > 0)


def kolmogorov(values: Sequence[float]) -> float:
    """p-value of the Kolmogorov-Smirnov test against the uniform law; asymptotic, with Stephens' correction."""
    n = len(values)
    if not n:
        return 1.0
    gap = max((max(i / n - x, x - (i - 1) / n) for i, x in enumerate(sorted(values), 1)), default=0.0)
    t = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * gap
    if t < 0.2:  # the series converges slowly there, and the value is 1 to 20 digits
        return 1.0
    terms = ((1.0 if k % 2 else -1.0) * math.exp(-2 * (k * t) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, 2 * sum(terms)))


def normal(z: float) -> float:
    """Two-sided p-value of a standard normal."""
    return math.erfc(abs(z) / math.sqrt(2))


def mean(values: Sequence[float]) -> float:
    """p-value of the mean of uniform numbers: 1/2 on average, with variance 1/12 each."""
    return normal((sum(values) / len(values) - 0.5) * math.sqrt(12 * len(values)))


def examine(places: Sequence[Sequence[Place]]) -> dict[str, float]:
    """p-values, each uniform if all is well. One sequence of places per answer, in the order of its tokens. A test with
    too few places is left out."""
    flat = [p for answer in places for p in answer]
    tried = [p for p in flat if 0 < p.mass < 1]
    groups = {
        "accepted tokens": [p.at / p.mass for p in flat if p.accepted and p.mass > 0],
        "refused draws": [(p.at - p.mass) / (1 - p.mass) for p in tried if not p.accepted],
        "free draws": [p.at for p in flat if p.mass == 0],
    }
    out: dict[str, float] = {}
    variance = sum(p.mass * (1 - p.mass) for p in tried)
    if variance >= VARIANCE:  # a candidate is taken with its mass, whatever came before: a sum of such is near normal
        out["accepts: number"] = normal(sum(p.accepted - p.mass for p in tried) / math.sqrt(variance))
    for name, values in groups.items():
        if len(values) >= LEAST:
            out |= {f"{name}: law": kolmogorov(values), f"{name}: mean": mean(values)}
    pairs = [(a, b) for answer in places for a, b in pairwise(answer) if a.accepted]
    spread = sum(a.middle**2 * b.variance for a, b in pairs)
    if len(pairs) >= LEAST and spread > 0:  # tokens of one block: the later middle is 0 on average, whatever the first
        out["within a block"] = normal(sum(a.middle * b.middle for a, b in pairs) / math.sqrt(spread))
    return out


def verdict(p_values: dict[str, float], impossible: int) -> float:
    """One p-value: the smallest, times their number; 0 if a token had no mass at all."""
    if impossible:
        return 0.0
    return min([1.0, *(len(p_values) * p for p in p_values.values())])
