from __future__ import annotations

import pytest
import torch

import headstart as hs
from headstart.core import Kind
from headstart.errors import BadInput
from headstart.testing import tiny_target
from headstart.tree import chain, from_parents, from_paths

PATHS = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)]


def test_paths_to_parents() -> None:
    assert from_paths(PATHS) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (4, 0), (4, 1)]


@pytest.mark.parametrize("paths", [[()], [(0, 0)], [(0,), (0,)], [(-1,)]])
def test_paths_that_make_no_tree_are_refused(paths: list[tuple[int, ...]]) -> None:
    with pytest.raises(BadInput):
        from_paths(paths)


def test_the_mask_is_the_ancestors() -> None:
    torch.manual_seed(0)
    parents = torch.tensor([[0] + [int(torch.randint(0, i, ())) for i in range(1, 40)] for _ in range(3)])
    tree = from_parents(parents)
    for b in range(3):
        for node in range(40):
            line = {node}
            while node:
                node = int(parents[b, node])
                line.add(node)
            at = max(line)
            assert tree.sees_BNN is not None
            assert set(tree.sees_BNN[b, at].nonzero()[:, 0].tolist()) == line
            assert int(tree.depth_BN[b, at]) == len(line) - 1


def test_a_chain_is_its_own_tree() -> None:
    tree = from_parents(torch.tensor([[0, 0, 1, 2, 3]]))
    assert torch.equal(tree.depth_BN, chain(1, 5).depth_BN)
    assert torch.equal(tree.sees_BNN[0], torch.ones(5, 5, dtype=torch.bool).tril())  # type: ignore[index]


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("tree", [False, True])
def test_a_draft_model_equal_to_the_target_is_always_right(kind: Kind, tree: bool) -> None:
    target = tiny_target()
    policy = hs.StaticTree(paths=PATHS, kind=kind) if tree else hs.Chain(depth=3, kind=kind)
    fast = hs.generate(target, "twice the same", drafter=hs.DraftModel(target, policy), max_new_tokens=41)
    assert fast.token_ids == hs.generate(target, "twice the same", max_new_tokens=41).token_ids
    assert set(fast.stats.accepted) == {3}
    assert fast.stats.tokens_per_step == 4.0


def test_a_different_draft_model_changes_nothing() -> None:
    target, other = tiny_target(), tiny_target(seed=5)
    plain = hs.generate(target, ["one", "another one"], max_new_tokens=30)
    for policy in (hs.Chain(depth=4, kind=Kind.IID), hs.StaticTree(paths=PATHS, kind=Kind.POINT)):
        fast = hs.generate(target, ["one", "another one"], drafter=hs.DraftModel(other, policy), max_new_tokens=30)
        assert [o.token_ids for o in fast] == [o.token_ids for o in plain]


def test_a_static_tree_is_a_value() -> None:
    assert hs.StaticTree(paths=PATHS) == hs.StaticTree(paths=PATHS[::-1])
    assert hs.StaticTree(paths=PATHS).depth == 3
    assert hs.StaticTree(paths=PATHS).nodes == 9
