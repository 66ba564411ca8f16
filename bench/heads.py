"""Tokens per step of trained heads on Spec-Bench, by replay along the target's plain greedy answers.

    python bench/heads.py HEAD_DIR [HEAD_DIR ...] --name medusa/spec-bench

The first 10 rows of each category, both turns (the second sees the plain answer to the first), 128 new tokens, greedy,
chat template. Answers and features are made once and kept in the cache folder. `--check N` decodes N prompts for
real with each head and compares tokens and steps with the replay.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import headstart as hs
from common import RESULTS, SPEC_BENCH, write
from headstart.checkpoint import DraftSize, inspect, load_head
from headstart.core import Features, Taps
from headstart.learn import of_row
from headstart.replay import Replayed, Spoken, replay
from headstart.train.answers import read_answers
from headstart.train.capture import Window, capture
from headstart.train.distil import Given, distil
from headstart.train.fingerprint import fingerprint
from headstart.train.readers import Chat, packaged_chats, read
from headstart.train.rollout import How

TOKENS = 128
RUN = 8


def chats(rows: int) -> tuple[str, list[Chat]]:
    """Spec-Bench where its file is, else the packaged held-out prompts."""
    if not SPEC_BENCH.exists():
        return "packaged held-out prompts", packaged_chats()
    taken: Counter[str] = Counter()
    out = []
    for chat in read(SPEC_BENCH).chats:
        taken[chat.category] += 1
        if taken[chat.category] <= rows:
            out.append(chat)
    digest = hashlib.sha256(SPEC_BENCH.read_bytes()).hexdigest()[:12]
    return f"Spec-Bench, first {rows} rows of each category, both turns (file {digest})", out


def spoken(target: Any, some: list[Chat], cache: Path) -> list[tuple[str, Spoken]]:
    """(category, plain greedy answer with final features) of every turn. Answers are not cut where they loop."""
    folder = cache / "spec-bench" / fingerprint(target)
    source = Given(some, unit=64, name="spec-bench", held_out=True)
    how = How(rows=32, max_new_tokens=TOKENS, cut_loops=False)
    distil(target, source, folder, how, report=lambda message, _: print(message, end="\r"))
    rows = [row for row in read_answers(folder, drop_duplicates=False) if len(row.response_ids) > 1]
    samples = [of_row(row) for row in rows]
    texts = capture(target, samples, Taps(final=True), cache / "features", window=Window(before=1),
                    report=lambda message, _: print(message, end="\r"))  # fmt: skip
    by_ids = {}
    for i in range(len(texts)):
        text = texts[i]
        by_ids[tuple(text.token_T.tolist())] = text
    out = []
    for row in rows:
        ids = [row.prompt_ids[-1], *row.response_ids]
        text = by_ids[tuple(ids)]
        out.append((row.category, Spoken(ids, 1, Features(text.features.final, ()))))
    return out


def looping(ids: list[int]) -> int:
    """Tokens that end a run of 8 which stood in the answer before."""
    seen: set[tuple[int, ...]] = set()
    count = 0
    for i in range(RUN, len(ids) + 1):
        run = tuple(ids[i - RUN : i])
        count += run in seen
        seen.add(run)
    return count


def figures(result: Replayed) -> dict[str, Any]:
    """Pooled and mean per prompt; acceptance unconditional and conditional."""
    rates = [tokens / steps for tokens, steps in result.per_text if steps]
    return {
        "tokens_per_step": round(result.tokens_per_step, 3),
        "mean_per_answer": round(sum(rates) / len(rates), 3),
        "accepted_at_least_d": [round(x, 3) for x in result.unconditional()],
        "accepted_d_given_d_minus_1": [round(x, 3) for x in result.conditional()],
    }


def measure(target: Any, head: Path, texts: list[tuple[str, Spoken]], nodes: int) -> dict[str, Any]:
    """One head with a tree of so many nodes, and as a chain."""
    drafter = load_head(head, target, draft=DraftSize(nodes=nodes))
    chain = load_head(head, target, policy=hs.Chain(depth=drafter.policy.depth))
    everything = [text for _, text in texts]
    by_category = defaultdict(list)
    for category, text in texts:
        by_category[category].append(text)
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


def check(target: Any, head: Path, some: list[Chat], count: int, nodes: int) -> str:
    """Decode for real: tokens must be those of plain decoding (fp32)."""
    drafter = load_head(head, target, draft=DraftSize(nodes=nodes))
    same = steps = tokens = 0
    for chat in some[:: max(1, len(some) // count)][:count]:
        asked = [m for m in chat.messages if m["role"] == "user"][:1]
        plain = hs.generate(target, asked, max_new_tokens=TOKENS)
        fast = hs.generate(target, asked, drafter=drafter, max_new_tokens=TOKENS)
        same += plain.token_ids == fast.token_ids
        steps += fast.stats.passes
        tokens += fast.stats.tokens - 1
    return f"{same}/{count} identical, {tokens / max(steps, 1):.3f} tokens per step decoded for real"


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
    texts = spoken(target, some, args.cache)
    path = RESULTS / f"{args.name}.json"
    old = json.loads(path.read_text(encoding="utf-8"))["heads"] if path.exists() else []
    results = {row["trained_tokens"]: row for row in old}
    for head in args.heads:
        row = measure(target, head, texts, args.nodes)
        if args.check:
            row["real"] = check(target, head, some, args.check, args.nodes)
        print(json.dumps(row, indent=1), flush=True)
        results[row["trained_tokens"]] = row
    tokens = sum(len(t.ids) - t.prompt for _, t in texts)
    write(args.name, {
        "target": args.target, "dtype": args.dtype, "prompts": source, "answers": len(texts), "new_tokens": TOKENS,
        "share_of_tokens_in_a_repeated_8_gram": round(sum(looping(t.ids[t.prompt :]) for _, t in texts) / tokens, 3),
        "heads": [results[k] for k in sorted(results)],
    })  # fmt: skip


if __name__ == "__main__":
    main()
