"""Write README's table from the result files, between its two marks. `--check` fails if the table is stale."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
START, END = "<!-- table: bench/table.py -->", "<!-- end of table -->"
NAMES = {
    "summarization": "summarisation",
    "rag": "retrieval (RAG)",
    "math_reasoning": "maths word problems",
    "qa": "questions",
}


def table() -> str:
    """Prompt lookup against plain decoding by category, the large categories first."""
    lookup = json.loads((ROOT / "docs/results/lookup/smollm2-135m-bf16.json").read_text())
    rows = sorted(lookup["by_category"].items(), key=lambda item: -item[1]["speedup"])
    lines = [
        "| prompts | tokens per step | speed-up over plain | 95 % interval | plain tokens/s | same text |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, r in [*rows, ("all", lookup["all"])]:
        low, high = r["speedup_interval"]
        lines.append(
            f"| {NAMES.get(name, name)} ({r['prompts']}) | {r['tokens_per_step']:.2f} | {r['speedup']:.2f}x "
            f"| {low:.2f} to {high:.2f} | {r['plain_tokens_per_s']:.0f} | {r['identical']} |"
        )
    machine = lookup["environment"]["cpu"]
    lines.append("")
    lines.append(
        f"SmolLM2-135M-Instruct, {lookup['dtype']}, greedy, {lookup['tokens']} new tokens, batch 1, "
        f"{lookup['environment']['threads']} cores of {machine}; {lookup['prompts']}. "
        f"Written by `{lookup['command']}` and `python bench/table.py`."
    )
    return "\n".join(lines)


def main() -> int:
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(START)
    after = rest.split(END)[1]
    new = f"{before}{START}\n{table()}\n{END}{after}"
    if "--check" in sys.argv:
        return int(new != text)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
