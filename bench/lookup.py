"""Prompt lookup against plain decoding, by category: tokens per step and speed-up, interleaved on one target object.

Resumable: every prompt's times are kept in the result file's `rows`, and a run that is started again goes on.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from typing import Any

import headstart as hs
from common import RESULTS, environment, ratio_interval, spec_bench, write


def one(target: Any, messages: Any, drafter: Any, tokens: int) -> tuple[float, Any]:
    start = time.perf_counter()
    output = hs.generate(target, messages, drafter=drafter, max_new_tokens=tokens)
    return time.perf_counter() - start, output


def measure(target: Any, prompts: list[Any], drafter: Any, tokens: int, done: dict[str, Any], save: Any) -> None:
    one(target, prompts[0][2], drafter, 8)  # warm-up
    for i, (name, category, messages) in enumerate(prompts):
        if name in done:
            continue
        arms = [("plain", None), ("lookup", drafter)]
        row: dict[str, Any] = {"category": category}
        outputs = {}
        for arm, head in arms if i % 2 == 0 else arms[::-1]:
            seconds, outputs[arm] = one(target, messages, head, tokens)
            row[f"{arm}_s"] = round(seconds, 4)
        row |= {
            "plain_tokens": len(outputs["plain"].token_ids),
            "lookup_tokens": len(outputs["lookup"].token_ids),
            "passes": outputs["lookup"].stats.passes,
            "identical": outputs["plain"].token_ids == outputs["lookup"].token_ids,
        }
        done[name] = row
        save()
        print(f"{i + 1}/{len(prompts)} {name} {category} {row}", flush=True)


def report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rates are per token, because in bf16 the two arms may end at different lengths."""
    pairs = [(r["plain_s"] / r["plain_tokens"], r["lookup_s"] / r["lookup_tokens"]) for r in rows]
    speedup, interval = ratio_interval(pairs)
    passes = sum(r["passes"] for r in rows)
    return {
        "prompts": len(rows),
        "tokens_per_step": round(sum(r["lookup_tokens"] - 1 for r in rows) / max(passes, 1), 3),
        "speedup": round(speedup, 3),
        "speedup_interval": [round(x, 3) for x in interval],
        "plain_tokens_per_s": round(sum(r["plain_tokens"] for r in rows) / sum(r["plain_s"] for r in rows), 1),
        "lookup_tokens_per_s": round(sum(r["lookup_tokens"] for r in rows) / sum(r["lookup_s"] for r in rows), 1),
        "identical": f"{sum(r['identical'] for r in rows)}/{len(rows)}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--rows", type=int, default=5, help="prompts per category")
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    source, prompts = spec_bench(args.rows)
    target = hs.load_target(args.target, dtype=args.dtype)
    drafter = hs.PromptLookup()
    name = f"lookup/{args.target}-{args.dtype}"
    settings = {
        "target": args.target,
        "dtype": args.dtype,
        "tokens": args.tokens,
        "prompts": source,
        "drafter": repr(drafter),
    }
    path = RESULTS / f"{name}.json"
    old = json.loads(path.read_text()) if path.exists() else {}
    same = all(old.get(k) == v for k, v in settings.items()) and old.get("environment") == environment()
    done: dict[str, Any] = old["rows"] if same else {}

    def save() -> None:
        by: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in done.values():
            by[row["category"]].append(row)
        write(
            name,
            {
                **settings,
                "all": report(list(done.values())),
                "by_category": {c: report(r) for c, r in by.items()},
                "rows": done,
            },
        )

    measure(target, prompts, drafter, args.tokens, done, save)
    for category, figures in json.loads(path.read_text())["by_category"].items():
        print(category, figures)


if __name__ == "__main__":
    main()
