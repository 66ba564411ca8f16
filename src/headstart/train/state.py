"""What a training run keeps on disk: one state file, replaced whole, the best weights, and a log of figures."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from headstart.errors import BadInput
from headstart.heads.base import Head
from headstart.train.files import whole, write_tensors

STATE = "state.safetensors"
BEST = "best.safetensors"
METRICS = "metrics.jsonl"


@dataclass
class Progress:
    """Where a run stands; all of it is in the state file."""

    step: int = 0
    tokens: int = 0
    epoch: int = 0
    position: int = 0
    evaluated: int = 0
    best: float = -1.0
    best_tokens: int = 0
    skipped: int = 0
    unknown: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


def log(out: Path, at: Progress, values: dict[str, Any]) -> None:
    """A line of figures."""
    with (out / METRICS).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": at.step, "tokens": at.tokens, **values}) + "\n")


def save(head: Head, optimiser: torch.optim.Optimizer, at: Progress, out: Path) -> None:
    """Weights, moments and place in one file. Nothing else is random: order and dropout-free steps follow from it."""
    tensors = {f"head.{k}": v for k, v in head.state_dict().items()}
    for index, parameter in enumerate(head.parameters()):
        for key, value in optimiser.state[parameter].items():
            tensors[f"optimiser.{index}.{key}"] = value
    write_tensors(out / STATE, tensors, {"progress": json.dumps(asdict(at))})


def resume(head: Head, optimiser: torch.optim.Optimizer, out: Path) -> Progress | None:
    """Bring a run back to where its state was saved; None if nothing was."""
    path = out / STATE
    if not path.exists():
        (out / METRICS).unlink(missing_ok=True)
        return None
    with safe_open(path, "pt") as file:
        at = Progress(**json.loads(file.metadata()["progress"]))
        head.load_state_dict({k: file.get_tensor(f"head.{k}") for k in head.state_dict()})
        keys = [key for key in list(file.keys()) if key.startswith("optimiser.")]
        for index, parameter in enumerate(head.parameters()):
            mine = [k for k in keys if k.split(".")[1] == str(index)]
            moments = {k.split(".")[2]: file.get_tensor(k) for k in mine}
            optimiser.state[parameter] = {k: v if k == "step" else v.to(parameter.device) for k, v in moments.items()}
    *lines, _ = (out / METRICS).read_text(encoding="utf-8").split("\n")  # the last one may be torn
    rows = [json.loads(line) for line in lines]
    with whole(out / METRICS) as draft:  # what was logged after the state was saved will be logged again
        draft.write_text("".join(json.dumps(r) + "\n" for r in rows if r["step"] <= at.step), encoding="utf-8")
    return at


def progress_of(out: Path) -> Progress:
    """Where the run in `out` stands; raises BadInput if nothing was saved there."""
    if not (out / STATE).exists():
        raise BadInput(f"{out} holds no training state ({STATE}); start the run first.")
    with safe_open(out / STATE, "pt") as file:
        return Progress(**json.loads(file.metadata()["progress"]))


def fill(head: Head, path: Path) -> None:
    """Weights from a file of this run."""
    with safe_open(path, "pt") as file:
        head.load_state_dict({k: file.get_tensor(k) for k in head.state_dict()})
