"""Static trees grown from what was measured (Medusa, section 2.3.3): repeatedly add the best node that fits.

A node is a path of ranks: (0, 2) is the third guess of head 2 below the first guess of head 1. Its value is how often
the whole path is right, so a tree's values add up to its expected accepted length. A node is never worth more than its
parent, so greedy growth finds the best tree of every size, each a prefix of the next.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from headstart.errors import BadInput

Path = tuple[int, ...]
NEVER = -1  # rank of a token that is not among the guesses


def by_accuracy(accuracy_DR: Sequence[Sequence[float]]) -> Callable[[Path], float]:
    """Value under independence (the paper's): the product of `accuracy_DR[depth][rank]`, per rank, not cumulative.
    Ranks and depths that were not measured are worth nothing."""
    accuracy = {(depth, rank): x for depth, row in enumerate(accuracy_DR) for rank, x in enumerate(row)}
    return lambda path: math.prod(accuracy.get(place, 0.0) for place in enumerate(path))


def by_paths(ranks: Iterable[Sequence[int]]) -> Callable[[Path], float]:
    """Value as counted: the share of positions at which the path was right; `ranks[i]` are the true tokens' ranks at
    depth 1, 2, ... of position i, NEVER where the token was not among the guesses."""
    count: Counter[Path] = Counter()
    total = 0
    for row in ranks:
        total += 1
        for depth in range(1, len(row) + 1):
            if row[depth - 1] == NEVER:
                break
            count[tuple(row[:depth])] += 1
    return lambda path: count[path] / max(total, 1)


def grow(value: Callable[[Path], float], nodes: int, depth: int, children: int) -> list[Path]:
    """Paths in the order they are added, at most `nodes - 1` (the root counts); those worth nothing are left out.

    The published search offers a node's next sibling and first child (62 additions, depth 5, 10 children). Counted
    values need not fall from one rank to the next, so here all children of a node are offered with it.
    """
    if nodes < 2 or depth < 1 or children < 1:
        raise BadInput(f"A tree of {nodes} nodes, depth {depth} and {children} children: at least 2, 1 and 1.")
    frontier: list[tuple[float, Path]] = []

    def offer(parent: Path) -> None:
        for rank in range(children if len(parent) < depth else 0):
            worth = value((*parent, rank))
            if worth > 0:
                heapq.heappush(frontier, (-worth, (*parent, rank)))

    offer(())
    paths: list[Path] = []
    while frontier and len(paths) < nodes - 1:
        _, path = heapq.heappop(frontier)
        paths.append(path)
        offer(path)
    return paths or [(0,)]


def expected(value: Callable[[Path], float], paths: Iterable[Path]) -> float:
    """Expected accepted length of a tree; tokens per step are one more."""
    return sum(map(value, paths))
