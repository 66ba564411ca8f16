"""What the benches share: interleaved arms, intervals, and result files that say where they come from."""

from __future__ import annotations

import hashlib
import json
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

import headstart as hs
from headstart import memory
from headstart.prompts import packaged

memory.keep()  # as the commands do
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
SPEC_BENCH = ROOT.parent / "shared" / "data" / "spec_bench_question.jsonl"


def interleaved(arms: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run the arms in turn, in an order that alternates, so that a slow minute of the machine hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for i in range(rounds):
        for name in list(arms) if i % 2 == 0 else list(arms)[::-1]:
            times[name].append(arms[name]())
    return times


def ratio_interval(pairs: Sequence[tuple[float, float]], draws: int = 2000) -> tuple[float, list[float]]:
    """Sum over sum, with a 95 % bootstrap interval over the pairs (seeded)."""
    rng = random.Random(0)

    def ratio(sample: Sequence[tuple[float, float]]) -> float:
        return sum(a for a, _ in sample) / sum(b for _, b in sample)

    spread = sorted(ratio(rng.choices(pairs, k=len(pairs))) for _ in range(draws))
    return ratio(pairs), [spread[int(0.025 * draws)], spread[int(0.975 * draws)]]


def median(values: Sequence[float]) -> float:
    """Middle value."""
    return statistics.median(values)


def spec_bench(rows_per_category: int) -> tuple[str, list[tuple[str, str, list[dict[str, str]]]]]:
    """(source, [(id, category, messages of the first turn)]): Spec-Bench where its file is, else packaged prompts."""
    if not SPEC_BENCH.exists():
        rows = [(p.id, p.category, p.messages) for p in packaged()]
        return "packaged prompts", rows
    taken: dict[str, int] = {}
    out = []
    for line in SPEC_BENCH.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        taken[row["category"]] = taken.get(row["category"], 0) + 1
        if taken[row["category"]] <= rows_per_category:
            out.append((str(row["question_id"]), row["category"], [{"role": "user", "content": row["turns"][0]}]))
    digest = hashlib.sha256(SPEC_BENCH.read_bytes()).hexdigest()[:12]
    return f"Spec-Bench, first {rows_per_category} rows of each category, first turn (file {digest})", out


def write(name: str, result: dict[str, Any]) -> None:
    """`docs/results/NAME.json` with the command, the machine and the versions beside the figures."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python", str(Path(sys.argv[0]).resolve().relative_to(ROOT)), *sys.argv[1:]])
    record = {"command": command, "date": date.today().isoformat(), "environment": environment(), **result}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path.relative_to(ROOT)}")


def environment() -> dict[str, Any]:
    """Processor, threads and versions."""
    return {
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "headstart": hs.__version__,
        "commit": _commit(),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "")
    extras = [f for f in ("avx512_bf16", "amx_tile") if f in flags]
    return f"{names[0] if names else platform.processor()} ({', '.join(extras) or 'no bf16 units'})"


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
