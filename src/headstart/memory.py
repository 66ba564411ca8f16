"""How a process of ours keeps memory: commands call it once, libraries should not decide this for their callers."""

from __future__ import annotations

import ctypes
import os
import platform

MMAP_THRESHOLD, TRIM_THRESHOLD, TOP_PAD = -3, -1, -2  # the names that glibc's mallopt gives these numbers


def keep() -> None:
    """Hold on to freed memory, in huge pages where the system offers them; call it before torch makes a tensor.

    By default glibc gives every scratch tensor of a pass back to the system and takes new pages for the next: 250,000
    to 500,000 page faults a prefill of 5,000 tokens with SmolLM2-135M, and 600 with this (docs/log.md).
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(MMAP_THRESHOLD, 32 * 2**20)  # the most that it takes
        libc.mallopt(TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(TOP_PAD, 64 * 2**20)
