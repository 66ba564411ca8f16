"""The decoding loop: draft, target pass, verify, commit, absorb. Plain decoding is the loop without a draft."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from headstart.core import Budget, Committed, Draft, Features
from headstart.drafters.base import Drafter, Sprout, from_sprouts
from headstart.stopping import Stop
from headstart.targets.base import Target, prefill
from headstart.tree import Tree, chain, from_parents
from headstart.verify.base import Candidates, Chooser, Verdict, Verifier, logprobs_of, verify

TopLogprobs = list[tuple[int, float]]
Lap = Callable[[str], None]  # told the verb that has just ended: for measuring


@dataclass
class Request(Chooser):
    """One sequence to continue: how to choose tokens, what came before, where to stop."""

    stop: Stop


@dataclass(frozen=True)
class State:
    """Where decoding stands between two steps: caches hold all tokens but the roots. Moved, not copied."""

    cache: Any
    drafter_state: Any
    roots: list[int]


class Emission(NamedTuple):
    """What one request emitted in one step. `tree` is its draft; `kept` the accepted nodes, root first."""

    request: int
    tokens: list[int]
    tree: Candidates
    kept: list[int]
    logprobs: list[tuple[float, TopLogprobs]]


class Step(NamedTuple):
    """One step of the batch. `state` covers the requests that go on, `alive` (and, when none does, the last ones)."""

    emissions: list[Emission]
    state: State
    alive: list[int]
    drafted: bool  # False for the step that ran the prompt


def untimed(verb: str) -> None:
    """Nobody is measuring."""


def decode(
    target: Target,
    requests: Sequence[Request],
    drafter: Drafter,
    verifier: Verifier,
    state: State | None = None,
    lap: Lap = untimed,
) -> Iterator[Step]:
    """Decode a batch; yields after every step, with caches consistent however the generator is left.

    `state` continues caches in which the beginning of each prompt stands already (see `generation.Session`).
    """
    cached = [0] * len(requests) if state is None else state.cache.lengths
    cache = target.empty(len(requests)) if state is None else state.cache
    memory = drafter.start(len(requests)) if state is None else state.drafter_state
    prompts = [list(r.history.prompt[n:]) for r, n in zip(requests, cached, strict=True)]

    cache, rows, features = prefill(target, cache, prompts, drafter.needs)
    last = from_sprouts([Sprout([prompt[-1]], [0]) for prompt in prompts], target.device)
    verdict = verify(last, rows, requests, verifier)
    emissions = _emit(verdict, list(range(len(requests))), requests)
    roots = [e.tokens[-1] for e in emissions]
    memory = drafter.absorb(memory, Committed(prompts, roots, [[-1] * len(p) for p in prompts], features))
    step = Step(emissions, State(cache, memory, roots), list(range(len(requests))), drafted=False)
    while True:
        step = _without_finished(target, drafter, requests, step)
        yield step
        if all(requests[r].stop.reason for r in step.alive):
            return
        step = _step(target, requests, drafter, verifier, step, lap)


def _step(
    target: Target, requests: Sequence[Request], drafter: Drafter, verifier: Verifier, step: Step, lap: Lap
) -> Step:
    live = [requests[r] for r in step.alive]
    cache, memory = step.state.cache, step.state.drafter_state
    budget = Budget([r.stop.remaining - 1 for r in live], target.can.max_nodes)

    draft = drafter.draft(memory, budget, [r.sampling for r in live], [r.coin for r in live])
    tree = _tree(draft, target)
    lap("draft")
    rows, features = target.extend(cache, draft.token_BN.to(target.device), tree, drafter.needs)
    lap("target")
    verdict = verify(draft, rows, live, verifier)
    emissions = _emit(verdict, step.alive, live)
    lap("verify")
    kept = [e.kept for e in emissions]
    cache = target.commit(cache, kept)
    lap("commit")
    roots = [e.tokens[-1] for e in emissions]
    tokens = [[e.tree.tokens[node] for node in e.kept] for e in emissions]
    memory = drafter.absorb(memory, Committed(tokens, roots, kept, _kept(features, kept)))
    lap("absorb")
    return Step(emissions, State(cache, memory, roots), step.alive, drafted=True)


def _emit(verdict: Verdict, names: Sequence[int], requests: Sequence[Request]) -> list[Emission]:
    """Cut each request's block where its answer ends. The last emitted token is the next root: a block of m tokens
    commits the m nodes before them, so the caches always hold everything but the root."""
    emissions = []
    for name, request, tree, walk, logits_NV in zip(
        names, requests, verdict.trees, verdict.walks, verdict.logits, strict=True
    ):
        block = [tree.tokens[node] for node in walk.kept[1:]] + [walk.next]
        tokens = block[: request.stop.cut(block)]
        for token in tokens:
            request.history.emit(token)
        kept = walk.kept[: len(tokens)]
        logprobs = []
        if request.sampling.logprobs and logits_NV is not None:
            top = request.sampling.top_logprobs
            logprobs = [logprobs_of(logits_NV[node], token, top) for node, token in zip(kept, tokens, strict=True)]
        emissions.append(Emission(name, tokens, tree, kept, logprobs))
    return emissions


def _without_finished(target: Target, drafter: Drafter, requests: Sequence[Request], step: Step) -> Step:
    """Finished requests leave the batch, so the others stop paying for them; the very last ones keep their caches."""
    going = [i for i, r in enumerate(step.alive) if requests[r].stop.reason is None]
    if not going or len(going) == len(step.alive):
        return step
    state = State(
        target.select(step.state.cache, going),
        drafter.select(step.state.drafter_state, going),
        [step.state.roots[i] for i in going],
    )
    return step._replace(state=state, alive=[step.alive[i] for i in going])


def _tree(draft: Draft, target: Target) -> Tree:
    if draft.chain:
        return chain(len(draft.token_BN), draft.token_BN.shape[1], target.device)
    return from_parents(draft.parent_BN.to(target.device))


def _kept(features: Features, kept: Sequence[Sequence[int]]) -> Features:
    if features.final is None and not features.layers:
        return features
    width = max(len(k) for k in kept)
    node_BA = torch.tensor([[*k, *[0] * (width - len(k))] for k in kept])
    some = features.final if features.final is not None else features.layers[0]
    return features.gather(node_BA.to(some.device))
