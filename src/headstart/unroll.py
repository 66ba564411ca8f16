"""From whole sequences to what a head says of every supervised position: the calls that drafting makes, in training.

    Independent        one step from each anchor (Medusa)
    SelfFed(steps)     the head is fed its own states, as when drafting; `detach` stops the gradient between steps
    Forced(steps)      deeper rows start from the true feature of the position before them, as some papers train

Tokens along a path come from the data in all three.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from headstart.core import Features
from headstart.heads.base import Frontier, Head, Known


class Batch(NamedTuple):
    """Sequences `[B, T]` padded on the right, with the target's features `[B, T, D]` of every position.

    `supervised_BT[b, t]`: token t is one that the head should learn to guess. False in the padding.
    """

    token_BT: Tensor
    supervised_BT: Tensor
    features: Features
    lengths: list[int]


class Said(NamedTuple):
    """A head's features `[S, F]` for the tokens `label_S` at one depth, and where those stand (`[S]` each)."""

    depth: int
    feature_SF: Tensor
    label_S: Tensor
    row_S: Tensor
    position_S: Tensor


class Unroll(Protocol):
    """How deeper rows are fed."""

    @property
    def steps(self) -> int | None:
        """Steps from each anchor; None: as many as the head can go on without being asked again."""
        ...

    def fed(self, head: Head, cache: Any, state: Any, ahead_BW: Tensor, depth: int) -> Any:
        """The state that the step at this depth starts from. `ahead_BW`: the positions `depth` behind the anchors."""
        ...


@dataclass(frozen=True)
class Independent:
    """One step from each anchor."""

    steps: int | None = 1

    def fed(self, head: Head, cache: Any, state: Any, ahead_BW: Tensor, depth: int) -> Any:
        """As begun."""
        return state


@dataclass(frozen=True, kw_only=True)
class SelfFed:
    """The head's own states; `detach` cuts the gradient between steps."""

    steps: int | None
    detach: bool = False

    def fed(self, head: Head, cache: Any, state: Any, ahead_BW: Tensor, depth: int) -> Any:
        """As the step before left it."""
        return type(state)(*(x.detach() for x in state)) if self.detach and depth else state


@dataclass(frozen=True, kw_only=True)
class Forced:
    """Every step starts from a true feature: the one at its depth behind the anchor."""

    steps: int | None

    def fed(self, head: Head, cache: Any, state: Any, ahead_BW: Tensor, depth: int) -> Any:
        """As begun from the position that far ahead."""
        return state if depth == 0 else head.begin(cache, ahead_BW)


def unroll(head: Head, how: Unroll, batch: Batch, depths: int) -> list[Said]:
    """One entry per depth 1..depths. The mask follows the label (bugs.md B21): the row of anchor a predicts token
    a + 1 + d at depth d, and counts if that token is supervised."""
    within = [_ahead(batch.supervised_BT, d + 1) for d in range(1, depths + 1)]
    counts_BT = torch.stack(within).any(0)
    row_S, anchor_S = counts_BT.nonzero(as_tuple=True)
    if head.alone:  # rows do not see each other: step all anchors of all sequences as one request's
        cache = head.absorb(head.empty(1), _flat(batch))
        anchor_BW = (row_S * batch.token_BT.shape[1] + anchor_S)[None]
        place: tuple[Tensor, Tensor] = torch.zeros_like(row_S), torch.arange(len(row_S), device=row_S.device)
        token_BT = batch.token_BT.reshape(1, -1)
    else:
        cache = head.absorb(head.empty(len(batch.lengths)), _known(batch))
        anchor_BW, place = _padded(counts_BT, row_S, anchor_S)
        token_BT = batch.token_BT
    if not len(row_S):
        return []
    said: list[Said] = []
    state = head.begin(cache, anchor_BW)
    depth = steps = 0
    end = token_BT.shape[1] - 1  # anchors near it look no further, and are not supervised there
    while len(said) < depths and (how.steps is None or steps < how.steps):
        slots = head.horizon(depth, None)
        if not slots:
            break
        state = how.fed(head, cache, state, (anchor_BW + depth).clamp(max=end), depth)
        consumed_BW = token_BT.gather(1, (anchor_BW + 1 + depth).clamp(max=end))
        feature_BWHF, state = head.step(cache, state, Frontier(consumed_BW, anchor_BW, depth))
        for slot in range(min(slots, depths - len(said))):
            reach = depth + 1 + slot
            keep_S = within[reach - 1][row_S, anchor_S]
            rows, columns = (x[keep_S] for x in place)
            label_position_S = anchor_S[keep_S] + 1 + reach
            label_S = batch.token_BT[row_S[keep_S], label_position_S]
            said.append(Said(reach, feature_BWHF[rows, columns, slot], label_S, row_S[keep_S], label_position_S))
        depth, steps = depth + slots, steps + 1  # as in drafting, the next step is where no slot is left
    return said


def supervised_counts(supervised_BT: Tensor, depths: int) -> list[int]:
    """Supervised positions at each depth."""
    return [int(_ahead(supervised_BT, d + 1).sum()) for d in range(1, depths + 1)]


def _ahead(x_BT: Tensor, by: int) -> Tensor:
    """`x[:, t + by]`, False beyond the end."""
    return torch.nn.functional.pad(x_BT[:, by:], (0, min(by, x_BT.shape[1])))[:, : x_BT.shape[1]]


def _known(batch: Batch) -> Known:
    next_BT = torch.nn.functional.pad(batch.token_BT[:, 1:], (0, 1))
    return Known(next_BT, batch.features, batch.lengths)


def _flat(batch: Batch) -> Known:
    """All sequences as one row; nothing looks across their borders."""
    known = _known(batch)
    total = batch.token_BT.numel()
    flat = batch.features.map(lambda x_BTD: x_BTD.reshape(1, total, -1))
    return Known(known.next_BA.reshape(1, -1), flat, [total])


def _padded(counts_BT: Tensor, row_S: Tensor, anchor_S: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Anchors as `[B, W]`, padded with anchor 0, and where each supervised one went."""
    column_S = (counts_BT.cumsum(1) - 1)[row_S, anchor_S]
    width = int(counts_BT.sum(1).max()) if len(row_S) else 1
    anchor_BW = torch.zeros(len(counts_BT), width, dtype=torch.long, device=counts_BT.device)
    anchor_BW[row_S, column_S] = anchor_S
    return anchor_BW, (row_S, column_S)
