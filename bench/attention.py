"""SDPA on a CPU with a mask: grouped keys read in place against keys repeated per head, as transformers has it.

SmolLM2-135M's shape: 9 query heads in 3 groups, 64 wide. Milliseconds are the best of 7; the ratio is what counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from common import write

SHAPES = [(128, 1, 100), (128, 1, 300), (1, 32, 300), (1, 8, 1000), (1, 1, 1000), (4, 1, 300), (128, 16, 64)]
HEADS, GROUPS, WIDTH = 9, 3, 64


def best(call: Callable[[], Tensor]) -> float:
    times = []
    for _ in range(9):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1000 * min(times[2:])


def main() -> None:
    attention = torch.nn.functional.scaled_dot_product_attention
    rows = []
    for requests, nodes, keys in SHAPES:
        buffer = torch.randn(2, requests, GROUPS, 2 * keys, WIDTH)
        key, value = buffer[0][:, :, :keys], buffer[1][:, :, :keys]
        query = torch.randn(requests, HEADS, nodes, WIDTH)
        mask = torch.rand(requests, 1, nodes, keys) > 0.1

        def repeated(key: Tensor = key, value: Tensor = value, query: Tensor = query, mask: Tensor = mask) -> Tensor:
            full_key, full_value = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (key, value))
            return attention(query, full_key, full_value, attn_mask=mask)

        def grouped(key: Tensor = key, value: Tensor = value, query: Tensor = query, mask: Tensor = mask) -> Tensor:
            return attention(query, key, value, attn_mask=mask, enable_gqa=True)

        torch.testing.assert_close(repeated(), grouped())
        slow, fast = best(repeated), best(grouped)
        rows.append({
            "requests": requests, "nodes": nodes, "keys": keys,
            "repeated_ms": round(slow, 3), "grouped_ms": round(fast, 3), "ratio": round(slow / fast, 2),
        })  # fmt: skip
        print(rows[-1], flush=True)
    write("engine/attention", {"rows": rows})


if __name__ == "__main__":
    main()
