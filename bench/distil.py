"""Distillation throughput: answer tokens per second of the target, on the packaged training prompts."""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import headstart as hs
from common import write
from headstart.train.answers import read_answers, summary
from headstart.train.distil import Given, distil
from headstart.train.readers import packaged_chats
from headstart.train.rollout import How


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=192)
    args = parser.parse_args()
    target = hs.load_target(args.target, dtype=args.dtype)
    chats = packaged_chats(held_out=False)
    out = Path(tempfile.mkdtemp())
    start = time.perf_counter()
    distil(target, Given(chats, len(chats)), out / "answers", How(rows=args.batch, max_new_tokens=args.tokens))
    seconds = time.perf_counter() - start
    found = summary(read_answers(out / "answers"))
    shutil.rmtree(out)
    print(f"{found.tokens} answer tokens in {seconds:.0f} s: {found.tokens / seconds:.0f} tokens/s")
    write("medusa/distil", {
        "target": args.target, "dtype": str(target.can.dtype), "batch": args.batch, "max_new_tokens": args.tokens,
        "answers": found.answers, "answer_tokens": found.tokens, "prompt_tokens": found.prompt_tokens,
        "seconds": round(seconds, 1), "answer_tokens_per_s": round(found.tokens / seconds, 1), "ended": found.ended,
    })  # fmt: skip


if __name__ == "__main__":
    main()
