"""The contract of a verifier, and how a batch of drafts is verified with one synchronisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headstart.core import Draft, Kind, Shape, Walk, Why, to_host
from headstart.errors import Unsupported
from headstart.sampling import Coin, History, Sampling, at_least_fp32, best, law, scores
from headstart.targets.base import Rows


@dataclass(frozen=True)
class Candidates:
    """One request's draft on the host. `trials[i]`: children of node i in the order to test, repeats included."""

    tokens: list[int]
    parents: list[int]
    trials: list[list[int]]
    kind: Kind
    q: Callable[[int], Tensor] | None = None

    def path(self, node: int) -> list[int]:
        """Tokens from below the root down to this node: the context that drafting added."""
        out = []
        while node:
            out.append(self.tokens[node])
            node = self.parents[node]
        return out[::-1]


class Verifier(Protocol):
    """Walks down one request's tree. `law(node)` is the target's processed next-token law after that node."""

    @property
    def name(self) -> str:
        """Shown in reports; a lossy verifier says so in it."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether it keeps the target's law for the proposals of `exact_for`."""
        ...

    @property
    def exact_for(self) -> frozenset[tuple[Kind, Shape]]:
        """Proposal kinds and tree shapes it is exact for."""
        ...

    def walk(self, tree: Candidates, law: Callable[[int], Tensor], coin: Coin) -> Walk:
        """The kept path and the token after it."""
        ...


def demand_valid(verifier: Verifier, kind: Kind, shape: Shape) -> None:
    """Raises Unsupported if the verifier is not exact for such drafts; lossy verifiers make no such promise."""
    if verifier.lossless and (kind, shape) not in verifier.exact_for:
        exact = ", ".join(sorted(f"{k.value} {s.value}" for k, s in verifier.exact_for))
        raise Unsupported(
            f"Verifier `{verifier.name}` is not exact for a {shape.value} of {kind.value} candidates "
            f"(it is for: {exact}). Use `Lossless()`, which is exact for all of them."
        )


@dataclass
class Chooser:
    """What verification needs to know of a request."""

    sampling: Sampling
    history: History
    coin: Coin


class Verdict(NamedTuple):
    """Per request: the draft on the host, the walk, and the raw logits `[N, V]` where they were fetched."""

    trees: list[Candidates]
    walks: list[Walk]
    logits: list[Tensor | None]


def greedy_walk(tree: Candidates, choice: Callable[[int], int]) -> Walk:
    """Follow the child that equals the target's choice until there is none (verification.md 5.8)."""
    kept = [0]
    while True:
        token = choice(kept[-1])
        child = next((c for c in tree.trials[kept[-1]] if tree.tokens[c] == token), None)
        if child is None:
            return Walk(kept, token, Why.REFUSED if tree.trials[kept[-1]] else Why.LEAF)
        kept.append(child)


def verify(draft: Draft, rows: Rows, choosers: Sequence[Chooser], verifier: Verifier) -> Verdict:
    """Verify every request of the batch.

    Requests at temperature 0 without processors use the fused argmax of all nodes; the others fetch their
    logits once, and processors run only on the rows that the walk visits.
    """
    fused = [c.sampling.greedy and not c.sampling.moves_argmax for c in choosers]
    full = [b for b, c in enumerate(choosers) if not fused[b] or c.sampling.logprobs]
    parts = [draft.token_BN, draft.parent_BN, draft.valid_BN]
    optional = [draft.trial_BNC, draft.q_row_BN, draft.q_BRV, rows.argmax_BN() if any(fused) else None]
    optional.append(rows.logits_RNV(full) if full else None)
    host = iter(to_host(*parts, *(t for t in optional if t is not None)))
    token, parent, valid = (next(host).tolist() for _ in parts)
    trial_BNC, q_row_BN, q_BRV, best_BN, logits_RNV = (next(host) if t is not None else None for t in optional)
    if q_BRV is not None and logits_RNV is not None:  # a drafter never draws the padding rows it lacks (B17)
        q_BRV = torch.nn.functional.pad(q_BRV, (0, logits_RNV.shape[2] - q_BRV.shape[2]))
    choices = best_BN.tolist() if best_BN is not None else None
    row_of = {b: row for row, b in enumerate(full)}
    trees, walks, logits = [], [], []
    for b, chooser in enumerate(choosers):
        tree = _candidates(
            token[b], parent[b], valid[b], draft.kind,
            None if trial_BNC is None else trial_BNC[b].tolist(),
            None if q_BRV is None or q_row_BN is None else (q_BRV[b], q_row_BN[b].tolist()),
        )  # fmt: skip
        logits_NV = logits_RNV[row_of[b]] if logits_RNV is not None and b in row_of else None
        if fused[b] and choices is not None:
            walk = greedy_walk(tree, choices[b].__getitem__)
        else:
            assert logits_NV is not None
            walk = _walk(tree, logits_NV, chooser, verifier)
        trees.append(tree)
        walks.append(walk)
        logits.append(logits_NV)
    return Verdict(trees, walks, logits)


def _walk(tree: Candidates, logits_NV: Tensor, chooser: Chooser, verifier: Verifier) -> Walk:
    sampling, history = chooser.sampling, chooser.history
    if sampling.greedy:
        return greedy_walk(tree, lambda i: best(scores(logits_NV[i], sampling, history, tree.path(i))))
    return verifier.walk(tree, lambda i: law(logits_NV[i], sampling, history, tree.path(i)), chooser.coin)


def _candidates(
    tokens: list[int],
    parents: list[int],
    valid: list[bool],
    kind: Kind,
    trial_NC: list[list[int]] | None,
    q: tuple[Tensor, list[int]] | None,
) -> Candidates:
    trials: list[list[int]] = [[] for _ in tokens]
    if trial_NC is not None:
        trials = [[c for c in row if c >= 0 and valid[c]] for row in trial_NC]
    else:
        for node in range(1, len(tokens)):
            if valid[node]:
                trials[parents[node]].append(node)
    law_of = None
    if q is not None:
        rows, row_N = q
        law_of = lambda node: rows[row_N[node]]  # noqa: E731
    return Candidates(tokens, parents, trials, kind, law_of)


def logprobs_of(logits_V: Tensor, token: int, top: int) -> tuple[float, list[tuple[int, float]]]:
    """The target's log-probability of a token before any processing, and the `top` best with theirs."""
    logp_V = torch.log_softmax(at_least_fp32(logits_V), 0)
    largest = logp_V.topk(min(top, len(logp_V))) if top else None
    tops = list(zip(largest.indices.tolist(), largest.values.tolist(), strict=True)) if largest else []
    return float(logp_V[token]), tops
