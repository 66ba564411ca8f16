"""Features of every training text, once, in shards of safetensors filed under a hash of all that they depend on.

A shard is written whole or not at all; one that was damaged later is found by its length and made again. Features are
those of a direct pass over one text alone: texts of a batch are left-aligned and see nothing of each other.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from headstart.core import Features, Report, Taps
from headstart.errors import BadInput
from headstart.targets.base import Target, prefill
from headstart.train.files import same_or_refuse, write_tensors
from headstart.train.fingerprint import fingerprint, of_text
from headstart.train.template import Sample

SHARD = 256  # texts: the unit of work that a kill can lose
BATCH_TOKENS = 4096  # of one pass
STORED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Window:
    """Which positions are kept. `before`: at most so many ahead of the first supervised token; None keeps all."""

    before: int | None = None

    def start(self, supervised: Sequence[bool]) -> int:
        """The first position kept."""
        if self.before is None:
            return 0
        return max(0, supervised.index(True) - self.before)


class Text(NamedTuple):
    """One captured text from its first kept position on: `token_T`, `supervised_T`, features `[T, D]`."""

    token_T: Tensor
    supervised_T: Tensor
    features: Features


class Cost(NamedTuple):
    """What a capture will take."""

    tokens: int
    kept: int
    bytes: int


def cost(target: Target, samples: Sequence[Sample], taps: Taps, window: Window, stored: str, width: int) -> Cost:
    """Tokens to run, positions to keep and bytes on disk; `width` is D."""
    kept = sum(len(s.ids) - window.start(s.supervised) for s in samples)
    states = taps.final + len(taps.layers)
    return Cost(sum(len(s.ids) for s in samples), kept, kept * (states * width * STORED[stored].itemsize + 5))


def pace(target: Target, samples: Sequence[Sample], taps: Taps) -> float:
    """Tokens per second of a capture, from a pass over texts of middle length; one before it warms up."""
    ascending = sorted(samples, key=lambda s: len(s.ids))[len(samples) // 2 :]
    batch = [ascending[i].ids for i in next(neighbours([len(s.ids) for s in ascending], BATCH_TOKENS))]
    for _ in range(2):
        start = time.perf_counter()
        prefill(target, target.empty(len(batch)), batch, taps)
        seconds = time.perf_counter() - start
    return sum(map(len, batch)) / seconds


class Texts(Protocol):
    """Where a trainer reads its texts. Kept positions and supervised tokens of each are known without any feature."""

    lengths: list[int]
    supervised: list[int]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Text: ...


class Live:
    """Features made when they are asked for, every time anew: no disk, and a target pass per text and epoch."""

    def __init__(self, target: Target, samples: Sequence[Sample], taps: Taps, window: Window) -> None:
        self.target, self.samples, self.taps, self.window = target, samples, taps, window
        self.lengths = [len(s.ids) - window.start(s.supervised) for s in samples]
        self.supervised = [sum(s.supervised) for s in samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Text:
        sample = self.samples[index]
        _, _, features = prefill(self.target, self.target.empty(1), [sample.ids], self.taps)
        start = self.window.start(sample.supervised)
        kept = features.map(lambda x_1TD: x_1TD[0, start:].clone())
        return Text(torch.tensor(sample.ids[start:]), torch.tensor(sample.supervised[start:]), kept)


class Captured:
    """Texts on disk, read one by one. `order[i]`: which of the samples that were captured text i is."""

    def __init__(self, folder: Path, names: Sequence[str], taps: Taps, order: list[int]) -> None:
        self.folder, self.taps, self.order = folder, taps, order
        self._files: list[Any] = [safe_open(folder / name, "pt") for name in names]
        self._place: list[tuple[int, int, int]] = []
        self.lengths: list[int] = []
        self.supervised: list[int] = []
        for number, file in enumerate(self._files):
            start = 0
            supervised = file.get_tensor("supervised")
            for length in file.get_tensor("length").tolist():
                self._place.append((number, start, start + length))
                self.lengths.append(length)
                self.supervised.append(int(supervised[start : start + length].sum()))
                start += length

    def __len__(self) -> int:
        return len(self._place)

    def __getitem__(self, index: int) -> Text:
        number, start, end = self._place[index]
        file = self._files[number]

        def rows(name: str) -> Tensor:
            out: Tensor = file.get_slice(name)[start:end]
            return out

        final = rows("final") if self.taps.final else None
        layers = tuple(rows(f"layer.{count}") for count in self.taps.layers)
        return Text(rows("token").long(), rows("supervised").bool(), Features(final, layers))


def capture(
    target: Target,
    samples: Sequence[Sample],
    taps: Taps,
    cache: Path,
    *,
    window: Window = Window(),
    stored: str = "fp32",
    report: Report | None = None,
) -> Captured:
    """Run the target over all texts, or over those whose shards are not there yet, and open the result.

    Raises BadInput if the disk is full, an unsupervised text is among them, or other work stands in the place.
    """
    if not all(any(s.supervised) for s in samples):
        raise BadInput("A text without a supervised token is among the samples; `template.fit` drops and counts them.")
    record = {
        "target": fingerprint(target),
        "texts": of_text([(s.ids, s.supervised) for s in samples]),
        "taps": [taps.final, list(taps.layers)],
        "before": window.before,
        "stored": stored,
        "shard": SHARD,
    }
    folder = cache / of_text(sorted(record.items()))
    same_or_refuse(folder / "capture.json", record, "features")
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].ids))
    shards = [order[i : i + SHARD] for i in range(0, len(order), SHARD)]
    names = [f"shard-{i:05d}.safetensors" for i in range(len(shards))]
    total, done, began = sum(len(s.ids) for s in samples), 0, time.perf_counter()
    fresh = 0
    for name, members in zip(names, shards, strict=True):
        size = sum(len(samples[i].ids) for i in members)
        if not intact(folder / name):
            tensors = _run(target, [samples[i] for i in members], taps, window, STORED[stored])
            write_tensors(folder / name, tensors)
            fresh += size
        done += size
        if report is not None and fresh:
            rate = fresh / (time.perf_counter() - began)
            left = f"{(total - done) / rate / 60:.0f} min left"
            report(f"features of {done} of {total} tokens, {rate:.0f} tokens/s, {left}", done / total)
    return Captured(folder, names, taps, order)


def intact(path: Path) -> bool:
    """Is this a safetensors file of the length that its header promises?"""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return bool(path.stat().st_size == 8 + length + max(ends))
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError, MemoryError, OverflowError):
        return False


def _run(
    target: Target, samples: Sequence[Sample], taps: Taps, window: Window, dtype: torch.dtype
) -> dict[str, Tensor]:
    """One shard: texts in their order, positions side by side."""
    parts: list[dict[str, Tensor]] = []
    for members in neighbours([len(s.ids) for s in samples], BATCH_TOKENS):
        batch = [samples[i] for i in members]
        _, _, features = prefill(target, target.empty(len(batch)), [s.ids for s in batch], taps)
        for row, sample in enumerate(batch):
            start, end = window.start(sample.supervised), len(sample.ids)
            part = {
                "token": torch.tensor(sample.ids[start:end], dtype=torch.int32),
                "supervised": torch.tensor(sample.supervised[start:end], dtype=torch.uint8),
                "length": torch.tensor([end - start], dtype=torch.int32),
            }
            if features.final is not None:
                part["final"] = features.final[row, start:end].to("cpu", dtype)
            for count, layer in zip(taps.layers, features.layers, strict=True):
                part[f"layer.{count}"] = layer[row, start:end].to("cpu", dtype)
            parts.append(part)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def neighbours(lengths: Sequence[int], positions: int) -> Iterator[range]:
    """Runs of texts that stand side by side, padded to the longest, in so many positions; a longer text is alone.
    `lengths` ascend."""
    start = 0
    while start < len(lengths):
        end = start + 1
        while end < len(lengths) and (end + 1 - start) * lengths[end] <= positions:
            end += 1
        yield range(start, end)
        start = end
