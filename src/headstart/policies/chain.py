"""A chain: each node has one child."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.core import Kind, Shape
from headstart.errors import BadInput
from headstart.policies.base import Growing


@dataclass(frozen=True, kw_only=True)
class Chain:
    """`depth` tokens in a row. Kinds point mass and i.i.d.; one draw without replacement is an i.i.d. draw."""

    depth: int = 4
    kind: Kind = Kind.POINT
    shape: Shape = Shape.CHAIN

    def __post_init__(self) -> None:
        """Raises BadInput for an empty chain."""
        if self.depth < 1:
            raise BadInput(f"Chain(depth={self.depth}): expected at least 1.")

    @property
    def nodes(self) -> int:
        """The root counts."""
        return self.depth + 1

    def children(self, depth: int) -> int:
        """One."""
        return 1

    def grow(self, tree: Growing, token_BWK: Tensor, depth: int) -> Growing:
        """Append the first candidate."""
        n_nodes = tree.token_BN.shape[1]
        frontier_BW = torch.full_like(tree.frontier_BW, n_nodes)
        return Growing(
            torch.cat([tree.token_BN, token_BWK[:, :, 0]], 1),
            torch.cat([tree.parent_BN, tree.frontier_BW], 1),
            frontier_BW[:, : int(depth + 1 < self.depth)],
        )
