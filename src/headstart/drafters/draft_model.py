"""An independent small causal LM as drafter (Leviathan et al. 2023, section 2; Chen et al. 2023).

It is driven through the same `Target` calls as the target, so any model that can be a target can draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.core import Budget, Committed, Draft, Kind, Shape, Taps
from headstart.errors import BadInput
from headstart.policies.base import Growing, Policy
from headstart.policies.chain import Chain
from headstart.sampling import Coin, Sampling, at_least_fp32, draws, tempered
from headstart.targets.base import Rows, Target, prefill
from headstart.tree import from_parents


@dataclass
class _Memory:
    cache: Any
    roots: list[int]


class DraftModel:
    """Drafts with `model` along `policy`. For requests that sample, candidates are drawn from the model's own law
    under the request's temperature, top-k, top-p and min-p, and that law travels with the draft as `q`.

    Every level runs the whole tree so far again behind the committed tokens: nothing has to be rolled back.
    """

    needs = Taps()
    verifier = None

    def __init__(self, model: Target, policy: Policy | None = None) -> None:
        self.model = model
        self.policy: Policy = policy or Chain(depth=4, kind=Kind.IID)

    @property
    def kind(self) -> Kind:
        """As the policy says."""
        return self.policy.kind

    @property
    def shape(self) -> Shape:
        """As the policy says."""
        return self.policy.shape

    def check(self, target: Target) -> None:
        """Raises BadInput for another vocabulary, Unsupported for a model that cannot take the policy's trees."""
        target.vocabulary.demand_same(self.model.vocabulary, "The draft model")
        self.model.can.demand("rollback", "A draft model")
        if self.shape is Shape.TREE:
            self.model.can.demand("tree", "Drafting a tree")
        if self.model.vocabulary.size > target.vocabulary.size:
            raise BadInput("The draft model has more LM-head rows than the target; it could draft ids without a row.")
        widest = max(self.policy.children(d) for d in range(self.policy.depth))
        if self.kind is not Kind.IID and widest > self.model.vocabulary.size:
            raise BadInput(f"The tree asks for {widest} siblings; the vocabulary holds {target.vocabulary.size}.")

    def start(self, n_requests: int) -> _Memory:
        """An empty cache."""
        return _Memory(self.model.empty(n_requests), [0] * n_requests)

    def absorb(self, state: _Memory, new: Committed) -> _Memory:
        """Run the newly committed tokens; the draft's scratch nodes were never committed."""
        known = [[min(token, self._last) for token in tokens] for tokens in new.tokens]
        cache, _, _ = prefill(self.model, state.cache, known, Taps())
        return _Memory(cache, list(new.roots))

    def draft(self, state: _Memory, budget: Budget, sampling: Sequence[Sampling], coins: Sequence[Coin]) -> Draft:
        """Grow the policy's tree level by level."""
        root_B1 = torch.tensor(state.roots, device=self.model.device)[:, None]
        tree = Growing(root_B1, torch.zeros_like(root_B1), torch.zeros_like(root_B1))
        q_parts: list[Tensor] = []
        q_node: list[int] = []
        limits = [max(0, min(d, self._room(n))) for d, n in zip(budget.depth, state.cache.lengths, strict=True)]
        for depth in range(min(self.policy.depth, max(limits))):
            known_BN = tree.token_BN.clamp(max=self._last)
            rows, _ = self.model.extend(state.cache, known_BN, from_parents(tree.parent_BN), Taps())
            # a request that may go no deeper draws nothing: its coin must not depend on the others' budgets (B09)
            drawing = [limit > depth and not how.greedy for limit, how in zip(limits, sampling, strict=True)]
            k = self.policy.children(depth)
            token_BWK, q_BWV = self._candidates(rows, tree.frontier_BW, k, drawing, sampling, coins)
            q_parts.append(q_BWV)
            q_node += tree.frontier_BW[0].tolist()  # topology is the same for all requests
            tree = self.policy.grow(tree, token_BWK, depth)
        n_nodes = min(tree.token_BN.shape[1], budget.nodes)
        depth_BN = from_parents(tree.parent_BN).depth_BN
        limit_B1 = torch.tensor(limits, device=depth_BN.device)[:, None]
        drawn = self.kind is not Kind.POINT and bool(q_parts)
        return Draft(
            token_BN=tree.token_BN[:, :n_nodes],
            parent_BN=tree.parent_BN[:, :n_nodes],
            valid_BN=(depth_BN <= limit_B1)[:, :n_nodes],
            kind=self.kind if drawn else Kind.POINT,
            chain=self.shape is Shape.CHAIN,
            q_BRV=torch.cat(q_parts, 1) if drawn else None,
            q_row_BN=self._rows_of(q_node, n_nodes, len(state.roots)) if drawn else None,
        )

    def select(self, state: _Memory, requests: Sequence[int]) -> _Memory:
        """Keep only these requests."""
        return _Memory(self.model.select(state.cache, requests), [state.roots[r] for r in requests])

    def rewind(self, state: _Memory, lengths: Sequence[int]) -> _Memory:
        """Shorten the cache."""
        return _Memory(self.model.rewind(state.cache, lengths), state.roots)

    @property
    def _last(self) -> int:
        """Read in place of a target's padding rows beyond the model's own, which it has no embedding for (B17)."""
        return self.model.vocabulary.size - 1

    def _room(self, length: int) -> int:
        return self.model.can.max_positions - length - 1

    def _rows_of(self, q_node: list[int], n_nodes: int, n_requests: int) -> Tensor:
        row_N = [q_node.index(node) if node in q_node else -1 for node in range(n_nodes)]
        return torch.tensor(row_N).expand(n_requests, -1)

    def _candidates(
        self,
        rows: Rows,
        frontier_BW: Tensor,
        k: int,
        drawing: Sequence[bool],
        sampling: Sequence[Sampling],
        coins: Sequence[Coin],
    ) -> tuple[Tensor, Tensor]:
        """K candidates per frontier node, and the laws they were drawn from (point-mass policies: the top K)."""
        width = frontier_BW.shape[1]
        logits_BWV = at_least_fp32(
            torch.cat([rows.at(frontier_BW[:, w]).logits_RNV(range(len(sampling))) for w in range(width)], 1)
        )
        token_BWK = logits_BWV.topk(min(k, logits_BWV.shape[2]), dim=2).indices
        if k > token_BWK.shape[2]:  # only i.i.d. draws may outnumber the vocabulary: they repeat
            token_BWK = torch.cat([token_BWK, token_BWK[:, :, :1].expand(-1, -1, k - token_BWK.shape[2])], 2)
        if self.kind is Kind.POINT:
            return token_BWK, logits_BWV
        q_BWV = torch.zeros_like(logits_BWV)
        for b, (how, coin) in enumerate(zip(sampling, coins, strict=True)):
            for w in range(width if drawing[b] else 0):
                q_BWV[b, w] = tempered(logits_BWV[b, w], how)
                drawn = draws(q_BWV[b, w].cpu(), k, self.kind is Kind.WITHOUT_REPLACEMENT, coin)
                token_BWK[b, w] = torch.tensor(drawn, device=token_BWK.device)
        return token_BWK, q_BWV
