"""Bugs that speculative decoders have had, put into the user's own model on purpose: a proof that misses one is worth
nothing. Each is a wrapper around the honest part, so the code under proof is the code that runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.core import Features, Kind, Shape, Taps, Walk, Why
from headstart.drafters.base import Drafter
from headstart.sampling import Coin, Sampling, tempered
from headstart.targets.base import Rows, Target
from headstart.tree import Tree
from headstart.verify.base import Candidates, Verifier, greedy_walk

ALL = frozenset((kind, shape) for kind in Kind for shape in Shape)


class Faulty:
    """A target that behaves, except where a subclass says."""

    def __init__(self, target: Target) -> None:
        self._honest = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._honest, name)

    def extend(self, cache: Any, token_BN: Tensor, tree: Tree, needs: Taps) -> tuple[Rows, Features]:
        """Drafts are passes over several nodes behind something committed; all others stay honest."""
        if token_BN.shape[1] == 1 or not min(cache.lengths):
            return self._honest.extend(cache, token_BN, tree, needs)
        return self.drafted(cache, token_BN, tree, needs)

    def drafted(self, cache: Any, token_BN: Tensor, tree: Tree, needs: Taps) -> tuple[Rows, Features]:
        """A pass over a draft."""
        return self._honest.extend(cache, token_BN, tree, needs)


class RowOff(Faulty):
    """Every node is verified with the row of the node before it."""

    def drafted(self, cache: Any, token_BN: Tensor, tree: Tree, needs: Taps) -> tuple[Rows, Features]:
        """Rows moved by one."""
        rows, features = super().drafted(cache, token_BN, tree, needs)
        return Rows(rows.hidden_BND.roll(1, 1), rows.project), features


class PositionOff(Faulty):
    """Drafted nodes sit two positions further on than they should."""

    def drafted(self, cache: Any, token_BN: Tensor, tree: Tree, needs: Taps) -> tuple[Rows, Features]:
        """Depths moved by two behind the root."""
        moved_BN = tree.depth_BN + 2 * (tree.depth_BN > 0)
        return super().drafted(cache, token_BN, tree._replace(depth_BN=moved_BN), needs)


class SiblingsSeen(Faulty):
    """Nodes see all nodes before them instead of their ancestors."""

    def drafted(self, cache: Any, token_BN: Tensor, tree: Tree, needs: Taps) -> tuple[Rows, Features]:
        """A causal mask over the tree."""
        assert tree.sees_BNN is not None
        return super().drafted(cache, token_BN, tree._replace(sees_BNN=torch.ones_like(tree.sees_BNN).tril()), needs)


class WrongKept(Faulty):
    """The cache keeps the first nodes of the draft instead of the accepted ones."""

    def commit(self, cache: Any, kept: Sequence[Sequence[int]]) -> Any:
        """As many, but the first."""
        return self._honest.commit(cache, [range(len(nodes)) for nodes in kept])


@dataclass(frozen=True)
class _Lossy:
    """A verifier that claims what it does not hold: it has to get past the check of its claims."""

    name: str = "a control"
    lossless: bool = True
    exact_for: frozenset[tuple[Kind, Shape]] = ALL


class TooEager(_Lossy):
    """A drafted token is accepted with a quarter more than its probability."""

    def walk(self, tree: Candidates, law: Callable[[int], Tensor], coin: Coin) -> Walk:
        """Target-only, the candidates' mass taken from the others."""

        def stretched(node: int) -> Tensor:
            p_V = law(node).double()
            children = [tree.tokens[c] for c in tree.trials[node]]
            mass = float(p_V[children].sum())
            if 0 < mass < 1:
                more = min(1.25 * mass, 1.0)
                drafted_V = p_V[children] * (more / mass)
                p_V = p_V * ((1 - more) / (1 - mass))
                p_V[children] = drafted_V
            return p_V

        return greedy_walk(tree, lambda node: coin.draw(stretched(node)))


class NoResidual(_Lossy):
    """After a refusal the token is drawn from the whole law, so refused tokens come back."""

    def walk(self, tree: Candidates, law: Callable[[int], Tensor], coin: Coin) -> Walk:
        """Accept by probability; forget what was refused."""
        kept = [0]
        while True:
            p_V = law(kept[-1])
            for child in tree.trials[kept[-1]]:
                if coin.accept(float(p_V[tree.tokens[child]]), 1.0):
                    kept.append(child)
                    break
            else:
                return Walk(kept, coin.draw(p_V), Why.REFUSED if tree.trials[kept[-1]] else Why.LEAF)


@dataclass(frozen=True)
class RawBonus(_Lossy):
    """The token behind a fully accepted draft is drawn from the raw law, without temperature and truncation, as
    released code has done. Decoding has to hand it raw laws; `how` is what it should have done."""

    how: Sampling = field(default_factory=Sampling)

    def walk(self, tree: Candidates, law: Callable[[int], Tensor], coin: Coin) -> Walk:
        """The settings apply at nodes with children only."""

        def settled(node: int) -> Tensor:
            raw_V = law(node)
            return tempered(raw_V.log(), self.how) if tree.trials[node] else raw_V

        return greedy_walk(tree, lambda node: coin.draw(settled(node)))


class OneNumber(_Lossy):
    """All tokens of a block are drawn with the same random number."""

    def walk(self, tree: Candidates, law: Callable[[int], Tensor], coin: Coin) -> Walk:
        """One uniform draw, looked up in every law."""
        spot = (coin.draw(torch.ones(1 << 16)) + 0.5) / (1 << 16)

        def drawn(node: int) -> int:
            total_V = law(node).double().cumsum(0)
            return min(int(torch.searchsorted(total_V, spot * total_V[-1], right=True)), len(total_V) - 1)

        return greedy_walk(tree, drawn)


class Control(NamedTuple):
    """One bug. One of the two makers is given; `applies` says whether the run could show it at all. `raw`: decode
    without settings, the verifier applies them."""

    name: str
    target: Callable[[Target], Any] | None
    verifier: Callable[[Sampling], Verifier] | None
    applies: Callable[[Drafter, Sampling], bool]
    raw: bool = False


def _always(drafter: Drafter, how: Sampling) -> bool:
    return True


def _tree(drafter: Drafter, how: Sampling) -> bool:
    return drafter.shape is Shape.TREE


def _settings(drafter: Drafter, how: Sampling) -> bool:
    return how.temperature != 1 or how.top_p < 1


GREEDY = (
    Control("verified with the row of the node before", RowOff, None, _always),
    Control("drafted nodes at wrong positions", PositionOff, None, _always),
    Control("siblings see each other", SiblingsSeen, None, _tree),
    Control("cache keeps the wrong nodes", WrongKept, None, _tree),
)
SAMPLED = (
    Control("drafted tokens accepted too readily", None, lambda how: TooEager(), _always),
    Control("refused tokens come back", None, lambda how: NoResidual(), _always),
    Control("last token of a block from the raw law", None, lambda how: RawBonus(how=how), _settings, raw=True),
    Control("one random number for a whole block", None, lambda how: OneNumber(), _always),
)
