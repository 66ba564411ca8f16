"""From a directory of safetensors to an `HFTarget`: where it runs, in which number format, and what must be whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from headstart.errors import BadInput, Unsupported
from headstart.targets.hf import HFTarget

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def auto_device() -> torch.device:
    """The first accelerator if there is one, else the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")


def auto_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the hardware computes in it, else fp32."""
    if device.type == "cpu":
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    else:
        fast = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if fast else torch.float32


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own progress bars: they would be drawn over ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load(path: Path, dtype: str = "auto", device: str = "auto", attention: str | None = None) -> HFTarget:
    """Load a directory of safetensors. Raises BadInput for an unknown dtype, Unsupported for a model that cannot."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if dtype not in ("auto", *DTYPES):
        raise BadInput(f"dtype={dtype!r} is unknown: expected one of auto, {', '.join(DTYPES)}.")
    place = auto_device() if device == "auto" else torch.device(device)
    kind = auto_dtype(place) if dtype == "auto" else DTYPES[dtype]
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        with _quiet():
            model, found = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=kind,
                attn_implementation=attention,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (ValueError, KeyError, OSError, RuntimeError, SafetensorError) as error:
        raise Unsupported(f"transformers cannot load {path} as a causal LM: {error}") from error
    if missing := sorted(found["missing_keys"]):  # transformers only warns and leaves them random (bugs.md B18)
        raise Unsupported(f"{path} lacks the weights {missing}; expected a tensor for every parameter. Fetch it again.")
    return HFTarget(model.to(place), tokenizer, path)
