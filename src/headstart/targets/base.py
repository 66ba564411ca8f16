"""What a target is to the rest of the package: one pass over a tree of tokens, a cache, lazy logits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from headstart.core import Features, Readout, Taps
from headstart.errors import BadInput, Unsupported
from headstart.tree import Tree, chain

ARGMAX_ROWS = 256  # rows projected at once: bounds the [rows, V] scratch of a batched argmax


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a target can do. Asked for before work starts; `reasons` says why something is missing.

    max_positions: longest sequence, prompt and answer together. max_nodes: draft nodes per pass. same_bits: a chain
    at batch 1 gave the same bits as its tokens one by one (tried when the model was loaded), so greedy text is that of
    plain decoding in this dtype, not only in fp32.
    """

    tree: bool
    rollback: bool
    taps: bool
    gather_head_rows: bool
    trainable: bool
    max_positions: int
    max_nodes: int
    max_batch: int
    dtype: torch.dtype
    same_bits: bool = False
    reasons: dict[str, str] = field(default_factory=dict)

    def demand(self, name: str, purpose: str) -> None:
        """Raises Unsupported if the capability is missing, with its reason."""
        if not getattr(self, name):
            reason = self.reasons.get(name, "the target does not offer it")
            raise Unsupported(f"{purpose} needs a target with `{name}`, which this one lacks: {reason}.")


@dataclass(frozen=True)
class Vocabulary:
    """Identity of a token-id space: its size and a digest of id -> token, so equal sizes cannot be confused."""

    size: int
    digest: str

    @staticmethod
    def of(size: int, tokens: Sequence[str]) -> Vocabulary:
        """`tokens[i]` is the text form of id i; ids at and beyond `len(tokens)` are padding rows."""
        return Vocabulary(size, hashlib.sha256("\0".join(tokens).encode()).hexdigest()[:16])

    def demand_same(self, other: Vocabulary, who: str) -> None:
        """Raises BadInput if the ids of a drafter do not mean what the target's mean (bugs.md S05, B17).

        Padding rows may differ in number; the tokens themselves may not.
        """
        if self.digest != other.digest:
            raise BadInput(
                f"{who} was built for another vocabulary ({other.size} ids, {other.digest}) than the target "
                f"({self.size} ids, {self.digest}); its token ids would mean other text. "
                "Use a drafter trained for this target."
            )


def first_max(logits_RV: Tensor) -> Tensor:
    """`argmax(-1)`, first maximum included. On a CPU `max` is vectorised in bf16 and `argmax` is not: five times faster
    for 32 rows of 49,152 (docs/log.md)."""
    return logits_RV.max(-1).indices


class Rows:
    """Next-token logits after each node of a pass, projected only when asked for.

    `hidden_BND` is what the read-out consumes; `project` maps `[rows, D] -> [rows, V]` in the model's dtype.
    """

    def __init__(self, hidden_BND: Tensor, project: Callable[[Tensor], Tensor]) -> None:
        self.hidden_BND = hidden_BND
        self.project = project

    def at(self, node_B: Tensor) -> Rows:
        """One node per request: `[B, 1]` rows."""
        pick_B1D = node_B[:, None, None].expand(-1, 1, self.hidden_BND.shape[2])
        return Rows(self.hidden_BND.gather(1, pick_B1D), self.project)

    def argmax_BN(self) -> Tensor:
        """First maximum of every row, in the model's dtype: no softmax and no fp32 copy of `[N, V]`."""
        flat_RD = self.hidden_BND.flatten(0, 1)
        best = [first_max(self.project(part)) for part in torch.split(flat_RD, ARGMAX_ROWS)]
        return torch.cat(best).view(self.hidden_BND.shape[:2])

    def logits_RNV(self, requests: Sequence[int]) -> Tensor:
        """Logits of all nodes of the chosen requests, in the model's dtype."""
        hidden = self.hidden_BND if len(requests) == len(self.hidden_BND) else self.hidden_BND[list(requests)]
        return self.project(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)


class Target(Protocol):
    """The model whose output must not change.

    `width` is D, that of hidden states; `layers` counts decoder layers. Each target has its own kind of cache, of which
    others know only `lengths`.
    Caches are moved, not copied: use only the one returned.
    """

    can: Capabilities
    vocabulary: Vocabulary
    width: int
    layers: int
    device: torch.device
    eos: tuple[int, ...]
    tokenizer: Any

    def empty(self, n_requests: int) -> Any:
        """A cache with nothing committed; its `lengths` are committed tokens per request, as a host list."""
        ...

    def extend(self, cache: Any, token_BN: Tensor, tree: Tree, needs: Taps) -> tuple[Rows, Features]:
        """One pass over N nodes per request, appended behind the committed tokens but not committed.

        Node i of request b sits at position `lengths[b] + depth` and sees the committed tokens and its ancestors.
        An earlier, uncommitted append is overwritten, so an abandoned pass leaves no trace.
        """
        ...

    def commit(self, cache: Any, kept: Sequence[Sequence[int]]) -> Any:
        """Keep nodes `kept[b]` of the last pass, in that order; all other appended nodes vanish."""
        ...

    def select(self, cache: Any, requests: Sequence[int]) -> Any:
        """Keep only these requests (finished ones leave the batch), or copies of one that is named several times."""
        ...

    def replace(self, cache: Any, requests: Sequence[int], other: Any) -> Any:
        """Put the requests of `other` in the places of these: a batch takes new ones in as old ones finish."""
        ...

    def rewind(self, cache: Any, lengths: Sequence[int]) -> Any:
        """Forget all but the first `lengths[b]` committed tokens."""
        ...

    def embed(self, token: Tensor) -> Tensor:
        """Input embeddings with the model's own scaling, `[..., D]`."""
        ...

    def readout(self, ids_U: Tensor | None = None) -> Readout:
        """The LM head, soft-cap included, of all tokens or of these ids; differentiable in its input.

        Raises Unsupported if rows are asked for and the head is packed or wrapped.
        """
        ...

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """All that decides its output, by name, for content hashes."""
        ...


PREFILL_CHUNK = 512  # prompt tokens per pass: bounds activation memory of long prompts


def prefill(
    target: Target, cache: Any, prompts: Sequence[Sequence[int]], needs: Taps, chunk: int = PREFILL_CHUNK
) -> tuple[Any, Rows, Features]:
    """Run and commit the prompts behind whatever is committed already, in chunks; requests are left-aligned.

    Returns the cache, the row after each request's last prompt token (`[B, 1]`) and the features of all
    prompt tokens (`[B, T, D]`, padded behind each prompt). Every prompt must be non-empty.
    """
    lengths = [len(p) for p in prompts]
    longest = max(lengths)
    token_BT = torch.zeros((len(prompts), longest), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        token_BT[row, : len(prompt)] = torch.tensor(prompt)
    token_BT = token_BT.to(target.device)
    last_D: list[Tensor] = [token_BT] * len(prompts)  # replaced below, each prompt ends in some chunk
    tapped: list[Features] = []
    for start in range(0, longest, chunk):
        part_BA = token_BT[:, start : start + chunk]
        counts = [min(max(n - start, 0), part_BA.shape[1]) for n in lengths]
        rows, features = target.extend(cache, part_BA, chain(len(part_BA), part_BA.shape[1], target.device), needs)
        for request, count in enumerate(counts):
            if count and start + count == lengths[request]:
                last_D[request] = rows.hidden_BND[request, count - 1]
        cache = target.commit(cache, [range(count) for count in counts])
        tapped.append(features)
    return cache, Rows(torch.stack(last_D)[:, None], rows.project), Features.concat(tapped)
