"""Typical acceptance (Medusa section 2.3.1). LOSSY: the output does not follow the target's law."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.core import Kind, Shape, Walk, Why
from headstart.errors import BadInput
from headstart.sampling import Coin
from headstart.verify.base import Candidates


@dataclass(frozen=True)
class Typical:
    """LOSSY. A child x is taken if p(x) > min(epsilon, delta * exp(-H(p))); the longest accepted path wins, among
    equals the likelier one; the token after it is the argmax. verification.md 5.11, medusa.md 6."""

    epsilon: float = 0.09
    delta: float = 0.3
    name: str = "typical (LOSSY)"
    lossless: bool = False
    exact_for: frozenset[tuple[Kind, Shape]] = frozenset()

    def __post_init__(self) -> None:
        """Raises BadInput for thresholds outside (0, 1]."""
        if not (0 < self.epsilon <= 1 and 0 < self.delta <= 1):
            raise BadInput(f"Typical(epsilon={self.epsilon}, delta={self.delta}): expected both in (0, 1].")

    def walk(self, tree: Candidates, law: Callable[[int], Tensor], coin: Coin) -> Walk:
        """Depth-first over accepted nodes only, so rows that no accepted path reaches are never processed."""
        best: tuple[int, float] = (1, 0.0)
        best_path, stack = [0], [([0], 0.0)]
        while stack:
            path, score = stack.pop()
            if (len(path), score) > best:
                best, best_path = (len(path), score), path
            p_V = law(path[-1])
            entropy = float(torch.special.entr(p_V).sum())
            threshold = min(self.epsilon, self.delta * math.exp(-entropy))
            for child in tree.trials[path[-1]]:
                p = float(p_V[tree.tokens[child]])
                if p > threshold:
                    stack.append(([*path, child], score + math.log(p)))  # products would underflow (S15)
        token = int(law(best_path[-1]).argmax())
        return Walk(best_path, token, Why.REFUSED if tree.trials[best_path[-1]] else Why.LEAF)
