"""Per-position losses between a head's logits and what the target said. Pure: `[S, U]` in, `[S]` out, fp32.

Masks, depth weights and the reduction are not their business (`objectives/base.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy(logits_SU: Tensor, label_S: Tensor) -> Tensor:
    """`-log q(label)`; 0 where the head is certain of the label, log U for a uniform head (Medusa, eq. 1)."""
    return torch.nn.functional.cross_entropy(logits_SU.float(), label_S, reduction="none")


def fused_cross_entropy(logits_SU: Tensor, label_S: Tensor) -> tuple[Tensor, Tensor]:
    """`cross_entropy` and its gradient to the logits, `softmax - one_hot`, without a second pass over them."""
    label_S1 = label_S[:, None]
    logq_SU = torch.log_softmax(logits_SU.float(), -1)
    loss_S = -logq_SU.gather(1, label_S1)[:, 0]
    gradient_SU = logq_SU.exp_().scatter_add_(1, label_S1, logq_SU.new_full(label_S1.shape, -1.0))
    return loss_S, gradient_SU


def kl(logits_SU: Tensor, law_SU: Tensor) -> Tensor:
    """`sum_u p(u) (log p(u) - log q(u))` with p the teacher's law; 0 where both agree. p = 0 adds nothing."""
    logq_SU = torch.log_softmax(logits_SU.float(), -1).masked_fill(law_SU == 0, 0.0)  # 0 times -inf is NaN
    loss_S: Tensor = (torch.special.xlogy(law_SU, law_SU) - law_SU * logq_SU).sum(-1)
    return loss_S
