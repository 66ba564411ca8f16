"""Per-position losses between a head's logits and what the target said. Pure: `[S, U]` in, `[S]` out, fp32.

Masks, depth weights and the reduction are not their business (`objectives/base.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy(logits_SU: Tensor, label_S: Tensor) -> Tensor:
    """`-log q(label)`; 0 where the head is certain of the label, log U for a uniform head (Medusa, eq. 1)."""
    return torch.nn.functional.cross_entropy(logits_SU.float(), label_S, reduction="none")


def kl(logits_SU: Tensor, law_SU: Tensor) -> Tensor:
    """`sum_u p(u) (log p(u) - log q(u))` with p the teacher's law; 0 where both agree. p = 0 adds nothing."""
    logq_SU = torch.log_softmax(logits_SU.float(), -1)
    loss_S: Tensor = (torch.special.xlogy(law_SU, law_SU) - law_SU * logq_SU).sum(-1)
    return loss_S
