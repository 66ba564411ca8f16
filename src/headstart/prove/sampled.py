"""Sampled output against the target's law: decode with drafts, then look every emitted token up in its law."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from headstart.core import Kind, Report, Taps
from headstart.decode import decode
from headstart.drafters.base import Drafter
from headstart.prove.places import Place, examine, place, verdict
from headstart.requests import new_request, resolved
from headstart.sampling import History, Sampling, law
from headstart.targets.base import Target, prefill
from headstart.tree import chain
from headstart.verify.base import Verifier

BATCH = 16  # answers side by side
CHUNK = 128  # positions whose laws are computed in one pass


class Emitted(NamedTuple):
    """One answer: the prompt, its tokens, and the drafted candidates that were tried where each token was chosen."""

    prompt: list[int]
    tokens: list[int]
    tried: list[list[int]]


class Checked(NamedTuple):
    """What was emitted, how it lies in its laws, and what the tests say. `accepted` counts steps by accepted length."""

    tokens: int
    accepted: dict[int, int]
    impossible: int
    p_values: dict[str, float]
    p_value: float


def speak(
    target: Target,
    drafter: Drafter,
    verifier: Verifier,
    prompts: Sequence[list[int]],
    how: Sampling,
    max_new_tokens: int,
) -> Iterator[tuple[list[Emitted], Counter[int]]]:
    """Decode the prompts, a batch at a time, with what was tried on the way and the steps by accepted length.
    Candidates that were drawn, not chosen, count as untried: given them, a token does not follow the target's law;
    only over all draws it does."""
    settled = resolved(target, how, max_new_tokens)
    fixed = drafter.kind is Kind.POINT
    for start in range(0, len(prompts), BATCH):
        some = prompts[start : start + BATCH]
        seeds = [None if how.seed is None else how.seed * 100_003 + start + i for i in range(len(some))]
        requests = [
            new_request(target, ids, replace(settled, seed=seed), max_new_tokens, 0)
            for ids, seed in zip(some, seeds, strict=True)
        ]
        rows = [Emitted(ids, [], []) for ids in some]
        accepted: Counter[int] = Counter()
        for step in decode(target, requests, drafter, verifier):
            for e in step.emissions:
                for node, token in zip(e.kept, e.tokens, strict=True):
                    tried = [e.tree.tokens[child] for child in e.tree.trials[node]] if fixed else []
                    rows[e.request].tokens.append(token)
                    rows[e.request].tried.append(tried)
                if step.drafted:
                    accepted[len(e.kept) - 1] += 1
        yield rows, accepted


@torch.inference_mode()
def look_up(target: Target, answer: Emitted, how: Sampling, inside: Sequence[float]) -> list[Place]:
    """Every token's place in the law that a plain pass over the finished text gives it."""
    ids = [*answer.prompt, *answer.tokens[:-1]]
    history = History(answer.prompt)
    cache = target.empty(1)
    if len(answer.prompt) > 1:
        cache, _, _ = prefill(target, cache, [answer.prompt[:-1]], Taps())
    places: list[Place] = []
    for start in range(len(answer.prompt) - 1, len(ids), CHUNK):
        part = torch.tensor([ids[start : start + CHUNK]], device=target.device)
        rows, _ = target.extend(cache, part, chain(1, part.shape[1], target.device), Taps())
        logits_NV = rows.logits_RNV([0])[0].cpu()
        cache = target.commit(cache, [range(part.shape[1])])
        for logits_V in logits_NV:
            at = len(places)
            places.append(place(law(logits_V, how, history, []), answer.tokens[at], answer.tried[at], inside[at]))
            history.emit(answer.tokens[at])
    return places


def checks(
    target: Target, drafter: Drafter, verifier: Verifier, prompts: Sequence[list[int]], how: Sampling,
    max_new_tokens: int, *, decoded: Sampling | None = None,
) -> Iterator[Checked]:  # fmt: skip
    """Decode and test, all so far after every batch. `decoded`, for controls: the settings that decoding is given if
    they are others than it is tested against."""
    settled = resolved(target, how, max_new_tokens)
    rng = torch.Generator(device="cpu").manual_seed(0 if how.seed is None else how.seed)  # apart from decoding's
    places: list[list[Place]] = []
    accepted: Counter[int] = Counter()
    for answers, steps in speak(target, drafter, verifier, prompts, decoded or how, max_new_tokens):
        accepted.update(steps)
        for answer in answers:
            inside = torch.rand(len(answer.tokens), generator=rng, dtype=torch.float64).tolist()
            places.append(look_up(target, answer, settled, inside))
        impossible = sum(not p.possible for answer in places for p in answer)
        p_values = examine(places)
        tokens = sum(map(len, places))
        yield Checked(tokens, dict(sorted(accepted.items())), impossible, p_values, verdict(p_values, impossible))


def check(
    target: Target, drafter: Drafter, verifier: Verifier, prompts: Sequence[list[int]], how: Sampling,
    max_new_tokens: int, *, decoded: Sampling | None = None, report: Report | None = None,
) -> Checked:  # fmt: skip
    """The same over all prompts."""
    last = Checked(0, {}, 0, {}, 1.0)
    for done, found in enumerate(checks(target, drafter, verifier, prompts, how, max_new_tokens, decoded=decoded), 1):
        last = found
        if report is not None:
            answers = min(done * BATCH, len(prompts))
            report(f"{answers} of {len(prompts)} answers", answers / len(prompts))
    return last
