"""The curves of a run as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headstart.train.files import whole


def plot(metrics: Path, picture: Path) -> bool:
    """Loss by depth and held-out tokens per step over tokens trained; False if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    losses = [(row["tokens"], row["loss"]) for row in rows if "loss" in row]
    held = [(row["held_out"]["tokens"], row["held_out"]["tokens_per_step"]) for row in rows if "held_out" in row]
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    depths = len(losses[0][1]) if losses else 0
    for depth in range(depths):
        left.plot([t for t, _ in losses], [loss[depth] for _, loss in losses], label=f"depth {depth + 1}")
    right.plot([t for t, _ in held], [v for _, v in held], marker="o")
    _label(left, "loss (nats)")
    _label(right, "held-out tokens per step")
    if depths:
        left.legend()
    with whole(picture) as draft:
        figure.savefig(draft, format="png", dpi=120)
    return True


def _label(axes: Any, name: str) -> None:
    axes.set_xlabel("supervised tokens")
    axes.set_ylabel(name)
    axes.grid(alpha=0.3)
