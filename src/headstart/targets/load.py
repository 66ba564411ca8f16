"""The one call that turns a name into a target."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from headstart.targets.resolve import resolve

if TYPE_CHECKING:
    from headstart.core import Report
    from headstart.targets.hf import HFTarget


def load_target(
    name: str | os.PathLike[str], *, dtype: str = "auto", device: str = "auto", progress: Report | None = None
) -> HFTarget:
    """A target by directory, hub id, GGUF file or alias; `target.path` is the directory its weights came from.

    dtype is one of auto, fp32, bf16, fp16; auto is bf16 where the hardware computes in it, else fp32. The model is
    in memory once. `progress(message, fraction)` is told of downloads and conversions.

    Raises UnknownTarget, FetchError, BadInput or Unsupported.
    """
    from headstart.targets.hf_load import load

    return load(resolve(name, progress), dtype, device)
