"""Growing static trees: the best tree of every size, checked against all trees and against the published search."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest

import headstart as hs
from headstart.errors import BadInput
from headstart.tree import from_paths
from headstart.tune.tree import NEVER, Path, by_accuracy, by_paths, expected, grow

Value = Callable[[Path], float]


def table(depth: int, children: int, seed: int, falling: bool = False) -> list[list[float]]:
    """Accuracy per depth and rank; a row adds up to less than one."""
    rng = random.Random(seed)
    rows = [[rng.random() for _ in range(children)] for _ in range(depth)]
    return [[x / sum(row) * 0.9 for x in (sorted(row, reverse=True) if falling else row)] for row in rows]


def observed(depth: int, children: int, seed: int, positions: int = 60) -> list[list[int]]:
    """Ranks as a head's evaluation gives them; heads err together, so depths are not independent."""
    rng = random.Random(seed)
    rows = []
    for _ in range(positions):
        worst = rng.choice([1, 2, children + 1])
        row = [rng.randrange(worst + 1) for _ in range(rng.randint(1, depth))]
        rows.append([rank if rank < children else NEVER for rank in row])
    return rows


def every_tree(nodes: int, depth: int, children: int) -> set[frozenset[Path]]:
    """All sets of `nodes - 1` paths that hold each path's parent."""
    found: set[frozenset[Path]] = {frozenset()}
    for _ in range(nodes - 1):
        found = {
            tree | {child}
            for tree in found
            for parent in (*tree, ())
            if len(parent) < depth
            for rank in range(children)
            if (child := (*parent, rank)) not in tree
        }
    return found


VALUES: dict[str, Callable[[int], Value]] = {
    "independent": lambda seed: by_accuracy(table(3, 3, seed)),
    "counted": lambda seed: by_paths(observed(3, 3, seed)),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("nodes", [2, 3, 5, 6])
@pytest.mark.parametrize("name", list(VALUES))
def test_no_tree_of_that_size_is_worth_more(name: str, nodes: int, seed: int) -> None:
    for depth, children in ((3, 2), (2, 3), (1, 4), (3, 1)):
        value = VALUES[name](seed)
        grown = grow(value, nodes, depth, children)
        trees = every_tree(min(nodes, 1 + sum(children**d for d in range(1, depth + 1))), depth, children)
        best = max(expected(value, tree) for tree in trees)
        assert expected(value, grown) == pytest.approx(best)
        assert all(len(path) <= depth and max(path) < children for path in grown)
        assert len(grown) == len(set(grown)) <= nodes - 1
        from_paths(grown)  # every path has its parent


@pytest.mark.parametrize("name", list(VALUES))
def test_every_tree_is_the_beginning_of_the_next(name: str) -> None:
    value = VALUES[name](9)
    trees = [grow(value, nodes, 3, 3) for nodes in range(2, 40)]
    for small, large in itertools.pairwise(trees):
        assert large[: len(small)] == small
    worths = [value(path) for path in trees[-1]]
    assert worths == sorted(worths, reverse=True)
    assert len(trees[-1]) > 15


def published(accuracy: Sequence[Sequence[float]], count: int, depth: int, children: int) -> list[Path]:
    """The search of the Medusa repository, written anew: of the next sibling and the first child of what stands."""

    def worth(path: Path) -> float:
        return math.prod(accuracy[d][rank] for d, rank in enumerate(path))

    chosen: list[Path] = []
    offered: list[tuple[float, Path]] = [(-worth((0,)), (0,))]
    while len(chosen) < count and offered:
        _, path = heapq.heappop(offered)
        chosen.append(path)
        if path[-1] + 1 < children:
            sibling = (*path[:-1], path[-1] + 1)
            heapq.heappush(offered, (-worth(sibling), sibling))
        if len(path) < depth:
            heapq.heappush(offered, (-worth((*path, 0)), (*path, 0)))
    return chosen


@pytest.mark.parametrize("seed", range(5))
def test_63_nodes_are_those_of_the_published_search(seed: int) -> None:
    accuracy = table(5, 10, seed, falling=True)
    assert grow(by_accuracy(accuracy), 63, 5, 10) == published(accuracy, 62, 5, 10)


def test_where_a_later_rank_is_better_it_is_not_missed() -> None:
    """Counted values need not fall from rank to rank; the published search would take (0,) first."""
    accuracy = [[0.1, 0.6, 0.2], [0.2, 0.1, 0.6]]
    assert grow(by_accuracy(accuracy), 4, 2, 3) == [(1,), (1, 2), (2,)]


# --- values ------------------------------------------------------------------------------------------------


def test_independent_values_by_hand() -> None:
    value = by_accuracy([[0.5, 0.2], [0.4, 0.1, 0.3]])
    assert value((0,)) == 0.5
    assert value((1, 2)) == pytest.approx(0.06)
    assert value((2,)) == value((0, 3)) == 0.0  # no such rank was measured
    assert value((0, 0, 0)) == 0.0  # nor such a depth
    assert grow(value, 99, 5, 5) == [(0,), (0, 0), (1,), (0, 2), (1, 0), (1, 2), (0, 1), (1, 1)]


RANKS = [[0, 0], [0, 1], [0, NEVER], [1, 0], [NEVER, 0], [0], [], [2], [0, 0, 1]]


def test_counted_values_by_hand() -> None:
    """A path counts where all of it was right: after a token that was not guessed nothing is drafted."""
    value = by_paths(RANKS)
    want = {(0,): 5, (1,): 1, (2,): 1, (0, 0): 2, (0, 1): 1, (1, 0): 1, (0, 0, 1): 1}
    for depth in (1, 2, 3):
        for path in itertools.product(range(4), repeat=depth):
            assert value(path) == want.get(path, 0) / 9
    assert value((NEVER,)) == value((NEVER, 0)) == value((0, NEVER)) == 0.0


def test_the_expected_length_is_the_mean_over_positions() -> None:
    """What a tree's values add up to is what walking it along every counted position gives."""
    ranks = observed(3, 3, 4)
    paths = grow(by_paths(ranks), 14, 3, 3)
    lengths = [sum(tuple(row[:d]) in paths for d in range(1, len(row) + 1)) for row in ranks]
    assert expected(by_paths(ranks), paths) == pytest.approx(sum(lengths) / len(ranks))
    assert set(lengths) == {0, 1, 2, 3}


def test_a_tree_may_stay_smaller_than_asked() -> None:
    assert grow(by_paths(RANKS), 64, 5, 10) == [(0,), (0, 0), (0, 0, 1), (0, 1), (1,), (1, 0), (2,)]
    assert grow(by_paths(RANKS), 64, 1, 2) == [(0,), (1,)]


@pytest.mark.parametrize("ranks", [[], [[NEVER], [NEVER, 0]], [[]]])
def test_a_head_that_is_never_right_still_drafts_its_best(ranks: list[list[int]]) -> None:
    paths = grow(by_paths(ranks), 16, 4, 4)
    assert paths == [(0,)]
    assert hs.StaticTree(paths=paths).nodes == 2


@pytest.mark.parametrize(("nodes", "depth", "children"), [(1, 2, 2), (2, 0, 2), (2, 2, 0)])
def test_sizes_without_a_tree_are_refused(nodes: int, depth: int, children: int) -> None:
    with pytest.raises(BadInput, match=f"{nodes} nodes, depth {depth} and {children} children"):
        grow(by_paths(RANKS), nodes, depth, children)
