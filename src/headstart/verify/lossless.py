"""Exact verification for every way of drawing candidates: one walk, the residual rule depends on the kind.

verification.md 5.1 (chain), 5.3 (i.i.d. siblings), 5.4 (without replacement), 5.5 (point mass).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from headstart.core import Kind, Shape, Walk, Why
from headstart.sampling import Coin
from headstart.verify.base import Candidates

EVERYTHING = frozenset((kind, shape) for kind in Kind for shape in Shape)


@dataclass(frozen=True)
class Lossless:
    """The emitted tokens follow the target's law for any drafter that states truly how it drew."""

    name: str = "lossless"
    lossless: bool = True
    exact_for: frozenset[tuple[Kind, Shape]] = EVERYTHING

    def walk(self, tree: Candidates, law: Callable[[int], Tensor], coin: Coin) -> Walk:
        """Try the children of a node in turn; after each refusal the residual loses what it could have given."""
        kept = [0]
        while True:
            node = kept[-1]
            r_V = law(node)  # residual: what is still to be emitted here
            q_V = tree.q(node) if tree.trials[node] and tree.q is not None else None
            tried: list[int] = []
            for child in tree.trials[node]:
                x = tree.tokens[child]
                tried.append(x)
                if q_V is None:  # point mass
                    accepted = coin.accept(float(r_V[x]), 1.0)
                    rest_V = r_V.clone()
                    rest_V[x] = 0
                else:
                    accepted = coin.accept(float(r_V[x]), float(q_V[x]))
                    rest_V = (r_V - q_V.to(r_V)).clamp(min=0)
                if accepted:
                    kept.append(child)
                    break
                r_V = _normalised(rest_V, r_V)
                if tree.kind is Kind.WITHOUT_REPLACEMENT and q_V is not None:
                    q_V = _without(q_V, tried)
            else:
                return Walk(kept, coin.draw(r_V), Why.REFUSED if tree.trials[node] else Why.LEAF)


def _normalised(rest_V: Tensor, before_V: Tensor) -> Tensor:
    """A residual that rounding left without mass falls back to the one before it: q = p refuses with probability 0."""
    mass = rest_V.sum()
    return rest_V / mass if float(mass) > 0 else before_V


def _without(q_V: Tensor, tried: list[int]) -> Tensor:
    """q after the tried tokens were drawn; uniform over untried ones once its mass is gone."""
    q_V = q_V.clone()
    q_V[tried] = 0
    if not float(q_V.sum()) > 0:
        q_V.fill_(1.0)
        q_V[tried] = 0
    mass = q_V.sum()
    return q_V / mass if float(mass) > 0 else q_V
