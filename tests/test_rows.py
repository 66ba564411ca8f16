from __future__ import annotations

import pytest
import torch

from headstart.targets.base import Rows, first_max


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("vocab", [3, 511, 512, 513, 1024, 2000, 4096])
def test_first_max_is_argmax_with_ties(vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocab)
    random = torch.randn(17, vocab).to(dtype)
    tied = torch.randint(0, 3, (17, vocab)).to(dtype)  # the maximum occurs many times
    flat = torch.zeros(2, vocab, dtype=dtype)
    barred = random.clone()
    barred[:, : vocab // 2] = float("-inf")
    for logits in (random, tied, flat, barred):
        assert torch.equal(first_max(logits), torch.tensor([int((r == r.max()).nonzero()[0]) for r in logits]))


def test_rows_project_what_is_asked_for() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(3, 4, 5), torch.randn(5, 600)
    sizes: list[int] = []

    def project(hidden_RD: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden_RD))
        return hidden_RD @ head

    rows = Rows(hidden, project)
    full = hidden @ head
    assert torch.equal(rows.argmax_BN(), full.argmax(-1))
    torch.testing.assert_close(rows.logits_RNV([2, 0]), full[[2, 0]])
    torch.testing.assert_close(rows.at(torch.tensor([3, 0, 1])).logits_RNV([0, 1, 2])[1, 0], full[1, 0])
    assert sizes == [12, 8, 3]
