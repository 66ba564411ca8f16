"""The key/value cache that stock transformers code writes to: append a tree, keep a path, roll back.

One preallocated buffer for all layers, so that keeping a path is one gather. Requests are left-aligned: row b
holds its committed tokens in slots `0 .. lengths[b]`, the nodes of the current pass right behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from headstart.errors import Unsupported

GROWTH = 256  # slots are added in steps of this many, and at least doubled


class _Pass(NamedTuple):
    """Where one pass writes and what it reads, per layer; slots are given where requests differ in length."""

    shape: torch.Size
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    new_keys: tuple[Tensor, ...]
    new_values: tuple[Tensor, ...]
    row_B1: Tensor | None
    slot_BN: Tensor | None


class TreeCache(Cache):  # type: ignore[misc]
    """Keys and values `[2, L, B, H, S, D]`; only the first `lengths[b]` slots of a row are committed."""

    def __init__(self, n_layers: int, n_requests: int) -> None:
        super().__init__(layers=[])
        self.n_layers = n_layers
        self.lengths: list[int] = [0] * n_requests
        self.buffer: Tensor | None = None
        self._width = 0  # nodes of the pass being written
        self._end = 0  # slots that the pass is shown; those behind its nodes are masked
        self._pass: _Pass | None = None

    @property
    def uniform(self) -> bool:
        """True if all requests have the same length: slots are then one slice."""
        return len(set(self.lengths)) == 1

    def reserve(self, width: int, multiple: int = 1) -> int:
        """Announce a pass of `width` nodes; returns how many slots it will be shown, a multiple of `multiple`."""
        self._width = width
        self._end = -(-(max(self.lengths) + width) // multiple) * multiple
        self._pass = None
        return self._end

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write this pass's keys and values `[B, H, N, D]` of one layer; return all slots up to its end."""
        now = self._pass = self._pass or self._prepared(key_states)
        if key_states.shape != now.shape or value_states.shape != now.shape:
            raise Unsupported(
                f"The target's layers have key/value shapes that differ ({tuple(now.shape)}, then "
                f"{tuple(key_states.shape)} and {tuple(value_states.shape)}); headstart's cache needs one for all."
            )
        keys, values = now.keys[layer_idx], now.values[layer_idx]
        if now.slot_BN is None:
            now.new_keys[layer_idx].copy_(key_states)
            now.new_values[layer_idx].copy_(value_states)
        else:
            keys[now.row_B1, :, now.slot_BN] = key_states.transpose(1, 2)
            values[now.row_B1, :, now.slot_BN] = value_states.transpose(1, 2)
        return keys, values

    def _prepared(self, key: Tensor) -> _Pass:
        """Views of all layers at once: slicing them one by one costs as much as the copies."""
        start, end = self.lengths[0], self.lengths[0] + self._width
        buffer = self._room(self._end, key)
        keys, values = (x.unbind(0) for x in buffer[..., : self._end, :].unbind(0))
        if self.uniform:
            new_keys, new_values = (x.unbind(0) for x in buffer[..., start:end, :].unbind(0))
            return _Pass(key.shape, keys, values, new_keys, new_values, None, None)
        row_B1 = torch.arange(len(self.lengths), device=key.device)[:, None]
        start_B1 = torch.tensor(self.lengths, device=key.device)[:, None]
        slot_BN = start_B1 + torch.arange(self._width, device=key.device)
        return _Pass(key.shape, keys, values, (), (), row_B1, slot_BN)

    def _room(self, end: int, key: Tensor) -> Tensor:
        """The buffer, grown if needed. New slots are zero: masked slots must not hold NaN."""
        old = self.buffer
        if old is not None and old.shape[4] >= end:
            return old
        slots = -(-max(end, 2 * (old.shape[4] if old is not None else 0)) // GROWTH) * GROWTH
        _, heads, _, dim = key.shape
        self.buffer = key.new_zeros((2, self.n_layers, len(self.lengths), heads, slots, dim))
        if old is not None:
            self.buffer[:, :, :, :, : old.shape[4]] = old
        return self.buffer

    @torch.inference_mode()
    def keep(self, kept: Sequence[Sequence[int]]) -> None:
        """Move the kept nodes of each request to the slots behind its committed tokens and count them."""
        if self.buffer is not None and any(tuple(k) != tuple(range(len(k))) for k in kept):
            width = max(len(k) for k in kept)
            padded = [[*k, *range(len(k), width)] for k in kept]  # padding copies a dead slot onto itself
            start_B1 = torch.tensor(self.lengths, device=self.buffer.device)[:, None]
            source_BA = start_B1 + torch.tensor(padded, device=self.buffer.device)
            goal_BA = start_B1 + torch.arange(width, device=self.buffer.device)
            full = (*self.buffer.shape[:4], width, self.buffer.shape[5])
            source, goal = (x[None, None, :, None, :, None].expand(full) for x in (source_BA, goal_BA))
            self.buffer.scatter_(4, goal, self.buffer.gather(4, source))
        self.lengths = [n + len(k) for n, k in zip(self.lengths, kept, strict=True)]

    @torch.inference_mode()
    def rows(self, requests: Sequence[int]) -> None:
        """Keep only these requests. Where the others come from behind them, only those are copied."""
        count = len(requests)
        moved = [place for place, request in enumerate(requests) if place != request]
        self.lengths = [self.lengths[r] for r in requests]
        if self.buffer is None:
            return
        if count < self.buffer.shape[2] and all(requests[place] >= count for place in moved):
            end = max(self.lengths)
            source = [requests[place] for place in moved]
            self.buffer[:, :, moved, :, :end] = self.buffer[:, :, source, :, :end]
            self.buffer = self.buffer[:, :, :count]
        else:
            self.buffer = self.buffer[:, :, list(requests)]

    @torch.inference_mode()
    def replace(self, requests: Sequence[int], other: TreeCache) -> None:
        """Put the requests of `other` in the places of these; only their rows are copied."""
        if len(requests) != len(other.lengths) or other.buffer is None:
            raise ValueError(f"{len(other.lengths)} requests to put in {len(requests)} places")
        end = max(other.lengths)
        buffer = self._room(end, other.buffer[0, 0])
        buffer[:, :, list(requests), :, :end] = other.buffer[..., :end, :]
        for request, length in zip(requests, other.lengths, strict=True):
            self.lengths[request] = length

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget committed tokens beyond `lengths`."""
        self.lengths = [min(old, new) for old, new in zip(self.lengths, lengths, strict=True)]

    # What transformers asks of a cache while it builds a mask (only where we leave the mask to it).
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Committed tokens; meaningful only where all requests have the same length."""
        return self.lengths[0]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys that `update` will return, and their offset."""
        return max(self.lengths) + query_length, 0
