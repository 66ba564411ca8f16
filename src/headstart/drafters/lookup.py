"""Prompt lookup: draft what followed the last tokens where they occurred before. No training, no model.

The longest match of the current suffix in prompt + output wins, the most recent one among equals (Saxena's
prompt lookup decoding); with `branches` > 1 further distinct continuations share a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from headstart.core import Budget, Committed, Draft, Kind, Shape, Taps
from headstart.drafters.base import Sprout, from_sprouts
from headstart.errors import BadInput
from headstart.sampling import Coin, Sampling
from headstart.targets.base import Target

RECENT = 64  # earlier occurrences compared at most, so that a frequent n-gram cannot make drafting slow


@dataclass
class _Text:
    """Committed tokens and root of one request, with the positions that follow each `min_ngram`-gram."""

    gram: int
    tokens: list[int] = field(default_factory=list)
    after: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            if len(self.tokens) >= self.gram:
                key = tuple(self.tokens[-self.gram :])
                self.after.setdefault(key, []).append(len(self.tokens))

    def truncated(self, length: int) -> _Text:
        fresh = _Text(self.gram)
        fresh.extend(self.tokens[:length])
        return fresh

    def matches(self, longest: int) -> list[tuple[int, int]]:
        """`(length, start of the continuation)` of earlier occurrences of the suffix, best first."""
        tokens, end = self.tokens, len(self.tokens)
        starts = [s for s in self.after.get(tuple(tokens[-self.gram :]), ())[-RECENT - 1 :] if s < end]
        found = []
        for start in starts:
            length = self.gram
            while length < min(longest, start) and tokens[start - 1 - length] == tokens[end - 1 - length]:
                length += 1
            found.append((length, start))
        return sorted(found, reverse=True)

    def continuation(self, start: int, depth: int) -> list[int]:
        """Tokens from `start` on; past the end of the text it goes on periodically, as a loop would."""
        end = len(self.tokens)
        out: list[int] = []
        for i in range(start, start + depth):
            out.append(self.tokens[i] if i < end else out[i - end])
        return out


@dataclass(frozen=True, kw_only=True)
class PromptLookup:
    """A drafter of n-gram matches over prompt and output.

    A match of m tokens drafts `growth * m + 1` tokens, `depth` at most: the longer the match, the likelier that it
    goes on. min_ngram: shortest suffix that counts as a match; max_ngram: longest compared. branches: 1 drafts a
    chain; more draft up to that many continuations as one tree of `nodes` nodes. Defaults: docs/log.md.
    """

    depth: int = 16
    growth: int = 2
    min_ngram: int = 1
    max_ngram: int = 16
    branches: int = 1
    nodes: int = 32

    def __post_init__(self) -> None:
        """Raises BadInput for settings that can never draft."""
        for name in ("depth", "growth", "min_ngram", "branches", "nodes"):
            if getattr(self, name) < 1:
                raise BadInput(f"PromptLookup({name}={getattr(self, name)}): expected at least 1.")
        if self.max_ngram < self.min_ngram:
            raise BadInput(f"PromptLookup: max_ngram={self.max_ngram} is below min_ngram={self.min_ngram}.")

    @property
    def needs(self) -> Taps:
        """No hidden states."""
        return Taps()

    @property
    def kind(self) -> Kind:
        """The matches are taken as they are."""
        return Kind.POINT

    @property
    def verifier(self) -> None:
        """Any exact one."""
        return None

    @property
    def shape(self) -> Shape:
        """A chain unless there are branches."""
        return Shape.CHAIN if self.branches == 1 else Shape.TREE

    def check(self, target: Target) -> None:
        """Any target that can roll back; trees need one that takes them."""

    def start(self, n_requests: int) -> list[_Text]:
        """Empty texts."""
        return [_Text(self.min_ngram) for _ in range(n_requests)]

    def absorb(self, state: list[_Text], new: Committed) -> list[_Text]:
        """Append what was committed and the new root; what stood there as root is the first of the new tokens."""
        return [self._absorbed(*row) for row in zip(state, new.tokens, new.roots, strict=True)]

    def draft(self, state: list[_Text], budget: Budget, sampling: Sequence[Sampling], coins: Sequence[Coin]) -> Draft:
        """Continuations of the best matches."""
        sprouts = [self._sprout(text, depth, budget.nodes) for text, depth in zip(state, budget.depth, strict=True)]
        return from_sprouts(sprouts, torch.device("cpu"))

    def select(self, state: list[_Text], requests: Sequence[int]) -> list[_Text]:
        """Keep only these requests."""
        return [state[r] for r in requests]

    def rewind(self, state: list[_Text], lengths: Sequence[int]) -> list[_Text]:
        """Index the shorter texts anew; the token at `length` stays as the root."""
        return [text.truncated(length + 1) for text, length in zip(state, lengths, strict=True)]

    def _absorbed(self, text: _Text, tokens: list[int], root: int) -> _Text:
        old_root = text.tokens[-1:]
        if old_root and old_root != tokens[:1]:  # after a rewind another token follows
            text, old_root = text.truncated(len(text.tokens) - 1), []
        text.extend(tokens[len(old_root) :])
        text.extend([root])
        return text

    def _sprout(self, text: _Text, depth: int, nodes: int) -> Sprout:
        sprout = Sprout([text.tokens[-1]], [0])
        child: dict[tuple[int, int], int] = {}  # (node, token) -> its child: continuations share prefixes
        branches = 0
        for match, start in text.matches(self.max_ngram):
            if branches == self.branches:
                break
            node, grew = 0, False
            for token in text.continuation(start, min(self.depth, depth, self.growth * match + 1)):
                if (node, token) not in child:
                    if len(sprout.tokens) >= min(self.nodes, nodes):
                        return sprout
                    child[node, token] = len(sprout.tokens)
                    sprout.tokens.append(token)
                    sprout.parents.append(node)
                    grew = True
                node = child[node, token]
            branches += grew
        return sprout
