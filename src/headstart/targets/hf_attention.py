"""Attention on a CPU: without copies of grouped keys, and where wanted independent of how many nodes share a pass.

transformers repeats grouped keys and values for SDPA when there is a mask, and on a CPU SDPA need not have that:
`grouped` is 1.4 to 19 times faster for a 135M model (docs/results/engine/attention.json, bench/attention.py).

On CPUs with bf16 units, `nn.Linear` gives the same bits for a row whatever the number of rows, and SDPA does not: it
blocks its queries. Here every node is a batch entry of its own, over keys padded to whole vectors, so a chain of
drafted tokens is computed bit for bit as the same tokens one by one, and greedy text in bf16 is that of plain
decoding. Not for trees: their path tokens sit in other slots, so sums run in another order. See docs/log.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from headstart.targets.kernels import attention as kernel

PER_NODE, GROUPED = "headstart_per_node", "headstart_grouped"
KEYS = 16  # keys are padded to a multiple of this many: whole AVX-512 vectors of fp32 scores
NODES = 64  # a pass over more nodes (a prompt) is the same in all arms and takes the ordinary way


def wanted(dtype: torch.dtype, device: torch.device) -> bool:
    """Where rows of linear layers do not depend on each other's number, so that attention is what is missing."""
    return device.type == "cpu" and dtype is torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()


def grouped(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stock SDPA, but each group of heads reads its keys in place; without a mask it is stock altogether. A batch in
    bf16 with one token each takes a kernel of our own where it can be built."""
    if len(query) > 1 and kernel.fits(query, key, value, attention_mask):
        return kernel.attend(query, key, value, attention_mask, scaling).transpose(1, 2), None
    if attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)[0], None
    out_BHND = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
    )
    return out_BHND.transpose(1, 2), None


def per_node(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`[1, H, N, D]` queries over `[1, G, S, D]` keys; heads of a group are the query rows of one batch entry."""
    one_request = query.shape[0] == 1 and query.shape[2] <= NODES and key.shape[2] % KEYS == 0
    if not one_request or attention_mask is None or attention_mask.shape[1] != 1:
        return grouped(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    heads, n_nodes, width = query.shape[1:]
    groups = key.shape[1]
    query_NGRD = query[0].transpose(0, 1).reshape(n_nodes, groups, heads // groups, width)
    out_NGRD = torch.nn.functional.scaled_dot_product_attention(
        query_NGRD,
        key.expand(n_nodes, -1, -1, -1),
        value.expand(n_nodes, -1, -1, -1),
        attn_mask=attention_mask[0, 0][:, None, None],
        scale=scaling,
    )
    return out_NGRD.reshape(1, n_nodes, heads, value.shape[-1]), None


for name, attention in ((PER_NODE, per_node), (GROUPED, grouped)):
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)
