"""What a head is worth on held-out answers while it is trained: ranks, the tree they call for, tokens per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from headstart.core import Features, Readout
from headstart.drafting import HeadDrafter, readouts
from headstart.heads.base import Head
from headstart.policies.static import StaticTree
from headstart.replay import Replayed, Spoken, replay
from headstart.targets.base import Target
from headstart.train.capture import Texts
from headstart.train.loop import Measured
from headstart.tune.tree import NEVER, by_paths, grow
from headstart.unroll import Batch, Independent, Unroll, unroll
from headstart.vocab.base import DraftVocab

CHILDREN = 16  # guesses per head that a tree may use


class HeldOut:
    """Measures a head on held-out answers while it is trained."""

    def __init__(
        self,
        target: Target,
        head: Head,
        vocab: DraftVocab,
        held: Texts,
        *,
        depths: int,
        nodes: int,
        unrolling: Unroll | None = None,
    ) -> None:
        self.target, self.head, self.vocab = target, head, vocab
        self.depths, self.nodes, self.unrolling = depths, nodes, unrolling or Independent()
        self.readout: Callable[[int], Readout] = readouts(head, target, vocab)
        self.texts = [held[i] for i in range(len(held))]
        self.spoken = [_spoken(text.token_T.tolist(), text.supervised_T.tolist(), text.features) for text in self.texts]

    def measure(self, head: Head) -> Measured:
        """Tokens per step of the best tree on the held-out answers, and top-1 accuracy by depth."""
        ranks = self.ranks()
        result = self.replay(grow(by_paths(ranks), self.nodes, self.depths, CHILDREN))
        hits = [[row[d] == 0 for row in ranks if d < len(row)] for d in range(self.depths)]
        return Measured(result.tokens_per_step, [sum(h) / max(len(h), 1) for h in hits])

    def tree(self) -> list[tuple[int, ...]]:
        """The best tree, in growth order."""
        return grow(by_paths(self.ranks()), self.nodes, self.depths, CHILDREN)

    def replay(self, paths: Sequence[Sequence[int]]) -> Replayed:
        """What that tree would have been accepted for."""
        return replay(self.drafter(paths), self.spoken)

    def drafter(self, paths: Sequence[Sequence[int]]) -> HeadDrafter:
        """The head with a static tree."""
        return HeadDrafter(self.head, self.target, StaticTree(paths=paths), self.vocab)

    @torch.no_grad()
    def ranks(self) -> list[list[int]]:
        """For every held-out anchor that drafting would use, the true tokens' ranks at depth 1, 2, ..."""
        out: list[list[int]] = []
        for text in self.texts:
            batch = Batch(
                text.token_T[None],
                text.supervised_T[None],
                text.features.map(lambda x_TD: x_TD[None]),
                [len(text.token_T)],
            )
            rows: dict[int, list[int]] = {}
            for said in unroll(self.head, self.unrolling, batch, self.depths):
                token_RK, _ = self.vocab.topk(self.readout(said.depth), said.feature_SF, min(CHILDREN, self.vocab.size))
                hit_RK = token_RK == said.label_S[:, None]
                rank_R = torch.where(hit_RK.any(1), hit_RK.int().argmax(1), NEVER)
                for position, rank in zip(said.position_S.tolist(), rank_R.tolist(), strict=True):
                    rows.setdefault(position - 1 - said.depth, []).append(rank)
            first = text.supervised_T.tolist().index(True) - 1  # the first anchor of drafting: the prompt's last token
            out += [rank for anchor, rank in rows.items() if anchor >= first]
        return out


def _spoken(ids: list[int], supervised: list[bool], features: Features) -> Spoken:
    """A captured answer for replay: one supervised stretch at the end of the text."""
    return Spoken(ids, supervised.index(True), features)
