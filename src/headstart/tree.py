"""Trees of draft nodes as tensors: parents -> depths and ancestor mask; choice paths -> parents. No model here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headstart.errors import BadInput


class Tree(NamedTuple):
    """`depth_BN`: the root has 0. `sees_BNN[b, i, j]`: node i is j or a descendant of j; None for a chain."""

    depth_BN: Tensor
    sees_BNN: Tensor | None


def chain(n_rows: int, n_nodes: int, device: torch.device | str = "cpu") -> Tree:
    """Each node is the child of the one before it: the tree of plain decoding, prefill and chain drafts."""
    return Tree(torch.arange(n_nodes, device=device).expand(n_rows, n_nodes), None)


def from_parents(parent_BN: Tensor) -> Tree:
    """Depths and ancestor mask of any tree; the root is its own parent.

    Doubling: after step k, `sees` holds the ancestors at most 2^k levels up, so log2(N) products are enough.
    """
    n_nodes = parent_BN.shape[1]
    node_N = torch.arange(n_nodes, device=parent_BN.device)
    sees_BNN = (parent_BN[:, :, None] == node_N) | (node_N[:, None] == node_N)
    reach = 1
    while reach < n_nodes:
        step_BNN = sees_BNN.float()
        sees_BNN = torch.bmm(step_BNN, step_BNN) > 0
        reach *= 2
    return Tree(sees_BNN.sum(-1) - 1, sees_BNN)


def from_paths(paths: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Choice paths (Medusa's format: ranks along the path) to `(parent, rank)` per node, root excluded.

    Nodes come level by level, siblings by rank. Raises BadInput if a path is empty, repeated, negative or
    lacks its parent.

    >>> from_paths([(0,), (1,), (0, 0)])   # node 1 and 2 under the root, node 3 under node 1
    [(0, 0), (0, 1), (1, 0)]
    """
    ordered = sorted((tuple(p) for p in paths), key=lambda p: (len(p), p))
    index: dict[tuple[int, ...], int] = {(): 0}
    nodes: list[tuple[int, int]] = []
    for path in ordered:
        if not path or path in index or min(path) < 0:
            raise BadInput(f"Tree path {list(path)} is empty, repeated or negative; give each path of ranks once.")
        if path[:-1] not in index:
            raise BadInput(f"Tree path {list(path)} has no parent: add the path {list(path[:-1])} as well.")
        index[path] = len(nodes) + 1
        nodes.append((index[path[:-1]], path[-1]))
    return nodes
