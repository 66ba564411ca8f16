"""One new token per request over a bf16 cache: the kernel of `attention.c`, for what it can take."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headstart.targets.kernels.build import library

MOST_HEADS = 8  # query heads per key/value head
STRIDE = 32  # head widths are multiples of this
FAULTS = {1: "a shape that it does not take", 2: "no memory"}


def fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Can the kernel take this: queries `[B, H, 1, D]` over `[B, G, S, D]`, and is there one?"""
    plain = query.dtype is key.dtype is value.dtype is torch.bfloat16 and query.device.type == "cpu"
    if not plain or query.shape[2] != 1 or (torch.is_grad_enabled() and query.requires_grad):
        return False
    heads, width = query.shape[1] // key.shape[1], query.shape[3]
    same = key.stride() == value.stride() and key.stride(3) == 1 and key.shape == value.shape
    shape = (len(query), 1, 1, key.shape[2])  # the kernel reads by it: a smaller mask would be read beyond its end
    seen = mask is None or (mask.dtype is torch.bool and mask.shape == shape and mask.stride(3) == 1)
    return same and seen and heads <= MOST_HEADS and width % STRIDE == 0 and not isinstance(_kernel(), str)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """`[B, H, 1, D]`, as SDPA with `enable_gqa`; `mask` `[B, 1, 1, S]` is True where a key is seen."""
    kernel = _kernel()
    if isinstance(kernel, str):
        raise RuntimeError(f"There is no attention kernel: {kernel}")
    n_requests, n_heads, _, width = query.shape
    groups, slots = key.shape[1:3]
    query = query.contiguous()
    out = torch.empty_like(query)
    failed = kernel(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), None if mask is None else mask.data_ptr(),
        n_requests, groups, n_heads // groups, slots, width, *key.stride()[:3],
        0 if mask is None else mask.stride(0), width**-0.5 if scale is None else scale,
    )  # fmt: skip
    if failed:
        raise RuntimeError(f"The attention kernel refused {tuple(query.shape)}, {tuple(key.shape)}: {FAULTS[failed]}")
    return out


@functools.cache
def _kernel() -> Callable[..., Any] | str:
    """The compiled function, or why there is none."""
    if not torch.cpu._is_avx512_bf16_supported():
        return "this CPU has no AVX-512 bf16"
    found = library("attention.c")
    if isinstance(found, str):
        return found
    kernel = found.attend
    kernel.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 9 + [ctypes.c_float]
    kernel.restype = ctypes.c_int
    return kernel
