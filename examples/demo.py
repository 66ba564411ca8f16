"""The main job on a real model, run by `make demo`: SmolLM2-135M-Instruct answers the packaged prompts, a Medusa head
is trained on the answers, proved to change nothing, measured, and shown.

Each step is a command of headstart, printed before it runs. What is finished is kept in the user cache, so a second run
only proves and measures again. Exit code 1 if the head reaches less than it must, or changes an output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from headstart.targets.resolve import cache_dir

TARGET = "smollm2-135m"
LEAST_TOKENS_PER_STEP = 1.3
HOME = cache_dir() / "demo"
ANSWERS, RUN, PROOF, EVAL = HOME / "answers", HOME / "run", HOME / "proof.json", HOME / "eval"
INCONCLUSIVE = 3  # exit code of a proof that was too short to catch every planted bug: said, and no failure
QUESTION = "Write a short friendly letter to a new neighbour and invite her to tea."


def main() -> int:
    """All steps in order; the first that fails ends the demo."""
    console = Console()
    console.print(
        "[bold]headstart demo[/]: from a model to a proved draft head in six commands. About 93 MB are fetched once "
        f"(650 MB in {HOME.parent} after unpacking), then ten to fifteen minutes on two cores. Ctrl-C is safe: the "
        "same command goes on."
    )
    began = time.perf_counter()
    head = RUN / "head"
    steps: list[tuple[str, list[Any]]] = [
        ("fetch the model", ["fetch", TARGET]),
        ("let it answer the packaged prompts: the training data",
         ["distill", TARGET, "--packaged", "-o", ANSWERS, "-m", 128]),
        ("train a Medusa head on the answers",
         ["train", TARGET, ANSWERS, "-o", RUN, "--tokens", "150k", "--tree-nodes", 32]),
        ("prove that it changes no output (8 nodes of its tree: fp32 on a CPU is slow)",
         ["prove", TARGET, head, "--nodes", 8, "--count", 8, "-m", 48, "--sampled-tokens", 1500,
                  "-o", PROOF]),
        ("measure what it gains, with the tree that pays on this machine",
         ["eval", TARGET, head, "--timed", 12, "-m", 96, "--nodes", "best", "--no-costs", "-o", EVAL]),
        ("see it: green tokens were guessed by the head and confirmed by the model",
         ["generate", TARGET, QUESTION, "--drafter", head, "-m", 96, "--show", "--compare",
          "--dtype", "fp32"]),
    ]  # fmt: skip
    for number, (purpose, words) in enumerate(steps, 1):
        console.rule(f"{number} of {len(steps)}: {purpose}")
        failed = _run(console, [str(word) for word in words])
        if failed and not (words[0] == "prove" and failed == INCONCLUSIVE):
            console.print(f"[bold red]That command ended with exit code {failed}; the demo stops here.[/]")
            return 1
    figures = json.loads((EVAL / "eval.json").read_text(encoding="utf-8"))
    proof = json.loads(PROOF.read_text(encoding="utf-8"))
    console.rule("what happened")
    console.print(_summary(figures, proof, time.perf_counter() - began))
    return _verdict(console, figures, proof)


def _run(console: Console, words: list[str]) -> int:
    shown = " ".join(f'"{word}"' if " " in word else word.replace(str(HOME), "$DEMO") for word in words)
    console.print(f"[bold]$ headstart {shown}[/]", highlight=False)
    environment = {**os.environ, "DEMO": str(HOME)}
    return subprocess.run([sys.executable, "-m", "headstart", *words], env=environment, check=False).returncode


def _summary(figures: dict[str, Any], proof: dict[str, Any], seconds: float) -> Table:
    """For someone who sees such figures for the first time."""
    plain, fast, (low, high) = figures["plain"], figures["speculative"], figures["speedup_interval"]
    caught = sum(control["caught"] for control in proof["negative_controls"])
    table = Table(show_header=False, box=None)
    table.add_row("the model alone", f"{plain['tokens_per_s']:.1f} tokens/s, one token a step")
    table.add_row("with the head", f"{fast['tokens_per_s']:.1f} tokens/s, "
                  f"{figures['tokens_per_step']:.2f} tokens a step, a tree of {figures['nodes']} nodes")  # fmt: skip
    table.add_row("speed-up", f"{figures['speedup']:.2f} (95 % interval {low:.2f} to {high:.2f})")
    greedy = proof["greedy"]
    table.add_row("same output?", f"{greedy['identical']} of {greedy['prompts']} greedy answers identical in fp32; "
                  f"sampled text follows the model's law; {caught} of {len(proof['negative_controls'])} planted bugs "
                  f"caught: {proof['verdict']}")  # fmt: skip
    if proof["verdict"] == "inconclusive":
        table.add_row("", f"inconclusive means: {'; '.join(proof['reasons'])}. Longer runs catch it: headstart prove.")
    table.add_row("time", f"{seconds / 60:.1f} minutes")
    table.add_row("the head", str(RUN / "head"))
    return table


def _verdict(console: Console, figures: dict[str, Any], proof: dict[str, Any]) -> int:
    faults = []
    if figures["tokens_per_step"] < LEAST_TOKENS_PER_STEP:
        faults.append(
            f"{figures['tokens_per_step']:.2f} tokens a step on held-out prompts, expected {LEAST_TOKENS_PER_STEP}"
        )
    if figures["speedup"] < 1.0:
        faults.append(f"slower than the model alone: {figures['speedup']:.2f}")
    if proof["verdict"] == "fail":
        faults.append(f"the proof says {proof['verdict']}: {'; '.join(proof['reasons'])}")
    for fault in faults:
        console.print(f"[bold red]{fault}[/]", highlight=False)
    if not faults:
        console.print(
            "The head was trained on the answers to 384 prompts. `make curve` trains one on two million; the "
            f"one that comes with headstart was made so: headstart generate {TARGET} \"...\" uses it.", highlight=False,
        )  # fmt: skip
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
