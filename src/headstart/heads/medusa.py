"""Medusa-1 (Cai et al. 2024, arXiv 2401.10774, section 2.1.1): K heads guess K tokens from one hidden state.

    z_k = h_t + SiLU(W_k h_t + b_k),   k = 1..K        (h_t: after the final norm)
    p_t^(k) = softmax(LM head(z_k))    the law of x_{t+k+1}

The heads do not see the root nor each other. Weight and bias start at zero, so step 0 is exactly the target's own
head (the paper claims it; the published code's random bias breaks it). The LM head is the target's; published
checkpoints bring their own (`own_lm_heads`), one per head or one for all, over all ids or over chosen ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headstart.core import Readout, Taps
from headstart.errors import BadInput
from headstart.heads.base import Frontier, Head, Known


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """`heads` K; `layers` residual blocks per head, all distinct; `own_lm_heads`: one LM head per head, trained.

    `shared_lm_head`: the own LM head is one for all heads. `own_ids`: its rows are those of the ids in `token_map`.
    """

    heads: int = 5
    layers: int = 1
    own_lm_heads: bool = False
    shared_lm_head: bool = False
    own_ids: bool = False

    def __post_init__(self) -> None:
        if self.heads < 1 or self.layers < 1:
            raise BadInput(f"{self}: expected at least one head and one layer.")
        if not self.own_lm_heads and (self.shared_lm_head or self.own_ids):
            raise BadInput(f"{self}: shared_lm_head and own_ids say how own LM heads are; set own_lm_heads as well.")


class MedusaCache(NamedTuple):
    """The rows absorbed last: features `[B, A, D]` and how many of them count."""

    feature_BAD: Tensor | None
    counts: list[int]


class MedusaState(NamedTuple):
    """The anchor's feature, `[B, W, D]`."""

    anchor_BWD: Tensor


class Medusa(Head):
    """See the module. Block weights of one layer are stacked, `[K, D, D]`: one batched product for all heads."""

    needs = Taps(final=True)
    alone = True

    def __init__(self, config: MedusaConfig, width: int, vocab_size: int) -> None:
        super().__init__()
        self.config, self.width = config, width
        k = config.heads
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(k, width, width)) for _ in range(config.layers))
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(k, width)) for _ in range(config.layers))
        self.lm_heads: nn.Parameter | None = None
        self.token_map: Tensor | None
        self.register_buffer("token_map", torch.full((vocab_size,), -1) if config.own_ids else None)
        if config.own_lm_heads:
            n_own = 1 if config.shared_lm_head else k
            self.lm_heads = nn.Parameter(torch.full((n_own, vocab_size, width), torch.nan))  # filled or refused

    def empty(self, n_requests: int) -> MedusaCache:
        """Nothing absorbed."""
        return MedusaCache(None, [0] * n_requests)

    def absorb(self, cache: MedusaCache, new: Known) -> MedusaCache:
        """Only the newest rows matter."""
        assert new.features.final is not None
        return MedusaCache(new.features.final, new.counts)

    def last(self, cache: MedusaCache) -> Tensor:
        """The newest row of each request."""
        assert cache.feature_BAD is not None
        return torch.tensor(cache.counts, device=cache.feature_BAD.device)[:, None] - 1

    def select(self, cache: MedusaCache, requests: Sequence[int]) -> MedusaCache:
        """Keep only these requests."""
        feature_BAD = None if cache.feature_BAD is None else cache.feature_BAD[list(requests)]
        return MedusaCache(feature_BAD, [cache.counts[r] for r in requests])

    def rewind(self, cache: MedusaCache, lengths: Sequence[int]) -> MedusaCache:
        """Nothing of older rows is kept, so there is nothing to forget; an absorb follows."""
        return cache

    def begin(self, cache: MedusaCache, anchor_BW: Tensor) -> MedusaState:
        """The anchors' features, in the head's own type."""
        assert cache.feature_BAD is not None
        width = cache.feature_BAD.shape[2]
        rows_BWD = cache.feature_BAD.gather(1, anchor_BW[:, :, None].expand(-1, -1, width))
        return MedusaState(rows_BWD.to(self.weights[0].dtype))

    def horizon(self, depth: int, last: int | None) -> int:
        """All heads at once, from the root; a static tree deeper than K cannot be filled."""
        heads: int = self.config.heads
        return (heads if last is None else min(heads, last)) if depth == 0 else 0

    def step(self, cache: MedusaCache, state: MedusaState, frontier: Frontier) -> tuple[Tensor, MedusaState]:
        """`[B, W, K, D]`; the root is ignored."""
        n_requests, n_rows, width = state.anchor_BWD.shape
        z_KRD = state.anchor_BWD.reshape(1, -1, width).expand(self.config.heads, -1, -1)
        for weight_KDD, bias_KD in zip(self.weights, self.biases, strict=True):
            z_KRD = z_KRD + nn.functional.silu(torch.baddbmm(bias_KD[:, None], z_KRD, weight_KDD.transpose(1, 2)))
        return z_KRD.transpose(0, 1).reshape(n_requests, n_rows, -1, width), state

    @torch.no_grad()
    def adopt(self, rows_UD: Tensor, ids_U: Tensor | None) -> None:
        """Every own LM head starts as the target's (section 2.1.1)."""
        if self.lm_heads is None:
            return
        if self.config.own_ids is not (ids_U is not None):
            raise BadInput(
                f"{self.config}: own rows of a trimmed draft vocabulary need own_ids, those of a full one not."
            )
        self.lm_heads.copy_(rows_UD)
        if self.token_map is not None and ids_U is not None:
            self.token_map.copy_(ids_U)

    def readout(self, depth: int) -> Readout | None:
        """Own rows if it has them."""
        if self.lm_heads is None:
            return None
        rows_UD = self.lm_heads[0 if self.config.shared_lm_head else depth - 1]
        return Readout(lambda z_RD: nn.functional.linear(z_RD, rows_UD), len(rows_UD), self.token_map, trained=True)
