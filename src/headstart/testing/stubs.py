"""Stub drafters that know what the target will say, so that tests can force any accept length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from headstart.core import Budget, Committed, Draft, Kind, Shape, Taps
from headstart.drafters.base import Sprout, from_sprouts
from headstart.errors import BadInput
from headstart.sampling import Coin, Sampling
from headstart.targets.base import Target
from headstart.tree import chain


class _Foresight:
    """The greedy continuation of one request, computed with the target itself and remembered while it holds."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._cache: Any = target.empty(1)
        self._cached: list[int] = []  # tokens that the cache holds
        self._known: list[int] = []  # tokens, each but the first ones the greedy choice after those before it
        self.tokens: list[int] = []  # committed tokens and root
        self.steps = 0

    def ahead(self, depth: int) -> list[int]:
        """The next `depth` greedy tokens after the root."""
        if self._known[: len(self.tokens)] != self.tokens:
            self._known = list(self.tokens)
        while len(self._known) < len(self.tokens) + depth:
            self._known.append(self._next())
        return self._known[len(self.tokens) : len(self.tokens) + depth]

    def _next(self) -> int:
        shared = 0
        while shared < min(len(self._cached), len(self._known) - 1) and self._cached[shared] == self._known[shared]:
            shared += 1
        self._cache = self._target.rewind(self._cache, [shared])
        run = self._known[shared:]
        device = self._target.device
        rows, _ = self._target.extend(
            self._cache, torch.tensor([run], device=device), chain(1, len(run), device), Taps()
        )
        self._cache = self._target.commit(self._cache, [range(len(run))])
        self._cached = list(self._known)
        return int(rows.at(torch.tensor([len(run) - 1], device=device)).argmax_BN()[0, 0])


class Mixed:
    """Right for `accepts[step]` tokens, then wrong, cycled over the steps of each request.

    `accepts` holds one list for all requests or one list per request (by its number at the start). `width` > 1
    makes a tree: every level gets width - 1 wrong siblings, drafted before the right node.
    """

    needs = Taps()
    kind = Kind.POINT
    verifier = None

    def __init__(
        self, target: Target, depth: int, accepts: Sequence[int] | Sequence[Sequence[int]], width: int = 1
    ) -> None:
        """Raises BadInput for an empty pattern or accept lengths outside 0..depth."""
        self.target, self.depth, self.width = target, depth, width
        rows = [accepts] if isinstance(accepts[0], int) else accepts
        self.accepts: list[list[int]] = [list(row) for row in rows]  # type: ignore[arg-type]
        if depth < 1 or width < 1 or any(not 0 <= a <= depth for row in self.accepts for a in row):
            raise BadInput(f"{type(self).__name__}: expected depth, width >= 1 and accept lengths within 0..{depth}.")

    @property
    def shape(self) -> Shape:
        """A chain if the width is 1."""
        return Shape.CHAIN if self.width == 1 else Shape.TREE

    def check(self, target: Target) -> None:
        """Raises BadInput if it looks ahead with a target of another vocabulary."""
        target.vocabulary.demand_same(self.target.vocabulary, f"The stub drafter {type(self).__name__}")

    def start(self, n_requests: int) -> list[tuple[int, _Foresight]]:
        """Request numbers with nothing absorbed."""
        return [(b, _Foresight(self.target)) for b in range(n_requests)]

    def absorb(self, state: list[tuple[int, _Foresight]], new: Committed) -> list[tuple[int, _Foresight]]:
        """Append the committed tokens and the root."""
        for (_, sight), tokens, root in zip(state, new.tokens, new.roots, strict=True):
            sight.tokens = [*sight.tokens[:-1], *tokens, root]
        return state

    def draft(
        self, state: list[tuple[int, _Foresight]], budget: Budget, sampling: Sequence[Sampling], coins: Sequence[Coin]
    ) -> Draft:
        """The right path up to the accept length of this step, wrong tokens below and beside it."""
        sprouts = [
            self._sprout(number, sight, min(depth, self.depth), budget.nodes)
            for (number, sight), depth in zip(state, budget.depth, strict=True)
        ]
        return from_sprouts(sprouts, self.target.device)

    def select(self, state: list[tuple[int, _Foresight]], requests: Sequence[int]) -> list[tuple[int, _Foresight]]:
        """Keep only these requests."""
        return [state[r] for r in requests]

    def rewind(self, state: list[tuple[int, _Foresight]], lengths: Sequence[int]) -> list[tuple[int, _Foresight]]:
        """Shorten to the tokens and the one after them."""
        for (_, sight), length in zip(state, lengths, strict=True):
            sight.tokens = sight.tokens[: length + 1]
        return state

    def _sprout(self, number: int, sight: _Foresight, depth: int, nodes: int) -> Sprout:
        pattern = self.accepts[number % len(self.accepts)]
        right = pattern[sight.steps % len(pattern)]
        sight.steps += 1
        truth = sight.ahead(min(depth, self.depth))
        sprout, node = Sprout([sight.tokens[-1]], [0]), 0
        for level, token in enumerate(truth):
            siblings = [self._other(token, shift) for shift in range(1, self.width)]
            best = token if level < right else self._other(token, self.width)
            if len(sprout.tokens) + self.width > nodes:
                break
            sprout.tokens.extend([*siblings, best])
            sprout.parents.extend([node] * self.width)
            node = len(sprout.tokens) - 1
        return sprout

    def _other(self, token: int, shift: int) -> int:
        return (token + shift) % self.target.vocabulary.size


class Oracle(Mixed):
    """Proposes exactly the target's greedy continuation: every step emits depth + 1 tokens."""

    def __init__(self, target: Target, depth: int, width: int = 1) -> None:
        super().__init__(target, depth, [depth], width)


class Wrong(Mixed):
    """Proposes a token that greedy decoding will not pick: every step emits one token."""

    def __init__(self, target: Target, depth: int, width: int = 1) -> None:
        super().__init__(target, depth, [0], width)
