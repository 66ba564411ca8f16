"""What each node of a pass sees, as masks for stock transformers models: committed slots, ancestors, windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headstart.targets.hf_cache import TreeCache
from headstart.tree import Tree


class Windows:
    """Which mask argument a model takes: one mask, or one per layer type."""

    def __init__(self, config: Any) -> None:
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        types = set(getattr(config, "layer_types", None) or ())
        self.unknown = sorted(types - {"full_attention", "sliding_attention"})
        self._by_type = {"full_attention": None, "sliding_attention": window}
        self._named = "sliding_attention" in types
        self._single = None if types else window

    def masks(self, of: Callable[[int | None], Tensor | None]) -> Any:
        """The argument for the model, from `of(window)`, which makes the mask of one kind of layer."""
        if self._named:
            return {name: of(window) for name, window in self._by_type.items()}
        return of(self._single)


def visible(cache: TreeCache, tree: Tree, position_BN: Tensor) -> Tensor:
    """`[B, N, S]`: committed slots of the request, then its own ancestors at their slots."""
    n_requests, n_nodes = position_BN.shape
    device = position_BN.device
    sees_BNN = tree.sees_BNN
    if sees_BNN is None:
        sees_BNN = torch.ones(n_nodes, n_nodes, dtype=torch.bool, device=device).tril().expand(n_requests, -1, -1)
    if cache.uniform:
        past_BNS = torch.ones(n_requests, n_nodes, cache.lengths[0], dtype=torch.bool, device=device)
        return torch.cat([past_BNS, sees_BNN], -1)
    start_B = torch.tensor(cache.lengths, device=device)
    slot_S = torch.arange(max(cache.lengths) + n_nodes, device=device)
    mask_BNS = (slot_S < start_B[:, None])[:, None].repeat(1, n_nodes, 1)
    slot_BN = start_B[:, None] + torch.arange(n_nodes, device=device)
    return mask_BNS.scatter_(2, slot_BN[:, None].expand(-1, n_nodes, -1), sees_BNN)


def within(cache: TreeCache, tree: Tree, position_BN: Tensor, end: int, window: int) -> Tensor:
    """`[B, N, S]`: keys fewer than `window` positions behind; a node's position is length + depth, not its slot."""
    n_requests, n_nodes = position_BN.shape
    key_BS = torch.arange(end, device=position_BN.device).repeat(n_requests, 1)
    start_B1 = torch.tensor(cache.lengths, device=position_BN.device)[:, None]
    key_BS.scatter_(1, start_B1 + torch.arange(n_nodes, device=position_BN.device), start_B1 + tree.depth_BN)
    return position_BN[:, :, None] - key_BS[:, None] < window
