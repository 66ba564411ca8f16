"""What a drafter asks of a policy: how many candidates per node, and how they grow the tree."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from headstart.core import Kind, Shape


class Growing(NamedTuple):
    """A tree while it is drafted; `frontier_BW` are the nodes that the next level hangs from (W = 0: done)."""

    token_BN: Tensor
    parent_BN: Tensor
    frontier_BW: Tensor


class Policy(Protocol):
    """A frozen value. Topologies of drawn kinds never depend on what was drawn (verification.md 5.10)."""

    @property
    def depth(self) -> int:
        """Longest path below the root."""
        ...

    @property
    def nodes(self) -> int:
        """Nodes of a full tree; the root counts."""
        ...

    @property
    def kind(self) -> Kind:
        """How its candidates are to be chosen for requests that sample."""
        ...

    @property
    def shape(self) -> Shape:
        """Chain or tree."""
        ...

    def children(self, depth: int) -> int:
        """K: candidates asked of each frontier node at this depth."""
        ...

    def grow(self, tree: Growing, token_BWK: Tensor, depth: int) -> Growing:
        """Add the level below the frontier from its candidates, best (or first drawn) first."""
        ...
