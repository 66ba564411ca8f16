"""Greedy text with drafts against plain greedy text, token for token; where they part, how near a tie it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headstart.core import Report, Taps
from headstart.drafters.base import Drafter
from headstart.generation import generate
from headstart.targets.base import Target, prefill
from headstart.tree import chain

ROUNDING = 4  # a gap of more than so many times what another order of sums changes is no rounding
RERUN = 8  # tokens that are run again one by one to see that


class Divergence(NamedTuple):
    """The first token that differs: the target's logit for the plain token minus that for the other, in a plain pass,
    and how far two plain passes over the same text differ there."""

    prompt: int
    at: int
    plain: int
    speculative: int
    gap: float
    noise: float

    @property
    def rounding(self) -> bool:
        """Two tokens near enough to a tie that the order of sums decides; an answer that goes on too long is no tie."""
        return self.plain != self.speculative and abs(self.gap) <= ROUNDING * self.noise


class Identity(NamedTuple):
    """`plain` are the plain answers, kept for the controls; `accepted` counts steps by accepted length."""

    prompts: int
    identical: int
    divergences: list[Divergence]
    plain: list[list[int]]
    tokens: int
    accepted: dict[int, int]

    @property
    def tokens_per_step(self) -> float:
        """Pooled over prompts."""
        steps = sum(self.accepted.values())
        return (self.tokens - self.prompts) / steps if steps else 0.0


def identity(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    report: Report | None = None,
) -> Identity:
    """Both arms, prompt by prompt, as one user would see them."""
    divergences: list[Divergence] = []
    plain: list[list[int]] = []
    accepted: Counter[int] = Counter()
    tokens = 0
    for number, ids in enumerate(prompts):
        told = generate(target, ids, max_new_tokens=max_new_tokens).token_ids
        fast = generate(target, ids, drafter=drafter, max_new_tokens=max_new_tokens)
        plain.append(told)
        tokens += len(fast.token_ids)
        accepted.update(fast.stats.accepted)
        if report is not None:
            report(f"{number + 1} of {len(prompts)} prompts", (number + 1) / len(prompts))
        if fast.token_ids != told:
            divergences.append(parting(target, number, ids, told, fast.token_ids))
    return Identity(
        len(prompts), len(prompts) - len(divergences), divergences, plain, tokens, dict(sorted(accepted.items()))
    )


def parting(target: Target, number: int, prompt: list[int], plain: list[int], fast: list[int]) -> Divergence:
    """Where two different answers part, and what the target thinks of both tokens there."""
    at = min(first_difference(plain, fast), min(len(plain), len(fast)) - 1)  # if one of them only went on too long
    one_V, other_V = _last_logits(target, [*prompt, *plain[:at]])
    a, b = plain[at], fast[at]
    noise = max(float((one_V - other_V).abs().max()), float(one_V.abs().max()) * torch.finfo(target.can.dtype).eps)
    return Divergence(number, at, a, b, float(one_V[a] - one_V[b]), noise)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Where two sequences part; the length of the shorter one if it begins the other."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _last_logits(target: Target, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Twice `[V]`: the text in one pass, and its last tokens one by one."""
    _, rows, _ = prefill(target, target.empty(1), [ids], Taps())
    whole_V = rows.logits_RNV([0])[0, 0].cpu().float()
    head = max(1, len(ids) - RERUN)
    cache, rows, _ = prefill(target, target.empty(1), [ids[:head]], Taps())
    for token in ids[head:]:
        rows, _ = target.extend(
            cache, torch.tensor([[token]], device=target.device), chain(1, 1, target.device), Taps()
        )
        cache = target.commit(cache, [[0]])
    return whole_V, rows.logits_RNV([0])[0, -1].cpu().float()
