"""Kernels in C against their plain twins, and what happens where there is no compiler."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.targets import hf_attention
from headstart.targets.kernels import attention, build
from headstart.targets.kernels.build import library

KERNEL = pytest.mark.skipif(isinstance(attention._kernel(), str), reason=str(attention._kernel()))
SHAPES = [(3, 9, 3, 50, 64), (2, 8, 8, 33, 32), (4, 8, 1, 17, 96), (2, 16, 4, 300, 128), (5, 6, 1, 1, 256)]


def case(requests: int, heads: int, groups: int, slots: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries as transformers leaves them, keys and values as views of a longer cache, a mask with holes."""
    torch.manual_seed(slots)
    buffer = torch.randn(2, requests, groups, slots + 7, width).bfloat16()
    buffer[..., slots:, :] = float("nan")  # nobody may look there
    query = 3 * torch.randn(requests, 1, heads, width).bfloat16().transpose(1, 2)
    mask = torch.rand(requests, 1, 1, slots) < 0.6
    mask[..., 0] = True
    return query, buffer[0][:, :, :slots], buffer[1][:, :, :slots], mask


@KERNEL
@pytest.mark.parametrize("shape", [*SHAPES, (2, 10, 2, 20, 64), (2, 7, 1, 40, 64), (130, 9, 3, 90, 64)])
@pytest.mark.parametrize("masked", [True, False])
def test_attention_of_one_token_is_that_of_sdpa(shape: tuple[int, ...], masked: bool) -> None:
    query, key, value, mask = case(*shape)
    seen = mask if masked else None
    assert attention.fits(query, key, value, seen)
    found = attention.attend(query, key, value, seen, 0.2)
    wide = [x.double() for x in (query, key, value)]
    exact = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=seen, enable_gqa=True, scale=0.2)
    torch.testing.assert_close(found.double(), exact, atol=2e-3, rtol=2**-8)  # the output's own rounding


@KERNEL
def test_what_the_mask_hides_is_not_read() -> None:
    query, key, value, mask = case(3, 9, 3, 50, 64)
    before = attention.attend(query, key, value, mask, None)
    for x in (key, value):
        x.masked_fill_(~mask.transpose(2, 3), float("nan"))
    assert torch.equal(attention.attend(query, key, value, mask, None), before)


@KERNEL
def test_a_row_does_not_depend_on_its_company_or_on_padding() -> None:
    query, key, value, mask = case(6, 9, 3, 50, 64)
    whole = attention.attend(query, key, value, mask, None)
    for row in range(6):
        one = slice(row, row + 1)
        alone = attention.attend(query[one], key[one], value[one], mask[one], None)
        assert torch.equal(alone, whole[one])
        last = int(mask[row].nonzero()[-1, -1]) + 1
        short = attention.attend(query[one], key[one, :, :last], value[one, :, :last], mask[one, ..., :last], None)
        assert torch.equal(short, whole[one])


@KERNEL
def test_what_does_not_fit_takes_the_plain_way() -> None:
    query, key, value, mask = case(3, 9, 3, 50, 64)
    no = [
        (query.float(), key.float(), value.float(), mask),
        (query.expand(-1, -1, 2, -1), key, value, mask),
        (query, key, value.transpose(2, 3).contiguous().transpose(2, 3), mask),
        (query, key, value, mask.float()),
        (query, key, value, mask.expand(-1, 9, -1, -1)),
        (query, key, value, mask[:1]),  # would be read beyond its end
        (query, key, value, mask[..., :40]),
        case(2, 9, 1, 20, 64),
        case(2, 4, 2, 20, 48),
    ]
    assert attention.fits(query, key, value, mask)
    assert not any(attention.fits(*wrong) for wrong in no)
    with pytest.raises(RuntimeError, match="a shape that it does not take"):
        attention.attend(*no[-1], None)


@KERNEL
def test_batches_in_bf16_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value, mask = case(3, 9, 3, 50, 64)
    expected = attention.attend(query, key, value, mask, 0.125).transpose(1, 2)
    for way in (hf_attention.grouped, hf_attention.per_node):
        assert torch.equal(way(torch.nn.Module(), query, key, value, mask, scaling=0.125)[0], expected)


@pytest.fixture
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    library.cache_clear()
    yield tmp_path
    library.cache_clear()


def test_a_library_is_compiled_once(nothing_built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = library("attention.c")
    if isinstance(first, str):
        pytest.skip(first)
    (path,) = (nothing_built / "native").iterdir()
    library.cache_clear()

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(build.subprocess, "run", never)
    assert not isinstance(library("attention.c"), str)
    assert list((nothing_built / "native").iterdir()) == [path]


@pytest.mark.parametrize(
    ("compiler", "said"),
    [("no-such-compiler", "no C compiler was found"), ("false", "fails"), ("sleep", "fails")],
)
def test_without_a_compiler_the_reason_is_told(
    nothing_built: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, said: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    found = library("attention.c")
    assert isinstance(found, str) and said in found
    assert not [path for path in nothing_built.rglob("*") if path.is_file()]


def test_a_compiler_that_hangs_is_given_up(nothing_built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(*args: Any, timeout: float, **kwargs: Any) -> None:
        raise subprocess.TimeoutExpired("cc", timeout)

    monkeypatch.setenv("CC", "true")
    monkeypatch.setattr(build.subprocess, "run", hangs)
    assert "does not run" in str(library("attention.c"))


def test_a_damaged_library_is_named(nothing_built: Path) -> None:
    if isinstance(library("attention.c"), str):
        pytest.skip("no library")
    (path,) = (nothing_built / "native").iterdir()
    path.unlink()
    path.write_bytes(b"")
    library.cache_clear()
    assert str(path) in str(library("attention.c"))
