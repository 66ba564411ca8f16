"""What a draft head is to drafting and to training: both drive the same `begin` and `step`.

Rows are indexed by their *anchor*, the last position whose target feature is known, and by their *depth*: the row at
depth 0 of anchor a has consumed the root (token a + 1), the row at depth j token a + 1 + j. A step at depth d fills
`horizon` slots; slot h is read out as the law of the token at depth d + 1 + h, which is token a + 2 + d + h.
Drafting has one anchor per request and a tree of rows, training every supervised position and a chain of rows each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from headstart.core import Features, Readout, Taps


class Known(NamedTuple):
    """True rows: features `[B, A, D]` and the token after each, padded behind `counts[b]`."""

    next_BA: Tensor
    features: Features
    counts: list[int]


class Frontier(NamedTuple):
    """Rows to step: the tokens they consume, `[B, W]`, and the depth they stand at. Their state has been gathered."""

    token_BW: Tensor
    anchor_BW: Tensor
    depth: int


class Head(nn.Module, ABC):
    """Caches and states are moved, not copied: use only the one returned.

    A state is a NamedTuple of tensors `[B, W, ...]`, all that a row needs of its own ancestors, so that gathering
    rows is all the tree logic there is. The cache holds true rows only and is not changed while drafting.
    """

    config: Any  # a frozen dataclass: what `build` needs beside the sizes
    needs: Taps
    width: int  # D of the target
    alone: bool  # rows see nothing but their own anchor, so anchors of several sequences can be stepped as one

    @abstractmethod
    def empty(self, n_requests: int) -> Any:
        """A cache without rows."""

    @abstractmethod
    def absorb(self, cache: Any, new: Known) -> Any:
        """Take in true rows, in order, without gaps; the last one holds the root."""

    @abstractmethod
    def last(self, cache: Any) -> Tensor:
        """`[B, 1]`: the anchor to draft from."""

    @abstractmethod
    def select(self, cache: Any, requests: Sequence[int]) -> Any:
        """Keep only these requests."""

    @abstractmethod
    def rewind(self, cache: Any, lengths: Sequence[int]) -> Any:
        """Forget all but the first `lengths[b]` rows."""

    @abstractmethod
    def begin(self, cache: Any, anchor_BW: Tensor) -> Any:
        """The state of the rows at depth 0 of these anchors."""

    @abstractmethod
    def horizon(self, depth: int, last: int | None) -> int:
        """Slots that a step at this depth fills; 0: it cannot go on. `last` is the policy's depth, None in training."""

    @abstractmethod
    def step(self, cache: Any, state: Any, frontier: Frontier) -> tuple[Tensor, Any]:
        """One pass of the head: features `[B, W, horizon, F]`, and the state for the rows below."""

    def adopt(self, rows_UD: Tensor, ids_U: Tensor | None) -> None:
        """Let read-outs of its own, if there are any, start as the target's rows of these ids (None: of all)."""
        return

    def readout(self, depth: int) -> Readout | None:
        """The read-out of the token at that depth (1 is the root's child); None borrows the target's LM head."""
        return None
