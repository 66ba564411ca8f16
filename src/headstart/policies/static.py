"""A static tree: the same topology every step, given as paths of ranks (Medusa's choices)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headstart.core import Kind, Shape
from headstart.errors import BadInput
from headstart.policies.base import Growing
from headstart.tree import from_paths


@dataclass(frozen=True, kw_only=True)
class StaticTree:
    """`paths` holds one path of ranks per node: `(0,)` is the best child of the root, `(0, 1)` its second child.

    For drawn kinds a rank is the order of drawing. Raises BadInput if a path lacks its parent, or, without
    replacement, an elder sibling: a draw that is withheld has still shaped the later ones (verification.md 5.10).
    """

    paths: Sequence[Sequence[int]]
    kind: Kind = Kind.POINT
    shape: Shape = Shape.TREE
    _levels: tuple[tuple[tuple[int, int], ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Sort the nodes into levels once."""
        object.__setattr__(self, "paths", tuple(sorted((tuple(p) for p in self.paths), key=lambda p: (len(p), p))))
        if not self.paths:
            raise BadInput("StaticTree(paths=[]): expected at least one path, (0,) for example.")
        depth = max(map(len, self.paths))
        nodes = list(zip(self.paths, from_paths(self.paths), strict=True))
        levels = tuple(tuple(node for path, node in nodes if len(path) == d + 1) for d in range(depth))
        object.__setattr__(self, "_levels", levels)
        gaps = [p for p in self.paths if p[-1] and (*p[:-1], p[-1] - 1) not in self.paths]
        if gaps and self.kind is Kind.WITHOUT_REPLACEMENT:
            raise BadInput(f"Tree path {list(gaps[0])} skips a rank; drawn without replacement, all ranks count.")

    @property
    def depth(self) -> int:
        """Longest path."""
        return len(self._levels)

    @property
    def nodes(self) -> int:
        """The root counts."""
        return len(self.paths) + 1

    def children(self, depth: int) -> int:
        """The largest rank used at this depth, plus one."""
        return 1 + max(rank for _, rank in self._levels[depth])

    def grow(self, tree: Growing, token_BWK: Tensor, depth: int) -> Growing:
        """Place the candidates that this level's paths name."""
        level = self._levels[depth]
        device = tree.token_BN.device
        frontier = self._inner(depth)
        row = torch.tensor([frontier.index(parent) for parent, _ in level], device=device)
        rank = torch.tensor([rank for _, rank in level], device=device)
        parent_BW = torch.tensor([parent for parent, _ in level], device=device).expand(len(tree.token_BN), -1)
        inner = self._inner(depth + 1) if depth + 1 < self.depth else []
        return Growing(
            torch.cat([tree.token_BN, token_BWK[:, row, rank]], 1),
            torch.cat([tree.parent_BN, parent_BW], 1),
            torch.tensor(inner, dtype=torch.long, device=device).expand(len(tree.token_BN), -1),
        )

    def _inner(self, depth: int) -> list[int]:
        """Nodes at `depth` that have children: the frontier from which level `depth` hangs."""
        return sorted({parent for parent, _ in self._levels[depth]})
