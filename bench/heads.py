"""Tokens per step of trained heads on Spec-Bench, by replay along the target's plain greedy answers.

    python bench/heads.py HEAD_DIR [HEAD_DIR ...] --name medusa/spec-bench

The first 10 rows of each category, both turns (the second sees the plain answer to the first), 128 new tokens, greedy,
chat template. Answers and features are made once and kept in the cache folder. `--check N` decodes N prompts for
real with each head, beside the replay along their plain answers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import headstart as hs
from common import RESULTS, SPEC_BENCH, write
from headstart.checkpoint import DraftSize, inspect, load_head
from headstart.core import Taps
from headstart.evaluate.run import some as first_of_each
from headstart.evaluate.texts import Turn, answered, looping
from headstart.prove.greedy import identity
from headstart.replay import Replayed, Spoken, replay
from headstart.targets.base import prefill
from headstart.train.capture import Window
from headstart.train.readers import Chat, evenly, opening, packaged_chats, read
from headstart.train.template import prompt_ids

TOKENS = 128


def chats(rows: int) -> tuple[str, list[Chat]]:
    """Spec-Bench where its file is, else the packaged held-out prompts."""
    if not SPEC_BENCH.exists():
        return "packaged held-out prompts", packaged_chats()
    digest = hashlib.sha256(SPEC_BENCH.read_bytes()).hexdigest()[:12]
    some = first_of_each(read(SPEC_BENCH).chats, rows)
    return f"Spec-Bench, first {rows} rows of each category, both turns (file {digest})", some


def figures(result: Replayed) -> dict[str, Any]:
    """Pooled and mean per prompt; acceptance unconditional and conditional."""
    rates = [tokens / steps for tokens, steps in result.per_text if steps]
    return {
        "tokens_per_step": round(result.tokens_per_step, 3),
        "mean_per_answer": round(sum(rates) / len(rates), 3),
        "accepted_at_least_d": [round(x, 3) for x in result.unconditional()],
        "accepted_d_given_d_minus_1": [round(x, 3) for x in result.conditional()],
    }


def measure(target: Any, head: Path, turns: list[Turn], nodes: int) -> dict[str, Any]:
    """One head with a tree of so many nodes, and as a chain."""
    drafter = load_head(head, target, draft=DraftSize(nodes=nodes))
    chain = load_head(head, target, policy=hs.Chain(depth=drafter.policy.depth))
    everything = [turn.text for turn in turns]
    by_category = defaultdict(list)
    for turn in turns:
        by_category[turn.category].append(turn.text)
    card = inspect(head)["card"]
    return {
        "head": head.parent.name if head.name == "head" else head.name,
        "trained_tokens": card.get("tokens"),
        "held_out_tokens_per_step": card.get("held_out_tokens_per_step"),
        "nodes": nodes,
        "tree": figures(replay(drafter, everything)),
        "chain": figures(replay(chain, everything)),
        "categories": {
            name: round(replay(drafter, group).tokens_per_step, 3) for name, group in sorted(by_category.items())
        },
    }


def check(target: Any, head: Path, some: list[Chat], count: int, nodes: int) -> dict[str, Any]:
    """Decode first turns for real, plainly and with the head. In 16 bits a tree's sums run in another order, so texts
    may part where the target is near a tie; anything else is a fault."""
    drafter = load_head(head, target, draft=DraftSize(nodes=nodes))
    asked = [prompt_ids(target.tokenizer, opening(chat)) for chat in evenly(some, count)]
    found = identity(target, drafter, asked, TOKENS)
    texts = []
    for prompt, answer in zip(asked, found.plain, strict=True):
        _, _, features = prefill(target, target.empty(1), [prompt + answer], drafter.needs)
        texts.append(Spoken(prompt + answer, len(prompt), features.map(lambda x_1TD: x_1TD[0])))
    same = replay(drafter, texts)
    return {
        "prompts": found.prompts,
        "identical": found.identical,
        "parted_beyond_rounding": sum(not d.rounding for d in found.divergences),
        "tokens_per_step": round(found.tokens_per_step, 3),
        "replayed_tokens_per_step": round(same.tokens_per_step, 3),
    }


def said(message: str, share: float | None) -> None:
    """Progress on one line."""
    print(message, end="\r")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("heads", type=Path, nargs="+")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--rows", type=int, default=10, help="prompts per category")
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--check", type=int, default=0)
    parser.add_argument("--cache", type=Path, default=Path("runs/cache"))
    parser.add_argument("--name", default="medusa/spec-bench")
    args = parser.parse_args()
    source, some = chats(args.rows)
    target = hs.load_target(args.target, dtype=args.dtype)
    window, needs = Window(before=1), Taps(final=True)
    texts = answered(target, some, args.cache, max_new_tokens=TOKENS, needs=needs, window=window, report=said)
    path = RESULTS / f"{args.name}.json"
    old = json.loads(path.read_text(encoding="utf-8"))["heads"] if path.exists() else []
    results = {row["trained_tokens"]: row for row in old}
    for head in args.heads:
        row = measure(target, head, texts, args.nodes)
        if args.check:
            row["real"] = check(target, head, some, args.check, args.nodes)
        print(json.dumps(row, indent=1), flush=True)
        results[row["trained_tokens"]] = row
    loops = [looping(turn.text) for turn in texts]
    write(args.name, {
        "target": args.target, "dtype": args.dtype, "prompts": source, "answers": len(texts), "new_tokens": TOKENS,
        "share_of_tokens_in_a_repeated_8_gram": round(sum(map(sum, loops)) / sum(map(len, loops)), 3),
        "heads": [results[k] for k in sorted(results)],
    })  # fmt: skip


if __name__ == "__main__":
    main()
