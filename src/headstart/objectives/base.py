"""Where losses are projected, weighed and reduced: nowhere else does a mask or a mean appear.

The loss of an optimiser step is  sum_d weight_d * (sum over the step's supervised positions of depth d) / their number,
counted over all micro-batches, so the gradient does not depend on how the step was cut into them. A step without
supervised positions has loss 0 (bugs.md B21, B23).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from headstart.core import Readout
from headstart.errors import BadInput
from headstart.objectives.divergence import cross_entropy, fused_cross_entropy

CHUNK = 1024  # rows whose logits are in memory at once: 32 MiB in fp32 for 8,192 draft tokens


class Predicted(NamedTuple):
    """What a head said of the supervised positions at one depth: features `[S, F]` and how they are read out."""

    depth: int
    feature_SF: Tensor
    readout: Readout


class Wanted(NamedTuple):
    """What is true there: draft-vocabulary labels `[S]`."""

    label_S: Tensor


class Objective(Protocol):
    """One loss per position and depth, with gradient to the features."""

    def __call__(self, said: Sequence[Predicted], true: Sequence[Wanted]) -> list[Tensor]:
        """`[S]` for each depth."""
        ...


class CrossEntropy:
    """Cross-entropy with the target's own tokens. `chunk` rows of logits are in memory at a time."""

    def __init__(self, chunk: int = CHUNK) -> None:
        self.chunk = chunk

    def __call__(self, said: Sequence[Predicted], true: Sequence[Wanted]) -> list[Tensor]:
        """See `cross_entropy`."""
        return [
            projected(cross_entropy, s.feature_SF, s.readout, (t.label_S,), self.chunk, fused_cross_entropy)
            for s, t in zip(said, true, strict=True)
        ]


def decay(depths: int, rate: float) -> list[float]:
    """Weights `rate^k` for k = 1..depths (Medusa: 0.8)."""
    return [rate**k for k in range(1, depths + 1)]


def reduce(losses: Sequence[Tensor], weights: Sequence[float], counts: Sequence[int]) -> Tensor:
    """The share of the step's loss that these positions bring; `counts[d]` is the step's number of them at depth d."""
    if len(losses) != len(weights):
        raise BadInput(f"{len(weights)} depth weights for {len(losses)} depths; give one each.")
    terms = [w * loss.sum() / max(n, 1) for loss, w, n in zip(losses, weights, counts, strict=True)]
    return torch.stack(terms).sum()


def projected(
    loss: Callable[..., Tensor],
    feature_SF: Tensor,
    readout: Readout,
    labels: tuple[Tensor, ...],
    chunk: int,
    fused: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """`loss(readout(feature), *labels)`, row by row, without ever holding the logits of all rows.

    The gradient is taken chunk by chunk while the logits are there. Rows are independent, so it can be kept per row
    and scaled later. `fused` returns the loss with its gradient to the logits, where that is cheaper than
    differentiating `loss` itself. A read-out with weights of its own to train takes the plain way, which keeps the
    logits.
    """
    if not len(feature_SF):
        return feature_SF.sum(-1)
    if readout.trained:
        return loss(readout.project(feature_SF), *labels)
    out: Tensor = _Projected.apply(feature_SF, loss, readout, labels, chunk, fused)  # type: ignore[no-untyped-call]
    return out


class _Projected(torch.autograd.Function):
    """See `projected`."""

    @staticmethod
    def forward(
        ctx: Any,
        feature_SF: Tensor,
        loss: Any,
        readout: Readout,
        labels: tuple[Tensor, ...],
        chunk: int,
        fused: Any,
    ) -> Tensor:
        losses, gradients = [], []
        for start in range(0, len(feature_SF), chunk):
            part_CF = feature_SF[start : start + chunk].detach().requires_grad_()
            true = [x[start : start + chunk] for x in labels]
            with torch.enable_grad():
                logits_CU = readout.project(part_CF)
                if fused is None:
                    loss_C = loss(logits_CU, *true)
                    gradient_CF = torch.autograd.grad(loss_C.sum(), part_CF)[0]
            if fused is not None:
                loss_C, gradient_CU = fused(logits_CU.detach(), *true)
                gradient_CF = torch.autograd.grad(logits_CU, part_CF, gradient_CU.to(logits_CU))[0]
            losses.append(loss_C.detach())
            gradients.append(gradient_CF)
        ctx.save_for_backward(torch.cat(gradients))
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (gradient_SF,) = ctx.saved_tensors
        return gradient_SF * grads[0][:, None].to(gradient_SF), None, None, None, None, None
