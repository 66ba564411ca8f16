"""Work outside the target's passes in one step that verifies 32 nodes: draft, verify, commit, absorb, stop, text.

The pass ends at logits; a fused head-and-argmax counts with it (docs/design.md, definitions). Milliseconds per step,
median over steps, and as a share of the step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

import headstart as hs
from common import median, spec_bench, write
from headstart.core import Budget, Draft
from headstart.drafters.base import Sprout, from_sprouts
from headstart.drafters.lookup import PromptLookup
from headstart.sampling import Coin, Sampling
from headstart.targets.base import Rows

NODES = 32


class FullLookup(PromptLookup):
    """Prompt lookup topped up with further children of the root, so that every tree has the same size."""

    def draft(self, state: Any, budget: Budget, sampling: Sequence[Sampling], coins: Sequence[Coin]) -> Draft:
        sprouts = []
        for text, depth in zip(state, budget.depth, strict=True):
            sprout = self._sprout(text, depth, NODES)
            taken = {t for t, p in zip(sprout.tokens, sprout.parents, strict=True) if p == 0}
            extra = [t for t in range(100, 100 + 2 * NODES) if t not in taken][: NODES - len(sprout.tokens)]
            sprouts.append(Sprout(sprout.tokens + extra, sprout.parents + [0] * len(extra)))
        return from_sprouts(sprouts, torch.device("cpu"))


class Stopwatch:
    """Time spent inside the target: the pass itself and everything that ends in logits or their argmax."""

    def __init__(self, target: Any) -> None:
        self.seconds = 0.0
        extend = target.extend
        argmax, logits = Rows.argmax_BN, Rows.logits_RNV
        target.extend = self._timed(extend)
        Rows.argmax_BN = self._timed(argmax)  # type: ignore[method-assign]
        Rows.logits_RNV = self._timed(logits)  # type: ignore[method-assign]
        self._restore = (argmax, logits)

    def _timed(self, call: Any) -> Any:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.seconds += time.perf_counter() - start

        return timed

    def stop(self) -> None:
        Rows.argmax_BN, Rows.logits_RNV = self._restore  # type: ignore[method-assign]


def measure(target: Any, prompts: list[Any], sampling: Sampling) -> dict[str, float]:
    watch = Stopwatch(target)
    outside, steps = [], []
    drafter = FullLookup(branches=4, min_ngram=1)
    for messages in prompts:
        pieces = hs.stream(target, messages, drafter=drafter, max_new_tokens=96, sampling=sampling)
        next(pieces)
        while True:
            watch.seconds = 0.0
            start = time.perf_counter()
            piece = next(pieces, None)
            step = time.perf_counter() - start
            if piece is None:
                break
            outside.append(step - watch.seconds)
            steps.append(step)
    watch.stop()
    del target.extend
    return {
        "outside_ms": round(1e3 * median(outside), 3),
        "step_ms": round(1e3 * median(steps), 3),
        "share": round(median(outside) / median(steps), 4),
        "steps": len(steps),
    }


def main() -> None:
    source, rows = spec_bench(1)
    prompts = [
        messages for _, category, messages in rows if category in ("summarization", "summary", "rag", "coding", "code")
    ]
    target = hs.load_target("smollm2-135m")
    measure(target, prompts[:1], Sampling())  # warm-up
    result = {
        "greedy": measure(target, prompts, Sampling()),
        "top_p": measure(target, prompts, Sampling(temperature=0.7, top_p=0.9, seed=1)),
        "temperature": measure(target, prompts, Sampling(temperature=1.0, seed=1)),
        "penalties": measure(target, prompts, Sampling(repetition_penalty=1.1)),
    }
    for name, figures in result.items():
        print(name, figures)
    write("engine/overhead", {"nodes": NODES, "dtype": str(target.can.dtype), "prompts": source, **result})


if __name__ == "__main__":
    main()
