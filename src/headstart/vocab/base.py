"""What a draft vocabulary is to the rest of the package: target ids in, target ids out, draft indices inside only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from headstart.core import Readout
from headstart.errors import BadInput

TOPK_ROWS = 256  # rows projected at once: bounds the fp32 `[rows, U]` scratch of a wide frontier
BLOCK = 256  # columns that share a maximum in the search for the best k; about the square root of a large vocabulary


class DraftVocab(Protocol):
    """A frozen value: the target ids that a head can draft. Draft indices `0..U-1` never leave head and vocabulary."""

    @property
    def size(self) -> int:
        """U, the number of ids that can be drafted."""
        ...

    @property
    def ids_U(self) -> Tensor | None:
        """Target ids by draft index, on the CPU; None where index u is id u."""
        ...

    def labels(self, token_S: Tensor) -> tuple[Tensor, Tensor]:
        """Draft index of each target id, 0 where there is none, and a mask of those that have one.

        Ids outside the target's vocabulary (-100, say) have none. The caller drops unknown labels, and counts them.
        """
        ...

    def to_target(self, index: Tensor) -> Tensor:
        """Target ids of draft indices, in the same shape."""
        ...

    def topk(self, readout: Readout, feature_RF: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k likeliest tokens after each row, best first: target ids and log-probabilities, `[R, K]` each.

        The law is the softmax of all U logits, in fp32. Among equal logits the lower draft index comes first. Raises
        BadInput if there are not k ids, or if the read-out's columns are not those of this vocabulary.
        """
        ...

    def restrict(self, law_SV: Tensor) -> tuple[Tensor, Tensor]:
        """The target's law given that the token can be drafted, `[S, U]`, and a mask `[S]` of rows that have one.

        Rows without any mass on the draft's support are all zero, not uniform: they teach nothing.
        """
        ...


def best(project: Callable[[Tensor], Tensor], feature_RF: Tensor, k: int, size: int) -> tuple[Tensor, Tensor]:
    """Draft indices and fp32 log-probabilities of the k best columns, `[R, K]`; `project` maps `[R, F] -> [R, U]`.

    Raises BadInput unless `1 <= k <= size`.
    """
    if not 1 <= k <= size:
        raise BadInput(f"{k} candidates were asked of a draft vocabulary of {size} ids; ask for 1 to {size}.")
    parts = []
    for part_RF in torch.split(feature_RF, TOPK_ROWS):
        logits_RU = project(part_RF).float()
        index_RK = first_best(logits_RU, k)
        parts.append((index_RK, logits_RU.gather(1, index_RK) - logits_RU.logsumexp(1, keepdim=True)))
    index, logp = zip(*parts, strict=True)
    return torch.cat(index), torch.cat(logp)


def first_best(score_RU: Tensor, k: int) -> Tensor:
    """`[R, K]` columns of the k largest fp32 scores, equal ones in column order.

    `torch.topk` promises no order among equals, which bf16 logits are full of, and a stable sort of all columns is many
    times slower. The best k lie in the k blocks with the largest maxima (the first such blocks among equals), so only
    those are ranked. Nothing is read back from the device.
    """
    padded_RU = torch.nn.functional.pad(score_RU, (0, -score_RU.shape[1] % BLOCK), value=-torch.inf)
    block_RXY = padded_RU.reshape(len(padded_RU), padded_RU.shape[1] // BLOCK, BLOCK)
    chosen_RX = _rank(block_RXY.amax(2), min(k, block_RXY.shape[1])).sort(1).values  # columns stay in order
    found_RK = _rank(block_RXY.gather(1, chosen_RX[:, :, None].expand(-1, -1, BLOCK)).flatten(1), k)
    return chosen_RX.gather(1, found_RK // BLOCK) * BLOCK + found_RK % BLOCK


def _rank(score_RU: Tensor, k: int) -> Tensor:
    """The same for few columns: score and column in one integer key, no two of which are equal."""
    bits_RU = score_RU.view(torch.int32).long()
    rising_RU = torch.where(bits_RU < 0, -(bits_RU & 0x7FFFFFFF), bits_RU)  # ordered like the floats, -0 = 0
    last = score_RU.shape[1] - 1
    key_RU = (rising_RU << 32) + torch.arange(last, -1, -1, device=score_RU.device)
    return last - (key_RU.topk(k).values & 0xFFFFFFFF)


def renormalised(inside_SU: Tensor) -> tuple[Tensor, Tensor]:
    """Rows divided by their sums, at least in fp32, and which of them had a sum; the others stay zero."""
    inside_SU = inside_SU.to(torch.promote_types(inside_SU.dtype, torch.float32))
    mass_S1 = inside_SU.sum(-1, keepdim=True)
    known_S1 = mass_S1 > 0
    return inside_SU / mass_S1.where(known_S1, torch.ones_like(mass_S1)), known_S1.squeeze(-1)


def demand_width(law_SV: Tensor, size: int) -> None:
    """Raises BadInput if a target law does not cover the target's vocabulary of `size` ids."""
    if law_SV.shape[-1] != size:
        raise BadInput(
            f"A target law of {law_SV.shape[-1]} ids was given to a draft vocabulary for {size}. "
            "Pass the law over all rows of the target's LM head, padding rows included."
        )
