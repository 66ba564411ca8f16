"""The whole target vocabulary: draft index and target id are the same number."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headstart.core import Readout
from headstart.errors import BadInput
from headstart.vocab.base import best, demand_width


@dataclass(frozen=True)
class Full:
    """All `size` rows of the target's LM head, padding rows included: whatever the target can emit can be drafted."""

    size: int

    def __post_init__(self) -> None:
        """Refuse a vocabulary without ids."""
        if self.size < 1:
            raise BadInput(f"Full(size={self.size}): expected the number of rows of the target's LM head.")

    @property
    def ids_U(self) -> None:
        """None: index u is id u."""
        return None

    def labels(self, token_S: Tensor) -> tuple[Tensor, Tensor]:
        """The ids themselves; only those outside the vocabulary are unknown."""
        known_S = (token_S >= 0) & (token_S < self.size)
        return token_S.long() * known_S, known_S

    def to_target(self, index: Tensor) -> Tensor:
        """The indices themselves."""
        return index

    def topk(self, readout: Readout, feature_RF: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Target ids and fp32 log-probabilities `[R, K]` of the k likeliest tokens (see `DraftVocab`)."""
        if readout.ids_U is not None or readout.size != self.size:
            kind = "all" if readout.ids_U is None else "chosen"
            raise BadInput(
                f"Full(size={self.size}) was given a read-out of {readout.size} columns for {kind} ids; it needs one "
                "column per target id. Use Trimmed with the read-out's ids, or a head built for this target."
            )
        return best(readout.project, feature_RF, k, self.size)

    def restrict(self, law_SV: Tensor) -> tuple[Tensor, Tensor]:
        """The law itself, not copied, and a mask `[S]` of the rows that are not all zero."""
        demand_width(law_SV, self.size)
        return law_SV, law_SV.sum(-1) > 0
