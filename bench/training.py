"""Training throughput: supervised tokens per second of a Medusa head with 5 depths, cached features.

Features are those of the target's answers to the packaged held-out prompts, made once; no figure of quality is taken.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import headstart as hs
from common import write
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.learn import draft_vocab, held_out_answers, window_of
from headstart.train.capture import capture
from headstart.train.loop import Measured, Training, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, default=8192, help="draft vocabulary")
    parser.add_argument("--tokens", type=int, default=60_000, help="per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=Path("runs/cache"))
    args = parser.parse_args()
    target = hs.load_target(args.target, dtype=args.dtype)
    samples = held_out_answers(target, args.cache)
    vocab = draft_vocab(target, samples, args.rows)
    readout = target.readout(vocab.ids_U)
    rates = []
    for _ in range(args.rounds):
        head = Medusa(MedusaConfig(heads=5), target.width, vocab.size)
        texts = capture(target, samples, head.needs, args.cache / "features", window=window_of(head, 5))
        how = Training(tokens=args.tokens, evaluate_every=10**9)
        out = Path(tempfile.mkdtemp())
        start = time.perf_counter()
        done = train(
            head, texts, how, out,
            readout=lambda depth: readout, vocab=vocab, evaluate=lambda head: Measured(0.0, []), save_every=1e9,
        )  # fmt: skip
        rates.append(done.tokens / (time.perf_counter() - start))
        shutil.rmtree(out)
        print(f"{rates[-1]:.0f} supervised tokens/s", flush=True)
    write("medusa/training", {
        "target": args.target, "dtype": str(target.can.dtype), "depths": 5, "draft_rows": vocab.size,
        "supervised_tokens_per_s": round(statistics.median(rates)), "rounds": [round(r) for r in rates],
    })  # fmt: skip


if __name__ == "__main__":
    main()
