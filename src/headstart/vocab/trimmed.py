"""A fixed part of the target vocabulary (FR-Spec, VocabTrim, EAGLE-3), and the layouts that it is stored in."""

from __future__ import annotations

import hashlib
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from headstart.core import Readout
from headstart.errors import BadInput
from headstart.vocab.base import best, demand_width, renormalised


class _Maps(NamedTuple):
    """Both directions on one device; `index_V` is -1 for ids that cannot be drafted."""

    ids_U: Tensor
    index_V: Tensor


@dataclass(frozen=True)
class Trimmed:
    """`ids[u]` is the target id of draft index u; `target_size` counts the rows of the target's LM head.

    The order is kept as given (by frequency, say); `sorted()` has ascending ids. Raises BadInput for no, repeated or
    impossible ids.
    """

    ids: Sequence[int]
    target_size: int

    def __post_init__(self) -> None:
        """Check the ids and keep them as a tuple of plain integers."""
        try:
            ids = tuple(map(operator.index, self.ids))
        except TypeError as error:
            raise BadInput(f"Ids of a draft vocabulary must be integers: {error}. Pass absolute target ids.") from error
        if not ids:
            raise BadInput("Trimmed(ids=[]): expected at least one target id.")
        outside = [i for i in ids if not 0 <= i < self.target_size]
        if outside:
            raise BadInput(
                f"Id {outside[0]} of a draft vocabulary is outside 0..{self.target_size - 1}, the target's ids. "
                "It was built for another target, or its ids are offsets (then use Trimmed.from_d2t)."
            )
        token, times = Counter(ids).most_common(1)[0]
        if times > 1:
            raise BadInput(f"Id {token} stands {times} times in a draft vocabulary; expected every id once.")
        object.__setattr__(self, "ids", ids)

    @staticmethod
    def from_token_map(token_map: Tensor | Sequence[int], target_size: int) -> Trimmed:
        """From absolute target ids `[U]` by draft index: vLLM's Medusa `token_map`, or SGLang's list for EAGLE."""
        if isinstance(token_map, Tensor):
            token_map = _integers(token_map, "token_map")
        return Trimmed(token_map, target_size)

    @staticmethod
    def from_d2t(d2t: Tensor, t2d: Tensor) -> Trimmed:
        """From EAGLE-3's pair: offsets `[U]`, target id minus draft index, and the mask `[V]` of ids to be drafted.

        Raises BadInput if the two do not describe the same ascending ids.
        """
        if t2d.dim() != 1 or t2d.dtype != torch.bool:
            raise BadInput(f"t2d is {list(t2d.shape)} {t2d.dtype}; expected one bool per target id, `[V]`.")
        offsets = _integers(d2t, "d2t")
        ids = [index + offset for index, offset in enumerate(offsets)]
        expected: list[int] = t2d.nonzero()[:, 0].tolist()
        if ids != expected:
            hint = " It holds absolute ids: use Trimmed.from_token_map." if offsets == expected else ""
            raise BadInput(
                f"d2t ({len(ids)} ids) and t2d ({len(expected)} ids set) disagree: draft index + d2t must list the ids "
                f"of t2d in ascending order.{hint or ' Take both from the same checkpoint.'}"
            )
        return Trimmed(ids, len(t2d))

    def __repr__(self) -> str:
        return f"Trimmed({self.size} of {self.target_size} ids, digest {self.digest})"

    def sorted(self) -> Trimmed:
        """The same ids in ascending order; rows of a head trained with another order have to move along."""
        return Trimmed(sorted(self.ids), self.target_size)

    @property
    def size(self) -> int:
        """U, the number of ids."""
        return len(self.ids)

    @property
    def ids_U(self) -> Tensor:
        """Target ids by draft index, int64, on the CPU. Shared: not to be written to."""
        return self._on(torch.device("cpu")).ids_U

    @property
    def token_map(self) -> Tensor:
        """Absolute target ids `[U]`, int64: the tensor that vLLM's Medusa reads."""
        return self.ids_U.clone()

    @property
    def d2t(self) -> Tensor:
        """EAGLE-3's offsets `[U]`, int64: target id = draft index + `d2t[draft index]`.

        Raises BadInput unless the ids ascend: engines take the k-th id set in `t2d` for draft index k.
        """
        falls = [pair for pair in pairwise(self.ids) if pair[0] > pair[1]]
        if falls:
            raise BadInput(
                f"d2t needs ascending ids, but id {falls[0][0]} stands before {falls[0][1]}. "
                "Use `.sorted()` before the head is trained, or move the head's rows along."
            )
        return self.ids_U - torch.arange(self.size)

    @property
    def t2d(self) -> Tensor:
        """EAGLE-3's mask `[V]`, bool: the target ids that can be drafted."""
        return self._on(torch.device("cpu")).index_V >= 0

    @cached_property
    def digest(self) -> str:
        """16 hex digits of target size and ids in order, for names of whatever was made with this vocabulary."""
        text = f"{self.target_size}:{','.join(map(str, self.ids))}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def labels(self, token_S: Tensor) -> tuple[Tensor, Tensor]:
        """Draft index per target id, 0 where there is none, and which have one (see `DraftVocab`)."""
        index_V = self._on(token_S.device).index_V
        index_S = index_V[token_S.long().clamp(0, self.target_size - 1)]
        known_S = (index_S >= 0) & (token_S >= 0) & (token_S < self.target_size)
        return index_S * known_S, known_S

    def to_target(self, index: Tensor) -> Tensor:
        """Target ids of draft indices; an index outside `0..U-1` is an IndexError, -1 included."""
        return self._on(index.device).ids_U.index_select(0, index.flatten()).view(index.shape)

    def topk(self, readout: Readout, feature_RF: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Target ids and fp32 log-probabilities `[R, K]` of the k likeliest tokens (see `DraftVocab`).

        A read-out with these ids is used as it is. One over all target ids is cut to them after its product, which
        gives the same law but saves no time: to save it, let the head hold the chosen rows only.
        """
        if readout.ids_U is not None:
            self._demand_same(readout.ids_U)
            index_RK, logp_RK = best(readout.project, feature_RF, k, self.size)
        elif readout.size == self.target_size:
            ids_U = self._on(feature_RF.device).ids_U
            index_RK, logp_RK = best(lambda x: readout.project(x).index_select(1, ids_U), feature_RF, k, self.size)
        else:
            raise BadInput(
                f"A read-out of {readout.size} columns without ids was given to a draft vocabulary of {self.size} out "
                f"of {self.target_size} ids; expected all {self.target_size} columns, or a read-out that names its ids."
            )
        return self.to_target(index_RK), logp_RK

    def restrict(self, law_SV: Tensor) -> tuple[Tensor, Tensor]:
        """The law given one of these ids, `[S, U]`, and a mask `[S]` of the rows that gave them any mass."""
        demand_width(law_SV, self.target_size)
        return renormalised(law_SV.index_select(-1, self._on(law_SV.device).ids_U))

    def _on(self, device: torch.device) -> _Maps:
        """The maps on a device, made once for each: copying them every step would wait for the device."""
        if device not in self._maps:
            ids_U = torch.tensor(self.ids, dtype=torch.long)
            index_V = torch.full((self.target_size,), -1, dtype=torch.long)
            index_V[ids_U] = torch.arange(self.size)
            self._maps[device] = _Maps(ids_U.to(device), index_V.to(device))
        return self._maps[device]

    @cached_property
    def _maps(self) -> dict[torch.device, _Maps]:
        return {}

    @cached_property
    def _agreed(self) -> list[Tensor]:
        """The read-out's ids that were compared last: the comparison waits for the device, so it is done once."""
        return []

    def _demand_same(self, ids_U: Tensor) -> None:
        if self._agreed and self._agreed[0] is ids_U:
            return
        if not torch.equal(ids_U.long(), self._on(ids_U.device).ids_U):
            raise BadInput(
                f"The read-out's columns ({ids_U.numel()}) are not the ids of this draft vocabulary ({self.size}, "
                f"digest {self.digest}). Use the vocabulary that the head was built with; order counts too."
            )
        self._agreed[:] = [ids_U]


def _integers(values: Tensor, name: str) -> list[int]:
    if values.dim() != 1 or values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise BadInput(f"{name} is {list(values.shape)} {values.dtype}; expected integers in one dimension, `[U]`.")
    return [int(x) for x in values.tolist()]
