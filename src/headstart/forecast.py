"""What a training run will cost and bring, from a probe of two minutes: `headstart train --dry-run`.

Rates are measured on this machine; the learning curve is a straight line in the logarithm of the tokens, fitted to
what the probe saw. It is a guess, and it is printed as one.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from headstart.core import Report
from headstart.errors import TrainingStopped
from headstart.heads.base import Head
from headstart.heldout import HeldOut
from headstart.learn import Data, Recipe, draft_vocab, new_head, stored_as, window_of
from headstart.targets.base import Target
from headstart.train.capture import Texts, capture, cost
from headstart.train.loop import Training, train
from headstart.train.state import Progress, progress_of

MARKS = (100_000, 300_000, 1_000_000, 2_000_000)
PROBED = 48  # texts of the probe's first capture; doubled while there is time
MEASURED = 24  # held-out answers of the probe


class Forecast(NamedTuple):
    """Seconds, bytes, and tokens per step by supervised tokens trained on. `seen` is what the probe measured."""

    capture_tokens: int
    capture_seconds: float
    train_seconds: float
    disk_bytes: int
    memory_bytes: int
    seen: list[tuple[int, float]]
    curve: list[tuple[int, float]]


def forecast(
    target: Target, data: Data, recipe: Recipe, *, seconds: float = 120.0, report: Report | None = None
) -> Forecast:
    """Capture and train on a few texts for about so long, leaving nothing behind."""
    began = time.monotonic()
    vocab = draft_vocab(target, data.samples, recipe.draft_vocab)
    head = new_head(target, vocab, recipe)
    window = window_of(head, len(recipe.training.weights))
    stored = stored_as(target, recipe.stored)
    price = cost(target, data.samples, head.needs, window, stored, target.width)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        held = capture(target, data.held_out[:MEASURED], head.needs, folder, window=window, stored=stored)
        count = min(PROBED, len(data.samples))
        while True:
            start = time.monotonic()
            some = data.samples[:: max(1, len(data.samples) // count)][:count]
            texts = capture(target, some, head.needs, folder, window=window, stored=stored)
            spent = time.monotonic() - start
            rate = sum(len(s.ids) for s in some) / spent
            if count == len(data.samples) or time.monotonic() - began + 2 * spent > 0.4 * seconds:
                break
            count = min(2 * count, len(data.samples))
        bench = HeldOut(target, head, vocab, held, depths=len(recipe.training.weights), nodes=recipe.tree_nodes)
        tokens = sum(sum(s.supervised) for s in some)
        how = replace(recipe.training, tokens=8 * tokens, evaluate_every=max(1, tokens // 2))
        start = time.monotonic()
        left = max(seconds - (start - began), 0.25 * seconds)
        progress = _train(head, texts, how, folder / "run", bench, left, report)
        pace = progress.tokens / (time.monotonic() - start)
    seen = [(row["tokens"], row["tokens_per_step"]) for row in progress.history if row["tokens"] <= tokens] or [
        (row["tokens"], row["tokens_per_step"]) for row in progress.history[:1]
    ]
    states = sum(p.numel() for p in head.parameters()) * 4
    return Forecast(
        capture_tokens=price.tokens,
        capture_seconds=price.tokens / rate,
        train_seconds=recipe.training.tokens / pace,
        disk_bytes=price.bytes + 4 * states,
        memory_bytes=sum(w.numel() * w.element_size() for _, w in target.named_weights()) + 8 * states,
        seen=seen,
        curve=extrapolated(seen, [*(m for m in MARKS if m < recipe.training.tokens), recipe.training.tokens]),
    )


def extrapolated(seen: Sequence[tuple[int, float]], marks: Sequence[int]) -> list[tuple[int, float]]:
    """Least squares of tokens per step over log tokens; nothing from fewer than two points."""
    if len(seen) < 2:
        return []
    x = [math.log(tokens) for tokens, _ in seen]
    y = [value for _, value in seen]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    return [(mark, mean_y + slope * (math.log(mark) - mean_x)) for mark in marks]


def _train(
    head: Head, texts: Texts, how: Training, out: Path, bench: HeldOut, seconds: float, report: Report | None
) -> Progress:
    """Train until the time is up; what was seen until then counts."""
    with contextlib.suppress(TrainingStopped):
        train(
            head, texts, how, out,
            readout=bench.readout, vocab=bench.vocab, evaluate=bench.measure, report=report, until=seconds,
        )  # fmt: skip
    return progress_of(out)
