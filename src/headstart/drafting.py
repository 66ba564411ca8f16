"""One drafting loop for all heads: step where no unread slot is left, read a slot out, let the policy grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.core import Budget, Committed, Draft, Kind, Readout, Shape, Taps
from headstart.errors import BadInput, Unsupported
from headstart.heads.base import Frontier, Head, Known
from headstart.policies.base import Growing, Policy
from headstart.sampling import Coin, Sampling
from headstart.targets.base import Target, Vocabulary
from headstart.tree import from_parents
from headstart.verify.base import Verifier
from headstart.vocab.base import DraftVocab


@dataclass
class _Memory:
    cache: Any
    roots: list[int]


class HeadDrafter:
    """A head as a drafter: `policy` decides the tree, `vocab` the tokens that can be drafted.

    Candidates are the best of each row, taken as given (point mass). `verifier` is the one that `generate` takes if it
    is given none. Raises Unsupported for a policy that draws.
    """

    def __init__(
        self, head: Head, target: Target, policy: Policy, vocab: DraftVocab, *, verifier: Verifier | None = None
    ) -> None:
        if policy.kind is not Kind.POINT:
            raise Unsupported(
                f"The policy asks for {policy.kind.value}, and a head drafts its best tokens as they are. Use a policy "
                "of kind point mass: it is exact for sampled requests as well."
            )
        reach = 0
        while reach < policy.depth and (slots := head.horizon(reach, policy.depth)):
            reach += slots
        if reach < policy.depth:
            raise BadInput(f"The tree is {policy.depth} deep and the head guesses {reach} tokens ahead; use a tree of "
                           f"depth {reach} or less.")  # fmt: skip
        widest = max(policy.children(d) for d in range(policy.depth))
        if widest > vocab.size:
            raise BadInput(f"The tree asks for {widest} siblings; the draft vocabulary holds {vocab.size} tokens.")
        self.head, self.policy, self.vocab, self.verifier = head.eval(), policy, vocab, verifier
        self.device = target.device
        self.vocabulary: Vocabulary = target.vocabulary
        self.readouts = list(map(readouts(head, target, vocab), range(1, policy.depth + 1)))

    @property
    def needs(self) -> Taps:
        """The head's taps."""
        return self.head.needs

    @property
    def kind(self) -> Kind:
        """Point mass."""
        return self.policy.kind

    @property
    def shape(self) -> Shape:
        """As the policy says."""
        return self.policy.shape

    def check(self, target: Target) -> None:
        """Raises BadInput if the target's ids mean other tokens than those of the target it was built with."""
        target.vocabulary.demand_same(self.vocabulary, "The head")
        target.can.demand("taps", "A draft head")

    def start(self, n_requests: int) -> _Memory:
        """Nothing absorbed."""
        return _Memory(self.head.empty(n_requests), [0] * n_requests)

    @torch.inference_mode()
    def absorb(self, state: _Memory, new: Committed) -> _Memory:
        """Each feature with the token after it; the last one's is the root."""
        width = max(map(len, new.tokens))
        after = [[*tokens[1:], root] for tokens, root in zip(new.tokens, new.roots, strict=True)]
        next_BA = torch.tensor([row + [0] * (width - len(row)) for row in after], device=self.device)
        known = Known(next_BA, new.features, [len(t) for t in new.tokens])
        return _Memory(self.head.absorb(state.cache, known), list(new.roots))

    @torch.inference_mode()
    def draft(self, state: _Memory, budget: Budget, sampling: Sequence[Sampling], coins: Sequence[Coin]) -> Draft:
        """Grow the policy's tree under each root."""
        root_B1 = torch.tensor(state.roots, device=self.device)[:, None]
        first_B1 = torch.zeros_like(root_B1)
        tree = Growing(root_B1, first_B1, first_B1)
        anchor_B1 = self.head.last(state.cache)
        rows, row_BW = self.head.begin(state.cache, anchor_B1), first_B1
        slots: list[Tensor] = []
        for depth in range(min(self.policy.depth, max(budget.depth))):
            if not slots:
                token_BW = tree.token_BN.gather(1, tree.frontier_BW)
                rows = type(rows)(*(_gather(x, row_BW) for x in rows))
                frontier = Frontier(token_BW, anchor_B1.expand_as(token_BW), depth)
                feature_BWHF, rows = self.head.step(state.cache, rows, frontier)
                usable = min(self.head.horizon(depth, self.policy.depth), self.policy.depth - depth)
                slots = self._read(feature_BWHF[:, :, :usable], depth)
                row_BW = torch.arange(token_BW.shape[1], device=self.device).expand_as(token_BW)
            token_BWK = _gather(slots.pop(0)[..., : self.policy.children(depth)], row_BW)
            above_BW = tree.frontier_BW
            tree = self.policy.grow(tree, token_BWK, depth)
            parent_BW = tree.parent_BN.gather(1, tree.frontier_BW)
            hangs_BW = (parent_BW[:, :, None] == above_BW[:, None]).int().argmax(-1)
            row_BW = row_BW.gather(1, hangs_BW)
        n_nodes = min(tree.token_BN.shape[1], budget.nodes)
        depth_BN = from_parents(tree.parent_BN).depth_BN
        limit_B1 = torch.tensor(budget.depth, device=self.device)[:, None]
        return Draft(
            token_BN=tree.token_BN[:, :n_nodes],
            parent_BN=tree.parent_BN[:, :n_nodes],
            valid_BN=(depth_BN <= limit_B1)[:, :n_nodes],
            chain=self.shape is Shape.CHAIN,
        )

    def select(self, state: _Memory, requests: Sequence[int]) -> _Memory:
        """Keep only these requests."""
        return _Memory(self.head.select(state.cache, requests), [state.roots[r] for r in requests])

    def rewind(self, state: _Memory, lengths: Sequence[int]) -> _Memory:
        """Forget rows."""
        return _Memory(self.head.rewind(state.cache, lengths), state.roots)

    def _read(self, feature_BWHF: Tensor, depth: int) -> list[Tensor]:
        """Candidates `[B, W, K]` per slot, best first. Slots with one read-out share a product."""
        n_requests, n_rows, n_slots, width = feature_BWHF.shape
        asked = [self.policy.children(depth + slot) for slot in range(n_slots)]
        readouts = self.readouts[depth : depth + n_slots]
        if all(r is readouts[0] for r in readouts):
            token_RK, _ = self.vocab.topk(readouts[0], feature_BWHF.reshape(-1, width), max(asked))
            return list(token_RK.view(n_requests, n_rows, n_slots, -1).unbind(2))
        slots = []
        for slot, (readout, k) in enumerate(zip(readouts, asked, strict=True)):
            token_RK, _ = self.vocab.topk(readout, feature_BWHF[:, :, slot].reshape(-1, width), k)
            slots.append(token_RK.view(n_requests, n_rows, k))
        return slots


def readouts(head: Head, target: Target, vocab: DraftVocab) -> Callable[[int], Readout]:
    """The read-out of each depth: the head's own, or one borrowed from the target for all."""
    borrowed = target.readout(vocab.ids_U) if head.readout(1) is None else None

    def of(depth: int) -> Readout:
        found = head.readout(depth) if borrowed is None else borrowed
        if found is None:
            raise ValueError(f"{type(head).__name__} reads out depth 1 itself and not depth {depth}")
        return found

    return of


def _gather(x_BW: Tensor, row_BW: Tensor) -> Tensor:
    """Rows of `[B, W, ...]`."""
    index = row_BW.view(*row_BW.shape, *[1] * (x_BW.dim() - 2)).expand(-1, -1, *x_BW.shape[2:])
    return x_BW.gather(1, index)
