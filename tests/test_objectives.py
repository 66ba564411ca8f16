"""Losses at their limits, the chunked projection against the plain one, and the only place where a mean is taken."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.core import Readout
from headstart.errors import BadInput
from headstart.objectives.base import CrossEntropy, Predicted, Wanted, decay, projected, reduce
from headstart.objectives.divergence import cross_entropy, fused_cross_entropy, kl
from headstart.testing import tiny_target

S, F, U = 7, 5, 11


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def law(*shape: int, seed: int = 1) -> Tensor:
    return torch.softmax(2 * noise(*shape, seed=seed), -1)


# --- one position ------------------------------------------------------------------------------------------


def test_cross_entropy_at_its_limits() -> None:
    label_S = torch.arange(S)
    sure_SU = torch.zeros(S, U).scatter(1, label_S[:, None], 50.0)
    torch.testing.assert_close(cross_entropy(sure_SU, label_S), torch.zeros(S))
    torch.testing.assert_close(cross_entropy(torch.ones(S, U), label_S), torch.full((S,), math.log(U)))
    torch.testing.assert_close(cross_entropy(sure_SU, label_S + 1), torch.full((S,), 50.0))  # wrong, and how wrong


def test_cross_entropy_is_minus_the_log_of_the_softmax() -> None:
    logits_SU, label_S = noise(S, U), torch.tensor([0, 10, 3, 3, 7, 1, 9])
    exps = [[math.exp(x) for x in row] for row in logits_SU.tolist()]
    want = [-math.log(row[i] / sum(row)) for row, i in zip(exps, label_S.tolist(), strict=True)]
    assert cross_entropy(logits_SU, label_S).tolist() == pytest.approx(want, rel=1e-5)


def test_kl_at_its_limits() -> None:
    law_SU = law(S, U)
    torch.testing.assert_close(kl(law_SU.log() + 3, law_SU), torch.zeros(S), atol=1e-6, rtol=0)
    point_SU = torch.nn.functional.one_hot(torch.arange(S), U).float()
    torch.testing.assert_close(kl(noise(S, U), point_SU), cross_entropy(noise(S, U), torch.arange(S)))
    by_hand = sum(p * math.log(p / 0.25) for p in (0.5, 0.5))
    assert kl(torch.zeros(1, 4), torch.tensor([[0.5, 0.5, 0, 0]])).item() == pytest.approx(by_hand)
    assert (kl(noise(S, U), law_SU) > 0).all()


def test_kl_falls_to_the_teachers_law() -> None:
    """Its gradient is q - p, so it vanishes there and nowhere else."""
    logits_SU, law_SU = noise(S, U).requires_grad_(), law(S, U)
    (grad,) = torch.autograd.grad(kl(logits_SU, law_SU).sum(), logits_SU)
    torch.testing.assert_close(grad, torch.softmax(logits_SU.detach(), -1) - law_SU, atol=1e-6, rtol=1e-5)


def test_a_token_that_neither_gives_any_mass_adds_nothing() -> None:
    """A logit of minus infinity is a token that cannot be drafted."""
    logits_SU, law_SU = noise(S, U), law(S, U)
    law_SU[:, 4] = 0
    law_SU /= law_SU.sum(-1, keepdim=True)
    rest = [u for u in range(U) if u != 4]
    want_S = kl(logits_SU[:, rest], law_SU[:, rest])
    banned_SU = logits_SU.masked_fill(torch.arange(U) == 4, -torch.inf).requires_grad_()
    got_S = kl(banned_SU, law_SU)
    torch.testing.assert_close(got_S, want_S)
    assert torch.isfinite(torch.autograd.grad(got_S.sum(), banned_SU)[0]).all()


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_the_fused_loss_is_the_loss_and_its_gradient(scale: float) -> None:
    logits_SU, label_S = (scale * noise(S, U)).requires_grad_(), torch.tensor([0, 10, 3, 3, 7, 1, 9])
    loss_S, gradient_SU = fused_cross_entropy(logits_SU.detach(), label_S)
    want_S = cross_entropy(logits_SU, label_S)
    torch.testing.assert_close(loss_S, want_S)
    torch.testing.assert_close(gradient_SU, torch.autograd.grad(want_S.sum(), logits_SU)[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_are_fp32(dtype: torch.dtype) -> None:
    logits_SU = (30 * noise(S, U)).to(dtype)
    for got, want in (
        (cross_entropy(logits_SU, torch.arange(S)), cross_entropy(logits_SU.float(), torch.arange(S))),
        (kl(logits_SU, law(S, U)), kl(logits_SU.float(), law(S, U))),
        (
            fused_cross_entropy(logits_SU, torch.arange(S))[0],
            fused_cross_entropy(logits_SU.float(), torch.arange(S))[0],
        ),
    ):
        assert got.dtype == torch.float32
        assert torch.equal(got, want)


# --- chunks ------------------------------------------------------------------------------------------------

LABEL_S = torch.tensor([0, 10, 3, 3, 7, 1, 9])
LOSSES: dict[str, tuple[Callable[..., Tensor], Tensor, Callable[..., tuple[Tensor, Tensor]] | None]] = {
    "labels": (cross_entropy, LABEL_S, None),
    "labels, fused": (cross_entropy, LABEL_S, fused_cross_entropy),
    "laws": (kl, law(S, U), None),
}


def readout(weight_UF: Tensor, *, trained: bool = False, sizes: list[int] | None = None) -> Readout:
    """A read-out that is not linear, as a soft-capped one; `sizes` gathers the rows of each product."""

    def project(feature_RF: Tensor) -> Tensor:
        if sizes is not None:
            sizes.append(len(feature_RF))
        return torch.tanh(feature_RF @ weight_UF.T / 3) * 3

    return Readout(project, U, trained=trained)


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize("chunk", [1, 3, 7, 10**9])
def test_chunks_give_the_loss_and_gradient_of_the_plain_way(chunk: int, name: str) -> None:
    loss, label, fused = LOSSES[name]
    feature_SF, weight_UF, scale_S = noise(S, F).requires_grad_(), noise(U, F, seed=2), noise(S, seed=3)
    sizes: list[int] = []
    plain_S = loss(readout(weight_UF).project(feature_SF), label)
    chunked_S = projected(loss, feature_SF, readout(weight_UF, sizes=sizes), (label,), chunk, fused)
    torch.testing.assert_close(chunked_S, plain_S, atol=1e-6, rtol=1e-5)
    assert sum(sizes) == S
    assert max(sizes) == min(chunk, S)
    (want,) = torch.autograd.grad((scale_S * plain_S).sum(), feature_SF)  # rows weigh differently, and may be negative
    (got,) = torch.autograd.grad((scale_S * chunked_S).sum(), feature_SF)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


def test_a_borrowed_readout_gets_no_gradient_and_holds_no_graph() -> None:
    weight_UF, feature_SF = noise(U, F, seed=2).requires_grad_(), noise(S, F).requires_grad_()
    out_S = projected(cross_entropy, feature_SF, readout(weight_UF), (torch.arange(S),), 3)
    out_S.sum().backward()
    assert weight_UF.grad is None
    assert feature_SF.grad is not None


@pytest.mark.parametrize("chunk", [1, 3])
def test_a_trained_readout_learns(chunk: int) -> None:
    """It takes the plain way, whatever the chunk: its weights need the logits of all rows."""
    weight_UF, feature_SF = noise(U, F, seed=2).requires_grad_(), noise(S, F).requires_grad_()
    sizes: list[int] = []
    out_S = projected(
        cross_entropy, feature_SF, readout(weight_UF, trained=True, sizes=sizes), (torch.arange(S),), chunk
    )
    plain_S = cross_entropy(readout(weight_UF).project(feature_SF), torch.arange(S))
    assert sizes == [S]
    assert torch.equal(out_S, plain_S)
    for got, want in zip(
        torch.autograd.grad(out_S.sum(), (weight_UF, feature_SF)),
        torch.autograd.grad(plain_S.sum(), (weight_UF, feature_SF)),
        strict=True,
    ):
        assert torch.equal(got, want)
        assert got.abs().sum() > 0


@pytest.mark.parametrize("trained", [False, True])
def test_no_rows_have_no_loss_and_a_zero_gradient(trained: bool) -> None:
    feature_SF = noise(0, F).requires_grad_()
    out_S = projected(cross_entropy, feature_SF, readout(noise(U, F), trained=trained), (torch.arange(0),), 3)
    assert out_S.shape == (0,)
    assert torch.autograd.grad(out_S.sum(), feature_SF)[0].shape == (0, F)


def test_the_targets_own_head_is_read_out_in_chunks_too() -> None:
    """Gemma's soft-cap is inside the read-out, and its weights, which can be trained, are left alone."""
    target = tiny_target("gemma3", final_logit_softcapping=5.0)
    feature_SF, label_S = noise(S, 48).requires_grad_(), torch.arange(S)
    predicted = Predicted(1, feature_SF, target.readout())
    chunked, plain = (CrossEntropy(chunk)([predicted], [Wanted(label_S)])[0] for chunk in (2, 100))
    torch.testing.assert_close(chunked, plain, atol=1e-6, rtol=1e-6)
    logits_SV = torch.tanh(feature_SF @ target.head.weight.T / 5.0) * 5.0
    torch.testing.assert_close(plain, cross_entropy(logits_SV, label_S), atol=1e-5, rtol=1e-5)
    chunked.sum().backward()
    assert feature_SF.grad is not None
    assert all(weight.grad is None for weight in target.model.parameters())


def test_each_depth_is_paired_with_its_own_labels() -> None:
    rows = [Predicted(d, noise(d + 1, F, seed=d), readout(noise(U, F, seed=d))) for d in (1, 2, 3)]
    labels = [torch.arange(d + 1) for d in (1, 2, 3)]
    got = CrossEntropy()(rows, [Wanted(x) for x in labels])
    for out_S, row, label_S in zip(got, rows, labels, strict=True):
        torch.testing.assert_close(out_S, cross_entropy(row.readout.project(row.feature_SF), label_S))
    with pytest.raises(ValueError, match="zip"):
        CrossEntropy()(rows, [Wanted(x) for x in labels[:2]])


# --- the mean ----------------------------------------------------------------------------------------------


def test_the_mean_by_hand() -> None:
    losses = [torch.tensor([1.0, 2.0, 6.0]), torch.tensor([4.0])]
    assert reduce(losses, [1.0, 1.0], [3, 1]).item() == pytest.approx(3 + 4)
    assert reduce(losses, [0.5, 0.25], [3, 1]).item() == pytest.approx(0.5 * 3 + 0.25 * 4)
    assert reduce(losses, [1.0, 1.0], [6, 4]).item() == pytest.approx(1.5 + 1)  # the step holds more than this batch


def test_nothing_supervised_is_a_loss_of_zero() -> None:
    """0/0 was the NaN of others' first step (B23)."""
    empty = noise(0, F).requires_grad_()
    out = reduce([empty.sum(-1), empty.sum(-1)], [1.0, 1.0], [0, 0])
    assert out.item() == 0.0
    assert torch.equal(torch.autograd.grad(out, empty)[0], torch.zeros(0, F))
    loss = noise(2).requires_grad_()
    some = reduce([loss, empty.sum(-1)], [1.0, 1.0], [2, 0])
    torch.testing.assert_close(some, loss.mean())


def test_depths_in_two_dtypes_can_be_added() -> None:
    """Under autocast a depth without rows keeps bf16 features, the others have fp32 losses."""
    out = reduce([torch.tensor([2.0]), torch.zeros(0, dtype=torch.bfloat16)], [1.0, 1.0], [1, 0])
    assert out.dtype == torch.float32
    assert out.item() == 2.0


def test_the_share_of_micro_batches_adds_up() -> None:
    loss_S = noise(9) ** 2
    parts = [reduce([part], [0.7], [9]) for part in loss_S.split([1, 5, 3])]
    torch.testing.assert_close(torch.stack(parts).sum(), reduce([loss_S], [0.7], [9]))


def test_weights_decay_by_depth() -> None:
    assert decay(4, 0.8) == pytest.approx([0.8, 0.64, 0.512, 0.4096])
    assert decay(3, 1.0) == [1.0, 1.0, 1.0]


def test_weights_reach_the_gradient() -> None:
    def gradient(weights: list[float]) -> Any:
        losses = [noise(3, seed=d).requires_grad_() for d in range(2)]
        return torch.autograd.grad(reduce(losses, weights, [3, 3]), losses)

    even, decayed = gradient([1.0, 1.0]), gradient(decay(2, 0.5))
    for got, weight in zip(decayed, (0.5, 0.25), strict=True):
        torch.testing.assert_close(got, weight * even[0])
    assert gradient([1.0, 0.0])[1].abs().sum() == 0


def test_a_weight_for_each_depth() -> None:
    with pytest.raises(BadInput, match="3 depth weights for 2 depths"):
        reduce([noise(2), noise(2)], [1.0, 1.0, 1.0], [2, 2])
