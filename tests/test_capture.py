"""Features of a text are those of the stock model for that text alone; shards heal, and nothing is run twice."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from headstart.core import Taps
from headstart.errors import BadInput
from headstart.targets.hf import HFTarget
from headstart.testing import tiny_target
from headstart.train import capture as module
from headstart.train.capture import Captured, Live, Text, Window, capture, cost, intact
from headstart.train.fingerprint import fingerprint
from headstart.train.template import Sample
from helpers import spied

EVERYTHING = Taps(final=True, layers=(0, 2))
FINAL = Taps(final=True)
ALL = Window()


def samples(count: int, seed: int = 0, high: int = 40, at_least: int = 2) -> list[Sample]:
    """Random texts with an answer at the end, or in two stretches."""
    rng = random.Random(seed)
    out = []
    for _ in range(count):
        n = rng.randint(at_least, high)
        first = rng.randrange(1, n)
        supervised = [t >= first and (t != first + 3 or t == n - 1) for t in range(n)]
        out.append(Sample([rng.randrange(96) for _ in range(n)], supervised))
    return out


SOME = samples(11)


@cache
def direct(target: HFTarget, ids: tuple[int, ...]) -> tuple[Tensor, ...]:
    """`[T, D]` of the embeddings, after layer 2, and after the final norm, from transformers alone."""
    with torch.no_grad():
        out = target.model.base_model(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
    return out.hidden_states[0][0], out.hidden_states[2][0], out.last_hidden_state[0]


def found(texts: Captured, sample: Sample, start: int = 0) -> Text:
    """The captured text of a sample; texts are stored by length."""
    ids = sample.ids[start:]
    at = [i for i in range(len(texts)) if texts[i].token_T.tolist() == ids]
    assert len(at) == 1
    return texts[at[0]]


def demand_direct(
    target: HFTarget, texts: Captured, given: Sequence[Sample], window: Window = ALL, tolerance: float = 1e-5
) -> None:
    """Features are right to this share of the largest: those after a layer are not of unit size."""
    assert len(texts) == len(given)
    for sample in given:
        start = window.start(sample.supervised)
        text = found(texts, sample, start)
        assert text.supervised_T.tolist() == sample.supervised[start:]
        layers, final = text.features.layers, text.features.final
        assert final is not None
        for got, want in zip((*layers, final), direct(target, tuple(sample.ids))[-1 - len(layers) :], strict=True):
            scale = max(1.0, float(want.abs().max()))
            torch.testing.assert_close(got / scale, want[start:] / scale, atol=tolerance, rtol=0)


def run_over(monkeypatch: pytest.MonkeyPatch, target: HFTarget) -> list[int]:
    """Tokens of every pass from now on; the list grows."""
    lengths: list[int] = []
    extend = target.extend

    def call(cache: Any, token_BN: Tensor, *rest: Any) -> Any:
        lengths.append(token_BN.numel())
        return extend(cache, token_BN, *rest)

    monkeypatch.setattr(target, "extend", call)
    return lengths


# --- the features ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_features_are_those_of_the_stock_model(family: str, tmp_path: Path) -> None:
    """Final norm, embeddings as they enter the first layer (Gemma scales them), and the stream after layer 2."""
    target = tiny_target(family)
    demand_direct(target, capture(target, SOME, EVERYTHING, tmp_path), SOME)


@pytest.mark.parametrize("tokens", [1, 60, 100_000])
def test_company_and_order_change_nothing(
    tiny: Callable[..., HFTarget], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """Alone, in small batches, all at once; in any order; beside others (S16)."""
    target = tiny()
    monkeypatch.setattr(module, "BATCH_TOKENS", tokens)
    passes = run_over(monkeypatch, target)
    for given in (SOME, SOME[::-1], SOME[3:5], [*samples(5, seed=9), *SOME]):
        demand_direct(target, capture(target, given, EVERYTHING, tmp_path), given)
    assert len(passes) in {1: [40], 60: range(12, 40), 100_000: [4]}[tokens]
    assert max(passes) <= max(tokens, 40)


def test_a_text_longer_than_a_batch_and_than_a_pass(tiny: Callable[..., HFTarget], tmp_path: Path) -> None:
    target = tiny(max_positions=2048)
    long = samples(1, seed=4, high=1100, at_least=1100)
    demand_direct(target, capture(target, [*long, *SOME], EVERYTHING, tmp_path), [*long, *SOME], tolerance=3e-5)


@pytest.mark.parametrize("before", [0, 1, 3, 500])
def test_a_window_keeps_the_answer_and_a_little_before(
    tiny: Callable[..., HFTarget], tmp_path: Path, before: int
) -> None:
    window = Window(before=before)
    texts = capture(tiny(), SOME, EVERYTHING, tmp_path, window=window)
    demand_direct(tiny(), texts, SOME, window)
    starts = [window.start(s.supervised) for s in SOME]
    assert starts == [max(0, s.supervised.index(True) - before) for s in SOME]
    assert sorted(texts.lengths) == sorted(len(s.ids) - start for s, start in zip(SOME, starts, strict=True))
    assert any(starts) == (before < 500)


@pytest.mark.parametrize("taps", [FINAL, Taps(layers=(2,)), EVERYTHING, Taps(final=True, layers=(3, 1))])
def test_what_is_tapped_is_what_is_kept(tiny: Callable[..., HFTarget], tmp_path: Path, taps: Taps) -> None:
    text = found(capture(tiny(), SOME, taps, tmp_path), SOME[0])
    assert (text.features.final is not None) == taps.final
    assert len(text.features.layers) == len(taps.layers)
    with torch.no_grad():
        out = tiny().model.base_model(torch.tensor([SOME[0].ids]), use_cache=False, output_hidden_states=True)
    for count, layer in zip(taps.layers, text.features.layers, strict=True):  # in the order asked for
        if count < 3:  # transformers' last entry has the final norm in it
            expected = out.hidden_states[count][0]  # sums of a residual stream that is hundreds wide
            torch.testing.assert_close(layer, expected, atol=1e-6 * float(expected.abs().max()), rtol=1e-5)
        else:
            normed = tiny().model.base_model.norm(layer)
            torch.testing.assert_close(normed, out.last_hidden_state[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("stored", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_as_many_bytes_round_and_no_more(
    tiny: Callable[..., HFTarget], tmp_path: Path, stored: str, dtype: torch.dtype
) -> None:
    rounded = capture(tiny(), SOME, EVERYTHING, tmp_path, stored=stored)
    exact = capture(tiny(), SOME, EVERYTHING, tmp_path)
    for i in range(len(SOME)):
        one, other = rounded[i].features, exact[i].features
        assert one.final is not None and other.final is not None
        assert one.final.dtype == dtype
        assert torch.equal(one.final, other.final.to(dtype))
        assert all(torch.equal(a, b.to(dtype)) for a, b in zip(one.layers, other.layers, strict=True))


def test_lengths_and_labels_are_known_without_the_features(tiny: Callable[..., HFTarget], tmp_path: Path) -> None:
    texts = capture(tiny(), SOME, FINAL, tmp_path, window=Window(before=2))
    assert texts.lengths == [len(texts[i].token_T) for i in range(len(texts))]
    assert texts.supervised == [int(texts[i].supervised_T.sum()) for i in range(len(texts))]
    assert sum(texts.supervised) == sum(sum(s.supervised) for s in SOME)
    assert texts.lengths != texts.supervised


@pytest.mark.parametrize("before", [None, 2])
def test_live_texts_are_those_of_the_disk(tiny: Callable[..., HFTarget], tmp_path: Path, before: int | None) -> None:
    window = Window(before=before)
    texts, live = capture(tiny(), SOME, EVERYTHING, tmp_path, window=window), Live(tiny(), SOME, EVERYTHING, window)
    assert len(live) == len(SOME)
    for i, sample in enumerate(SOME):  # in the order given
        start = window.start(sample.supervised)
        one, other = live[i], found(texts, sample, start)
        assert one.token_T.tolist() == other.token_T.tolist() == sample.ids[start:]
        assert one.supervised_T.tolist() == sample.supervised[start:]
        assert (live.lengths[i], live.supervised[i]) == (len(one.token_T), int(one.supervised_T.sum()))
        for a, b in zip(
            (*one.features.layers, one.features.final), (*other.features.layers, other.features.final), strict=True
        ):
            torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-5)


def test_texts_can_be_trained_on(tiny: Callable[..., HFTarget], tmp_path: Path) -> None:
    """They come from inference mode, whose tensors autograd refuses."""
    for texts in (capture(tiny(), SOME, FINAL, tmp_path), Live(tiny(), SOME, FINAL, ALL)):
        final = texts[0].features.final
        assert final is not None
        weight = torch.ones(48, requires_grad=True)
        (final @ weight).sum().backward()
        assert weight.grad is not None


# --- shards ------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARD", 4)


def shards(place: Path) -> list[Path]:
    return sorted(place.glob("*/shard-*.safetensors"))


def content(texts: Captured) -> list[Any]:
    return [
        (t.token_T.tolist(), t.supervised_T.tolist(), t.features.final) for t in (texts[i] for i in range(len(texts)))
    ]


@pytest.mark.usefixtures("small")
def test_texts_are_cut_into_shards_and_run_once(
    tiny: Callable[..., HFTarget], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = run_over(monkeypatch, tiny())
    first = capture(tiny(), SOME, FINAL, tmp_path)
    assert [p.name for p in shards(tmp_path)] == [f"shard-0000{i}.safetensors" for i in range(3)]
    assert len(passes) == 3
    demand_direct(tiny(), first, SOME)
    second = capture(tiny(), SOME, FINAL, tmp_path)
    assert len(passes) == 3
    for one, other in zip(content(first), content(second), strict=True):
        assert one[:2] == other[:2]
        assert torch.equal(one[2], other[2])


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 40, -1, "header", "almost", "gone", "zeros"])
def test_a_damaged_shard_heals_and_no_other_is_run(
    tiny: Callable[..., HFTarget], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: Any
) -> None:
    capture(tiny(), SOME, FINAL, tmp_path)
    before = [path.read_bytes() for path in shards(tmp_path)]
    hurt, whole = shards(tmp_path)[1], before[1]
    header = 8 + int.from_bytes(whole[:8], "little")
    size = {"header": header, "almost": len(whole) - 4, -1: len(whole) - 1}.get(keep, keep)
    if keep == "gone":
        hurt.unlink()
    else:
        hurt.write_bytes(bytes(len(whole)) if keep == "zeros" else whole[:size])
        assert not intact(hurt)
    passes = run_over(monkeypatch, tiny())
    texts = capture(tiny(), SOME, FINAL, tmp_path)
    assert len(passes) == 1
    assert passes[0] < sum(len(s.ids) for s in SOME)
    assert [path.read_bytes() for path in shards(tmp_path)] == before
    demand_direct(tiny(), texts, SOME)


def test_what_is_no_shard_is_not_intact(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    assert not intact(path)
    for content in (b"", bytes(8), b"\xff" * 8, b"\xff" * 200, b"\2" + bytes(7) + b"[]", b"\2" + bytes(7) + b"{}"):
        path.write_bytes(content)
        assert not intact(path)
    save_file({"a": torch.zeros(3), "none": torch.zeros(0)}, path)
    assert intact(path)
    path.write_bytes(path.read_bytes() + b"\0")
    assert not intact(path)


@pytest.mark.usefixtures("small")
def test_a_killed_capture_goes_on_where_it_was(
    tiny: Callable[..., HFTarget], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = run_over(monkeypatch, tiny())

    def kill(line: str, share: float | None) -> None:
        if len(passes) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture(tiny(), SOME, FINAL, tmp_path, report=kill)
    assert len(shards(tmp_path)) == 2
    demand_direct(tiny(), capture(tiny(), SOME, FINAL, tmp_path), SOME)
    assert len(passes) == 3


def test_other_inputs_are_filed_elsewhere(tiny: Callable[..., HFTarget], tmp_path: Path) -> None:
    """Everything that features depend on is in the name of their folder."""
    flipped = Sample(SOME[0].ids, [True] * len(SOME[0].ids))
    base: dict[str, Any] = {"target": tiny(), "samples": SOME, "taps": FINAL}
    changes: list[dict[str, Any]] = [
        {"target": tiny(seed=1)},
        {"target": tiny_target(dtype=torch.bfloat16)},
        {"samples": SOME[:-1]},
        {"samples": SOME[::-1]},
        {"samples": [flipped, *SOME[1:]]},
        {"taps": EVERYTHING},
        {"taps": Taps(final=True, layers=(2, 0))},
        {"window": Window(before=3)},
        {"stored": "bf16"},
    ]
    for number, change in enumerate([{}, *changes], start=1):
        capture(cache=tmp_path, **base | change)
        assert len(list(tmp_path.iterdir())) == number
    capture(cache=tmp_path, **base)
    assert len(list(tmp_path.iterdir())) == number


def test_a_target_is_known_by_all_of_its_weights() -> None:
    """Buffers of no dimension (Gemma's embedding scale) included."""
    assert fingerprint(tiny_target("gemma3")) == fingerprint(tiny_target("gemma3"))
    assert fingerprint(tiny_target("gemma3")) != fingerprint(tiny_target("gemma3", seed=1))
    changed = tiny_target("gemma3")
    changed.model.get_input_embeddings().embed_scale += 1
    assert fingerprint(changed) != fingerprint(tiny_target("gemma3"))


# --- what is refused ---------------------------------------------------------------------------------------


def test_a_folder_of_other_work_is_refused(tiny: Callable[..., HFTarget], tmp_path: Path) -> None:
    capture(tiny(), SOME, FINAL, tmp_path)
    (mine,) = tmp_path.iterdir()
    capture(tiny(), SOME[:4], FINAL, tmp_path)
    (other,) = (p for p in tmp_path.iterdir() if p != mine)
    shutil.rmtree(mine)
    other.rename(mine)
    with pytest.raises(BadInput, match=r"(?s)features made with other settings.*texts: was '.*', now '"):
        capture(tiny(), SOME, FINAL, tmp_path)


def test_a_text_without_supervision_is_refused(tiny: Callable[..., HFTarget], tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="without a supervised token"):
        capture(tiny(), [*SOME, Sample([1, 2], [False, False])], FINAL, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_and_what_was_done_stays(
    tiny: Callable[..., HFTarget], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real = Path.write_bytes

    def full(self: Path, data: bytes) -> int:
        if "shard-00001" in self.name:
            real(self, data[:100])
            raise OSError(code, os.strerror(code))
        return real(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(BadInput, match=r"The disk is full: .*shard-00001.*make room"):
            capture(tiny(), SOME, FINAL, tmp_path)
    assert [p.name for p in tmp_path.glob("*/*") if p.name != "capture.json"] == ["shard-00000.safetensors"]
    passes = run_over(monkeypatch, tiny())
    demand_direct(tiny(), capture(tiny(), SOME, FINAL, tmp_path), SOME)
    assert len(passes) == 2


# --- the cost beforehand -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", ["fp32", "bf16"])
@pytest.mark.parametrize("taps", [FINAL, EVERYTHING])
@pytest.mark.parametrize("before", [None, 4])
def test_the_cost_is_what_it_costs(
    tiny: Callable[..., HFTarget], tmp_path: Path, before: int | None, taps: Taps, stored: str
) -> None:
    many, window = samples(60, seed=2), Window(before=before)
    price = cost(tiny(), many, taps, window, stored, 48)
    texts = capture(tiny(), many, taps, tmp_path, window=window, stored=stored)
    assert price.tokens == sum(len(s.ids) for s in many)
    assert price.kept == sum(texts.lengths)
    assert (price.kept < price.tokens) == (before is not None)
    size = sum(path.stat().st_size for path in shards(tmp_path))
    assert price.bytes == pytest.approx(size, rel=0.05)


@pytest.mark.usefixtures("small")
def test_progress_is_reported_as_it_is_made(
    tiny: Callable[..., HFTarget], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[tuple[str, float | None]] = []
    capture(tiny(), SOME, FINAL, tmp_path, report=lambda *line: lines.append(line))
    total = sum(len(s.ids) for s in SOME)
    assert [f"of {total} tokens" in line for line, _ in lines] == [True] * 3
    shares = [share for _, share in lines if share is not None]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    lines.clear()
    saves = spied(monkeypatch, module, "write_tensors")
    capture(tiny(), SOME, FINAL, tmp_path, report=lambda *line: lines.append(line))
    assert lines == saves == []  # nothing had to be done
