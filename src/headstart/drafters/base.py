"""What decoding knows of a drafter, and drafts built on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from headstart.core import Budget, Committed, Draft, Kind, Shape, Taps
from headstart.sampling import Coin, Sampling
from headstart.targets.base import Target
from headstart.verify.base import Verifier


class Drafter(Protocol):
    """Proposes tokens. States are moved, not copied: use only the one returned.

    `kind` and `shape` state what its drafts are for requests that sample; greedy requests take any draft.
    """

    @property
    def needs(self) -> Taps:
        """Hidden states wanted from every target pass."""
        ...

    @property
    def kind(self) -> Kind:
        """How candidates are chosen."""
        ...

    @property
    def shape(self) -> Shape:
        """Chain or tree."""
        ...

    @property
    def verifier(self) -> Verifier | None:
        """The verifier to use where the caller names none; None: an exact one for `kind`."""
        ...

    def check(self, target: Target) -> None:
        """Raises BadInput or Unsupported if this drafter cannot serve that target."""
        ...

    def start(self, n_requests: int) -> Any:
        """A state in which nothing has been absorbed."""
        ...

    def absorb(self, state: Any, new: Committed) -> Any:
        """Take in what the target committed, in order, without gaps."""
        ...

    def draft(self, state: Any, budget: Budget, sampling: Sequence[Sampling], coins: Sequence[Coin]) -> Draft:
        """Propose a tree under each request's root, within the budget."""
        ...

    def select(self, state: Any, requests: Sequence[int]) -> Any:
        """Keep only these requests."""
        ...

    def rewind(self, state: Any, lengths: Sequence[int]) -> Any:
        """Forget all but the first `lengths[b]` absorbed tokens and the root; an absorb follows before a draft."""
        ...


class Sprout(NamedTuple):
    """One request's draft as host lists: node 0 is the root, `parents[0]` is 0, parents come before children."""

    tokens: list[int]
    parents: list[int]

    @property
    def is_chain(self) -> bool:
        """True if each node is the child of the one before it."""
        return all(parent == max(node - 1, 0) for node, parent in enumerate(self.parents))


def from_sprouts(sprouts: Sequence[Sprout], device: torch.device) -> Draft:
    """A point-mass draft for the batch, padded to its largest tree."""
    width = max(len(s.tokens) for s in sprouts)
    chain = all(s.is_chain for s in sprouts)

    def padded(rows: list[list[int]], fill: list[int]) -> Tensor:
        return torch.tensor([row + fill[len(row) :] for row in rows]).to(device)

    filler_parents = [max(i - 1, 0) if chain else 0 for i in range(width)]
    return Draft(
        token_BN=padded([s.tokens for s in sprouts], [0] * width),
        parent_BN=padded([s.parents for s in sprouts], filler_parents),
        valid_BN=padded([[1] * len(s.tokens) for s in sprouts], [0] * width).bool(),
        chain=chain,
    )


class Plain:
    """No draft at all: the root alone, so that plain decoding is the same loop."""

    needs = Taps()
    kind = Kind.POINT
    shape = Shape.CHAIN
    verifier = None

    def __init__(self) -> None:
        self._device = torch.device("cpu")

    def check(self, target: Target) -> None:
        """Any target will do."""
        self._device = target.device

    def start(self, n_requests: int) -> list[int]:
        """The state is the roots."""
        return [0] * n_requests

    def absorb(self, state: list[int], new: Committed) -> list[int]:
        """Remember the roots."""
        return list(new.roots)

    def draft(self, state: list[int], budget: Budget, sampling: Sequence[Sampling], coins: Sequence[Coin]) -> Draft:
        """The roots."""
        return from_sprouts([Sprout([root], [0]) for root in state], self._device)

    def select(self, state: list[int], requests: Sequence[int]) -> list[int]:
        """Keep only these requests."""
        return [state[r] for r in requests]

    def rewind(self, state: list[int], lengths: Sequence[int]) -> list[int]:
        """Nothing to forget."""
        return state
