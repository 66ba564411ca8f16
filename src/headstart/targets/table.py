"""A target whose next-token law is a table: exactly known, so that distributions can be tested."""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from headstart.core import Features, Readout, Taps
from headstart.errors import BadInput
from headstart.targets.base import Capabilities, Rows, Vocabulary
from headstart.tree import Tree


class TableCache:
    """Committed tokens and the tokens of the last pass."""

    def __init__(self, n_requests: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(n_requests)]
        self.pending: list[list[int]] = [[] for _ in range(n_requests)]

    @property
    def lengths(self) -> list[int]:
        """Committed tokens per request."""
        return [len(t) for t in self.tokens]


class Letters:
    """The smallest tokenizer: id i is the i-th letter."""

    def __init__(self, size: int) -> None:
        self.text = (string.ascii_letters + string.digits)[:size]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """Letters side by side."""
        return "".join(self.text[i] for i in ids)

    def encode(self, text: str, **_: Any) -> list[int]:
        """Raises BadInput for other characters."""
        if set(text) - set(self.text):
            raise BadInput(f"The table target reads only the letters {self.text!r}, not {text!r}.")
        return [self.text.index(c) for c in text]


class TableTarget:
    """`table[..., i, j, x]` is the probability of x after the tokens i, j (the last ones); rows sum to 1.

    A table of k + 1 axes is a law of order k; contexts shorter than k are padded with token 0 on the left.
    """

    def __init__(self, table: Tensor, max_positions: int = 4096) -> None:
        """Raises BadInput unless the table is a law over at most 62 tokens."""
        table = torch.as_tensor(table, dtype=torch.float64)
        size = table.shape[-1]
        if len(set(table.shape)) != 1 or size > 62 or (table < 0).any() or (table.sum(-1) - 1).abs().max() > 1e-9:
            raise BadInput(f"A table of shape {tuple(table.shape)} is no law: equal axes, entries >= 0, rows sum to 1.")
        self.table = table
        self.order = table.dim() - 1
        self.device = torch.device("cpu")
        self.eos: tuple[int, ...] = ()
        self.tokenizer = Letters(size)
        self.path = None
        self.width = 1
        self.layers = 0
        self.vocabulary = Vocabulary.of(size, list(self.tokenizer.text))
        self.can = Capabilities(
            tree=True, rollback=True, taps=False, gather_head_rows=False, trainable=False,
            max_positions=max_positions, max_nodes=1024, max_batch=2**20, dtype=torch.float64,
        )  # fmt: skip

    def law(self, context: Sequence[int]) -> Tensor:
        """The exact law after a context."""
        return self.table[self._key(context)]

    def empty(self, n_requests: int) -> TableCache:
        """Nothing committed."""
        return TableCache(n_requests)

    def extend(self, cache: TableCache, token_BN: Tensor, tree: Tree, needs: Taps) -> tuple[Rows, Features]:
        """The hidden state of a node is the index of its context in the table."""
        cache.pending = token_BN.tolist()
        known_BS = torch.cat([torch.tensor([self._key(t) for t in cache.tokens]).long(), token_BN], 1)
        hidden_BN = torch.zeros_like(token_BN)
        for back in reversed(range(self.order)):  # the context token that many steps behind each node
            slot_BN = self.order + tree.depth_BN - back
            if tree.sees_BNN is not None:
                above_BNN = tree.sees_BNN & (tree.depth_BN[:, None] == tree.depth_BN[:, :, None] - back)
                slot_BN = torch.where(tree.depth_BN < back, slot_BN, self.order + above_BNN.int().argmax(-1))
            hidden_BN = hidden_BN * self.vocabulary.size + known_BS.gather(1, slot_BN)
        hidden_BN1 = hidden_BN.double()[:, :, None]
        return Rows(hidden_BN1, self._project), Features(None, ())

    def commit(self, cache: TableCache, kept: Sequence[Sequence[int]]) -> TableCache:
        """Append the kept tokens."""
        for tokens, pending, nodes in zip(cache.tokens, cache.pending, kept, strict=True):
            tokens += [pending[i] for i in nodes]
        return cache

    def select(self, cache: TableCache, requests: Sequence[int]) -> TableCache:
        """Keep only these requests."""
        cache.tokens = [list(cache.tokens[r]) for r in requests]  # a request may be asked for twice
        return cache

    def replace(self, cache: TableCache, requests: Sequence[int], other: TableCache) -> TableCache:
        """Put the requests of `other` in the places of these."""
        for request, tokens in zip(requests, other.tokens, strict=True):
            cache.tokens[request] = list(tokens)
        return cache

    def rewind(self, cache: TableCache, lengths: Sequence[int]) -> TableCache:
        """Shorten."""
        cache.tokens = [t[:n] for t, n in zip(cache.tokens, lengths, strict=True)]
        return cache

    def embed(self, token: Tensor) -> Tensor:
        """A table has no embeddings; one-hot rows stand in for them."""
        return torch.nn.functional.one_hot(token, self.vocabulary.size).double()

    def readout(self, ids_U: Tensor | None = None) -> Readout:
        """The rows of the table, or those of its columns, as log-probabilities."""
        size = self.vocabulary.size if ids_U is None else len(ids_U)
        return Readout(
            lambda h_R1: self._project(h_R1) if ids_U is None else self._project(h_R1)[:, ids_U], size, ids_U
        )

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """The table."""
        return [("table", self.table)]

    def _key(self, context: Sequence[int]) -> tuple[int, ...]:
        tail = tuple(context[-self.order :]) if self.order else ()
        return (0,) * (self.order - len(tail)) + tail

    def _project(self, hidden_R1: Tensor) -> Tensor:
        return self.table.view(-1, self.vocabulary.size)[hidden_R1[:, 0].long()].log()
