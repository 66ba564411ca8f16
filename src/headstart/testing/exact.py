"""Exact laws of randomised code: the real code is run once per branch of its decisions, each with its probability.

Nothing is re-implemented: `BranchingCoin` stands in for the coin of a request, so `draws` proposes, a verifier
walks, and the probabilities of all outcomes are added up in fp64 (verification.md 5.12, item 1).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from headstart.core import Kind
from headstart.decode import Request, decode
from headstart.drafters.base import Drafter
from headstart.sampling import Coin, History, Sampling, draws
from headstart.stopping import Stop
from headstart.targets.base import Target
from headstart.targets.table import TableTarget
from headstart.tree import from_paths
from headstart.verify.base import Candidates, Verifier

Outcome = TypeVar("Outcome", bound=Hashable)
Law = dict[tuple[int, ...], float]  # probability of each token sequence


class BranchingCoin(Coin):
    """Repeats the decisions of `prefix`, then takes the first possible branch of each further one.

    `probability` is that of all decisions so far; `others` are the prefixes of the branches not taken.
    """

    def __init__(self, prefix: Sequence[int] = ()) -> None:
        self._prefix = tuple(prefix)
        self._taken: list[int] = []
        self.probability = 1.0
        self.others: list[tuple[int, ...]] = []

    def accept(self, numerator: float, denominator: float) -> bool:
        """True with probability min(1, numerator / denominator); a denominator of 0 accepts any numerator above 0."""
        yes = float(numerator > 0) if denominator <= 0 else min(1.0, max(0.0, numerator / denominator))
        return bool(self._branch([1 - yes, yes]))

    def draw(self, law_V: Tensor) -> int:
        """Every token of positive probability is a branch. Raises ValueError for a law without mass."""
        weights = law_V.tolist()
        total = sum(weights)
        if not total > 0:
            raise ValueError(f"Drew from a law without mass: {weights}.")
        return self._branch([weight / total for weight in weights])

    def _branch(self, weights: Sequence[float]) -> int:
        depth = len(self._taken)
        if depth < len(self._prefix):
            choice = self._prefix[depth]
        else:
            choice, *others = (branch for branch, weight in enumerate(weights) if weight > 0)
            self.others += [(*self._taken, other) for other in others]
        self._taken.append(choice)
        self.probability *= weights[choice]
        return choice


def enumerate_law(fn: Callable[[Coin], Outcome]) -> dict[Outcome, float]:
    """The exact law of `fn(coin)`; `fn` must use no other randomness and end on every branch."""
    law: dict[Outcome, float] = defaultdict(float)
    todo: list[tuple[int, ...]] = [()]
    while todo:
        coin = BranchingCoin(todo.pop())
        law[fn(coin)] += coin.probability
        todo += coin.others
    return dict(law)


class Drawn(NamedTuple):
    """A draft as plain tuples: token and parent of each node, and the children of each node in trial order."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    trials: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Candidates from the draft law `q` along `paths` of ranks (as `StaticTree`), chosen as `kind` says.

    `merged`: equal i.i.d. siblings share one node, which is tried as often as it was drawn, in draw order; what
    hangs below any of them hangs below it. Otherwise each draw has a node of its own.
    """

    q: TableTarget
    paths: Sequence[Sequence[int]]
    kind: Kind
    merged: bool = False

    def draw(self, context: Sequence[int], coin: Coin) -> Drawn:
        """One draft after `context`, whose last token is the root."""
        nodes = from_paths(self.paths)
        tokens, parents = [context[-1]], [0]
        trials: list[list[int]] = [[]]
        place = [0]  # node of each path, root first
        drawn: dict[int, list[int]] = {}
        for path, (above, rank) in enumerate(nodes, start=1):
            if above not in drawn:
                count = 1 + max(r for parent, r in nodes if parent == above)
                drawn[above] = self._choose([*context[:-1], *self._down(place[above], tokens, parents)], count, coin)
            parent, token = place[above], drawn[above][rank]
            twin = next((c for c in trials[parent] if tokens[c] == token), None) if self.merged else None
            if twin is None:
                tokens.append(token)
                parents.append(parent)
                trials.append([])
            place.append(len(tokens) - 1 if twin is None else twin)
            trials[parent].append(place[path])
        return Drawn(tuple(tokens), tuple(parents), tuple(map(tuple, trials)))

    def candidates(self, context: Sequence[int], drawn: Drawn) -> Candidates:
        """What the verifier is given: the same record that the decoding loop builds."""
        q = None
        if self.kind is not Kind.POINT:
            q = lambda node: self.q.law([*context[:-1], *self._down(node, drawn.tokens, drawn.parents)])  # noqa: E731
        return Candidates(list(drawn.tokens), list(drawn.parents), list(map(list, drawn.trials)), self.kind, q)

    def _choose(self, context: Sequence[int], count: int, coin: Coin) -> list[int]:
        q_V = self.q.law(context)
        if self.kind is Kind.POINT:
            return q_V.topk(count).indices.tolist()
        return draws(q_V, count, self.kind is Kind.WITHOUT_REPLACEMENT, coin)

    @staticmethod
    def _down(node: int, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Tokens from the root down to the node."""
        out = [tokens[node]]
        while node:
            node = parents[node]
            out.append(tokens[node])
        return out[::-1]


def chain_paths(depth: int) -> list[tuple[int, ...]]:
    """The paths of a chain: one child per node."""
    return [(0,) * d for d in range(1, depth + 1)]


def block_law(p: TableTarget, proposal: Proposal, verifier: Verifier, context: Sequence[int]) -> Law:
    """The law of the block that one round emits after `context`: accepted tokens and the one after them."""
    law: Law = defaultdict(float)
    for drawn, weight in enumerate_law(lambda coin: proposal.draw(context, coin)).items():
        tree = proposal.candidates(context, drawn)
        for block, chance in enumerate_law(partial(_walked, p, tree, verifier, context)).items():
            law[block] += weight * chance
    return dict(law)


def emitted_law(
    p: TableTarget, proposal: Proposal, verifier: Verifier, length: int, context: Sequence[int] = (0,)
) -> Law:
    """The joint law of the first `length` tokens after `context`: one round, then plain sampling if it was short."""
    law: Law = defaultdict(float)
    for block, weight in block_law(p, proposal, verifier, context).items():
        for rest, chance in target_law(p, length - len(block), [*context, *block]).items():
            law[(block + rest)[:length]] += weight * chance
    return dict(law)


def loop_law(
    target: Target, drafter: Drafter, verifier: Verifier, sampling: Sampling, prompt: Sequence[int], length: int
) -> Law:
    """The joint law of the first `length` tokens that the decoding loop itself emits: processors, caches and all.

    Expects bad words and EOS of `sampling` as token ids.
    """

    def run(coin: Coin) -> tuple[int, ...]:
        stop = Stop(sampling.eos_ids, sampling.stop, length, target.tokenizer)
        request = Request(sampling, History(prompt), coin, stop)
        for _ in decode(target, [request], drafter, verifier):
            pass
        return tuple(request.history.output)

    return enumerate_law(run)


def target_law(p: TableTarget, length: int, context: Sequence[int] = (0,)) -> Law:
    """The joint law of the next `length` tokens under the target alone."""
    law: Law = {(): 1.0}
    for _ in range(length):
        law = {
            (*seen, token): weight * chance
            for seen, weight in law.items()
            for token, chance in enumerate(p.law([*context, *seen]).tolist())
            if chance > 0
        }
    return law


def total_variation(a: Mapping[Outcome, float], b: Mapping[Outcome, float]) -> float:
    """Half the summed absolute difference of two laws."""
    return sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys()) / 2


def random_table(size: int, order: int, seed: int, zeros: float = 0.0, concentration: float = 0.7) -> TableTarget:
    """A Dirichlet draw as the law after each context; `zeros` is the chance of an entry, the largest apart, to be 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        alpha = torch.full((size,) * (order + 1), concentration, dtype=torch.float64)
        table = torch.distributions.Dirichlet(alpha).sample()
        dropped = torch.rand_like(table) < zeros
    table = table.masked_fill(dropped & (table < table.amax(-1, keepdim=True)), 0)
    return TableTarget(table / table.sum(-1, keepdim=True))


def _walked(
    p: TableTarget, tree: Candidates, verifier: Verifier, context: Sequence[int], coin: Coin
) -> tuple[int, ...]:
    walk = verifier.walk(tree, lambda node: p.law([*context, *tree.path(node)]), coin)
    return (*(tree.tokens[node] for node in walk.kept[1:]), walk.next)
