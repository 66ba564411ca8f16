"""Frozen nouns that travel between the parts: what was drafted, what was committed, what a pass returned.

Axis letters, used as suffixes of tensor names in the whole package:

    B  requests                      N  draft nodes (node 0 is the root)
    A  newly committed tokens        C  trials at a node
    D  target width                  R  rows of draft laws (q)
    V  target vocabulary             T  prompt tokens
    S  cache slots                   L  decoder layers
    H  key/value heads               W  frontier nodes of one draft level
    K  children asked of a frontier node
    U  draft vocabulary              F  read-out width
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

Report = Callable[[str, float | None], None]  # told what long work is doing, and the share done (None: unknown)


class Kind(Enum):
    """How the candidates of a draft were chosen (verification.md 5; the verifier needs this and nothing else)."""

    POINT = "point mass"
    IID = "i.i.d. draws"
    WITHOUT_REPLACEMENT = "draws without replacement"


class Shape(Enum):
    """A chain is a tree with one branch; some verifiers are exact for chains only."""

    CHAIN = "chain"
    TREE = "tree"


@dataclass(frozen=True, kw_only=True)
class Taps:
    """Which hidden states a drafter needs from every target pass.

    `final` is the state after the final norm, the one that the LM head reads; `layers` are counts of
    decoder layers already run (0 = embeddings, n = residual stream after layer n).
    """

    final: bool = False
    layers: tuple[int, ...] = ()


class Features(NamedTuple):
    """Tapped hidden states of one pass, `[B, N, D]` each (`[B, A, D]` once committed)."""

    final: Tensor | None
    layers: tuple[Tensor, ...]

    def gather(self, node_BA: Tensor) -> Features:
        """The features of the given nodes, in that order."""

        def pick(x_BND: Tensor) -> Tensor:
            return x_BND.gather(1, node_BA[:, :, None].expand(-1, -1, x_BND.shape[2]))

        return self.map(pick)

    def map(self, change: Callable[[Tensor], Tensor]) -> Features:
        """Each state changed alike."""
        return Features(None if self.final is None else change(self.final), tuple(map(change, self.layers)))

    @staticmethod
    def concat(parts: list[Features]) -> Features:
        """Consecutive passes as one, along the token axis."""
        final = None if parts[0].final is None else torch.cat([p.final for p in parts if p.final is not None], 1)
        return Features(final, tuple(torch.cat(layer, 1) for layer in zip(*(p.layers for p in parts), strict=True)))


class Readout(NamedTuple):
    """From a head's features to draft logits: `project` maps `[R, F] -> [R, U]` and is differentiable in the feature.

    `ids_U` are the target ids of the columns, None where column u is id u. `size` is U. `trained`: it has weights of
    the head's own, which training changes. Soft-cap and scale that belong to the logits are inside.
    """

    project: Callable[[Tensor], Tensor]
    size: int
    ids_U: Tensor | None = None
    trained: bool = False


class Committed(NamedTuple):
    """What entered the target's cache: after the prefill, and after every verification. One entry per request.

    `roots[b]` is the token after the last of `tokens[b]`: emitted, but not in the target's cache yet. It is part
    of the record because a head that pairs each feature with the next token could not cache its last row without.
    `kept[b]` holds the node ids in the drafter's last draft (-1: a prompt token). Features are `[B, A, D]`,
    padded behind `len(tokens[b])`. Ids are host lists because the verdict has been brought to the host already.
    """

    tokens: list[list[int]]
    roots: list[int]
    kept: list[list[int]]
    features: Features


class Budget(NamedTuple):
    """The most that a draft may hold: `depth[b]` tokens ahead of the root of row b (0 = root only), `nodes` in all."""

    depth: list[int]
    nodes: int


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A tree of candidate tokens per request. Node 0 is the root; parents come before children.

    `kind` says how siblings were chosen for the requests that sample. `trial_BNC` lists, per node, the child to
    test first, second, ... (-1 ends the list); i.i.d. draws repeat a child as often as it was drawn, in draw
    order. None means: every child once, in node order. `q_BRV` holds the laws that children were drawn from,
    `q_row_BN` the row for the children OF a node; both None for point mass. Invalid nodes are padding.
    """

    token_BN: Tensor
    parent_BN: Tensor
    valid_BN: Tensor
    kind: Kind = Kind.POINT
    chain: bool = False
    trial_BNC: Tensor | None = None
    q_BRV: Tensor | None = None
    q_row_BN: Tensor | None = None


class Why(Enum):
    """Why the walk ended at a node."""

    LEAF = "no child to try"
    REFUSED = "no child was accepted"


class Walk(NamedTuple):
    """The outcome of verifying one request: kept node ids (root first), the next token, and why it ended."""

    kept: list[int]
    next: int
    why: Why


def to_host(*tensors: Tensor) -> list[Tensor]:
    """The same tensors on the host: the one device synchronisation of a decoding step.

    Nothing else in drafting, verifying or committing may read a device tensor from Python
    (`tests/test_sync.py` checks the sources and counts the calls). Copies are queued first, then waited for once.
    """
    if all(t.device.type == "cpu" for t in tensors):
        return list(tensors)
    copies = [t.to("cpu", non_blocking=True) for t in tensors]
    torch.accelerator.synchronize()
    return copies
