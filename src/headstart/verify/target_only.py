"""Target-only tree sampling: draw from the target, descend if the token is among the children.

verification.md 5.5. Exact for any distinct candidates chosen without looking at this draw. It spends one draw per
emitted token, as plain decoding does, so the same seed gives the same text with and without a draft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from headstart.core import Kind, Shape, Walk
from headstart.sampling import Coin
from headstart.verify.base import Candidates, greedy_walk


@dataclass(frozen=True)
class TargetOnly:
    """Exact for every kind: how the candidates were drawn plays no role. It accepts less than `Lossless` where
    they were drawn from a law close to the target's, and the same for point mass."""

    name: str = "target-only"
    lossless: bool = True
    exact_for: frozenset[tuple[Kind, Shape]] = frozenset((kind, shape) for kind in Kind for shape in Shape)

    def walk(self, tree: Candidates, law: Callable[[int], Tensor], coin: Coin) -> Walk:
        """The greedy walk with draws in place of argmaxes."""
        return greedy_walk(tree, lambda node: coin.draw(law(node)))
