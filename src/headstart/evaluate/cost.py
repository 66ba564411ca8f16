"""What a target pass over n nodes costs, in time, at some context: v(n), the other half of every speed-up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from headstart.core import Report, Taps
from headstart.targets.base import Target, prefill
from headstart.tree import chain, from_parents

NODES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
CONTEXTS = (256, 2048)
ROUNDS = 7


@torch.inference_mode()
def target_cost(
    target: Target,
    contexts: Sequence[int] = CONTEXTS,
    nodes: Sequence[int] = NODES,
    rounds: int = ROUNDS,
    report: Report | None = None,
) -> dict[int, dict[int, float]]:
    """Median milliseconds by context and nodes: a pass with the tree mask on (none for one node, as in plain decoding),
    up to the argmax of every node, and its commit. Contexts that the target has no room for are left out."""
    out: dict[int, dict[int, float]] = {}
    size = target.vocabulary.size
    counts = [n for n in nodes if n <= target.can.max_nodes and (target.can.tree or n == 1)]
    for context in contexts:
        if context + max(counts) > target.can.max_positions:
            continue
        if report is not None:
            report(f"cost of a pass at {context} tokens of context", None)
        cache, _, _ = prefill(target, target.empty(1), [[(7 * i) % size for i in range(context)]], Taps())
        seconds: dict[int, list[float]] = {n: [] for n in counts}
        for turn in range(rounds + 1):
            for n in counts if turn % 2 else counts[::-1]:
                token_1N = torch.arange(n, device=target.device)[None] % size
                parent_1N = torch.tensor([[max(i - 1, 0) // 2 for i in range(n)]], device=target.device)
                tree = chain(1, 1, target.device) if n == 1 else from_parents(parent_1N)
                _wait(target)
                start = time.perf_counter()
                rows, _ = target.extend(cache, token_1N, tree, Taps())
                rows.argmax_BN().tolist()
                cache = target.commit(cache, [[]])
                _wait(target)
                if turn:  # the first round warms up
                    seconds[n].append(time.perf_counter() - start)
        out[context] = {n: 1e3 * statistics.median(s) for n, s in seconds.items()}
    return out


def _wait(target: Target) -> None:
    if target.device.type != "cpu":
        torch.accelerator.synchronize()
