"""Content hashes: what was made from a model is filed under the model itself, not under its name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from headstart.targets.base import Target

LENGTH = 16  # hex digits kept


def of_tensors(named: Iterable[tuple[str, Tensor]], *labels: str) -> str:
    """Names, shapes, types and all bytes."""
    digest = hashlib.blake2b(repr(labels).encode())
    for name, tensor in named:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:LENGTH]


def of_text(*parts: Any) -> str:
    """Of whatever has a stable repr."""
    return hashlib.blake2b(repr(parts).encode()).hexdigest()[:LENGTH]


def fingerprint(target: Target) -> str:
    """Weights in their dtype, tokenizer table and chat template: all that decides what the target says to a chat."""
    template = str(getattr(target.tokenizer, "chat_template", "") or "")
    return of_tensors(target.named_weights(), target.vocabulary.digest, template)
