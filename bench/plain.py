"""Plain decoding against transformers `generate`: same weights, same dtype, same process, interleaved, greedy.

Ratios above 1 mean that headstart is faster. Rates count emitted tokens over the whole call, prompt included.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

import headstart as hs
from common import interleaved, median, ratio_interval, spec_bench, write
from headstart.requests import encode


def compare(target: Any, messages: Any, tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds per token of both arms on one prompt, round by round."""
    ids = torch.tensor([encode(target, messages)])
    said: dict[str, list[int]] = {}

    def ours() -> float:
        start = time.perf_counter()
        said["headstart"] = hs.generate(target, messages, max_new_tokens=tokens).token_ids
        return time.perf_counter() - start

    def theirs() -> float:
        start = time.perf_counter()
        mask = torch.ones_like(ids)
        out = target.model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
        said["transformers"] = out[0, ids.shape[1] :].tolist()
        return time.perf_counter() - start

    arms = {"headstart": ours, "transformers": theirs}
    interleaved(arms, 1)  # warm-up
    seconds = interleaved(arms, rounds)
    return {
        "identical": said["headstart"] == said["transformers"],
        **{arm: [s / len(said[arm]) for s in seconds[arm]] for arm in arms},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    source, rows = spec_bench(1)
    result = {}
    for dtype in ("bf16", "fp32"):
        target = hs.load_target(args.target, dtype=dtype)
        runs = [compare(target, messages, args.tokens, args.rounds) for _, _, messages in rows[: args.prompts]]
        pairs = [pair for run in runs for pair in zip(run["transformers"], run["headstart"], strict=True)]
        ratio, interval = ratio_interval(pairs)
        result[dtype] = {
            "speedup_over_transformers": round(ratio, 3),
            "interval": [round(x, 3) for x in interval],
            "identical_outputs": f"{sum(run['identical'] for run in runs)}/{len(runs)}",
            "headstart_tokens_per_s": round(1 / median([b for _, b in pairs]), 1),
            "transformers_tokens_per_s": round(1 / median([a for a, _ in pairs]), 1),
        }
        print(dtype, result[dtype])
        del target
    write("engine/plain", {"target": args.target, "prompts": source, "tokens": args.tokens, **result})


if __name__ == "__main__":
    main()
