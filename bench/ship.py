"""Put a trained head among those that come with the package: 16-bit weights, figures and licence on its card.

    python bench/ship.py runs/medusa-2M/head medusa-smollm2-135m

Figures come from the result file that `bench/heads.py` wrote for the same head; what the head was trained on stands on
its card already.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import headstart as hs
from common import RESULTS
from headstart.checkpoint import load, save
from headstart.checkpoint.shipped import FOLDER

LARGEST = 32 * 2**20  # bytes of a head in the package
KEPT = ("tokens", "chosen_at_tokens", "held_out_tokens_per_step", "held_out_prompts", "tree_nodes", "data", "data_hash",
        "versions")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("head", type=Path)
    parser.add_argument("name")
    parser.add_argument("--results", default="medusa/spec-bench")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--licence", default="Apache-2.0, as the target's weights and the code that made it")
    args = parser.parse_args()
    found = load(args.head)
    card = found.record.card
    results = json.loads((RESULTS / f"{args.results}.json").read_text(encoding="utf-8"))
    (row,) = (row for row in results["heads"] if row["head"] == args.head.parent.name)
    save(
        FOLDER / args.name, found.head.to(torch.bfloat16), found.record.family,
        target=hs.load_target(args.target), target_name=args.target, vocab=found.vocab, paths=found.paths,
        card={
            **{key: card[key] for key in KEPT},
            "argv": [Path(card["argv"][0]).name, *card["argv"][1:]],
            "licence": args.licence,
            "training_text": "the target's own greedy answers to prompts that it invented itself (make curve)",
            "figures": {
                "file": f"docs/results/{args.results}.json", "prompts": results["prompts"], "nodes": row["nodes"],
                "tokens_per_step": row["tree"]["tokens_per_step"],
                "tokens_per_step_as_a_chain": row["chain"]["tokens_per_step"],
            },
        },
    )  # fmt: skip
    size = sum(path.stat().st_size for path in (FOLDER / args.name).iterdir())
    print(f"{FOLDER.name}/{args.name}: {size / 2**20:.1f} MiB, {row['tree']['tokens_per_step']} tokens per step")
    assert size <= LARGEST


if __name__ == "__main__":
    main()
