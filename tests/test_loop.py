"""The trainer: same weights however a step is cut and however often the run is interrupted; the best head is kept."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from headstart.core import Features, Readout
from headstart.errors import BadInput, TrainingStopped
from headstart.heads.base import Head
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.objectives.base import CrossEntropy, Predicted, Wanted, decay
from headstart.objectives.divergence import cross_entropy
from headstart.train import loop
from headstart.train.capture import Text
from headstart.train.loop import Measured, Training, train
from headstart.train.state import BEST, METRICS, STATE, Progress, progress_of
from headstart.unroll import SelfFed
from headstart.vocab.base import DraftVocab
from headstart.vocab.full import Full
from headstart.vocab.trimmed import Trimmed
from helpers import spied
from test_unroll import Toy

D, V, HEADS = 16, 24, 3


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


READ_VD = noise(V, D, seed=1)


class Corpus:
    """Captured texts in memory; remembers which were read."""

    def __init__(self, texts: Sequence[Text]) -> None:
        self.texts = list(texts)
        self.lengths = [len(t.token_T) for t in texts]
        self.supervised = [int(t.supervised_T.sum()) for t in texts]
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Text:
        self.read.append(index)
        return self.texts[index]


def text(supervised: str, seed: int, width: int = D, vocab: int = V) -> Text:
    """ "1" is supervised; the next token depends on the feature, so there is something to learn."""
    n = len(supervised)
    token_T = torch.randint(0, vocab, (n,), generator=torch.Generator().manual_seed(seed))
    follows_ND = noise(vocab, width, seed=7)[token_T.roll(-1)]
    mask_T = torch.tensor([c == "1" for c in supervised], dtype=torch.bool)
    return Text(token_T, mask_T, Features(follows_ND + 0.5 * noise(n, width, seed=seed), ()))


def corpus(count: int = 12, first: int = 0) -> Corpus:
    """Texts of 5 to 18 tokens, the first three of which are the prompt."""
    return Corpus([text("000" + "1" * (2 + (5 * i) % 14), seed=first + i) for i in range(count)])


def medusa() -> Medusa:
    return Medusa(MedusaConfig(heads=HEADS, layers=2), D, V)


def read(depth: int) -> Readout:
    return Readout(lambda h: h.float() @ READ_VD.T, V)


def scored(*scores: float) -> Callable[[Head], Measured]:
    """An evaluation that gives these scores one after the other, then the last one."""
    left = list(scores)
    return lambda head: Measured(left.pop(0) if len(left) > 1 else left[0], [0.5, 0.25, 0.125])


def training(**settings: Any) -> Training:
    return Training(**{"tokens": 600, "step_tokens": 50, "weights": (1.0, 0.8, 0.6), "evaluate_every": 150} | settings)


def at_once(texts: Corpus, **settings: Any) -> Training:
    """Every text once, in one step."""
    return training(tokens=sum(texts.supervised), step_tokens=10**6, **settings)


def run(out: Path, how: Training, texts: Any = None, head: Any = None, **options: Any) -> tuple[Any, Progress]:
    head = head or medusa().train()
    fixed: dict[str, Any] = {"readout": read, "vocab": Full(V), "evaluate": scored(1.0)}
    return head, train(head, texts or corpus(), how, out, **fixed | options)


def weights(head: Head) -> dict[str, Tensor]:
    return {k: v.detach().clone() for k, v in head.state_dict().items()}


def stored(path: Path) -> dict[str, Tensor]:
    with safe_open(path, "pt") as file:
        return {k: file.get_tensor(k).clone() for k in file.keys()}  # noqa: SIM118


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / METRICS).read_text().splitlines()]


def demand_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for key in one:
        assert torch.equal(one[key], other[key]), key


def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of micro-batches, one entry a step."""
    sizes: list[int] = []
    micro = loop._micro

    def call(*args: Any) -> Any:
        batches = list(micro(*args))
        sizes.append(len(batches))
        return batches

    monkeypatch.setattr(loop, "_micro", call)
    return sizes


# --- a step is its texts, however they are cut -------------------------------------------------------------


def test_the_weights_do_not_depend_on_the_micro_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = watched(monkeypatch)
    ends, cuts = [], []
    for tokens in (1, 20, 64, 10_000):
        head, at = run(tmp_path / str(tokens), training(micro_tokens=tokens, learning_rate=1e-3))
        assert at.step >= 10
        ends.append(weights(head))
        cuts.append(sum(sizes))
        sizes.clear()
    assert cuts == sorted(set(cuts), reverse=True)
    assert cuts[-1] == at.step
    for other in ends[1:]:
        for key in other:
            torch.testing.assert_close(other[key], ends[0][key], atol=1e-6, rtol=0)


def test_a_micro_batch_holds_as_many_positions_as_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = spied(monkeypatch, loop, "_batch")
    texts = corpus()
    run(tmp_path, training(micro_tokens=40), texts)
    for _, members, _ in calls:
        longest = max(texts.lengths[i] for i in members)
        assert longest * len(members) <= 40
    assert any(len(members) > 1 for _, members, _ in calls)


@pytest.mark.parametrize("micro", [30, 10_000])
def test_the_first_loss_is_the_mean_by_depth(tmp_path: Path, micro: int) -> None:
    """A fresh head says what its read-out says of the feature itself, so the loss can be had by plain loops."""
    texts, own = corpus(6), {depth: noise(V, D, seed=10 + depth) for depth in (1, 2, 3)}
    readouts = {depth: Readout(lambda h, rows_VD=rows_VD: h @ rows_VD.T, V) for depth, rows_VD in own.items()}
    run(tmp_path, at_once(texts, micro_tokens=micro), texts, readout=readouts.__getitem__)
    want = []
    for depth in (1, 2, 3):
        losses = []
        for token_T, supervised_T, (final, _) in texts.texts:
            assert final is not None
            for at in range(depth + 1, len(token_T)):
                if supervised_T[at]:
                    law_V = torch.log_softmax(own[depth] @ final[at - 1 - depth], 0)
                    losses.append(-float(law_V[token_T[at]]))
        want.append(sum(losses) / len(losses))
    assert rows(tmp_path)[0]["loss"] == pytest.approx(want, rel=1e-4)


def test_the_loss_falls(tmp_path: Path) -> None:
    run(tmp_path, training(tokens=3000, learning_rate=1e-2))
    losses = [row["loss"] for row in rows(tmp_path) if "loss" in row]
    assert losses[-1][0] < 0.7 * losses[0][0]


# --- every head learns, each from its own shift (S01) ------------------------------------------------------


def test_one_step_changes_every_head(tmp_path: Path) -> None:
    before = weights(medusa())
    head, at = run(tmp_path, training(tokens=1))
    assert at.step == 1
    for key, weight in head.state_dict().items():
        moved = (weight != before[key]).flatten(1).any(1)
        assert moved.tolist() == [True] * HEADS, key


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_with_one_weight_only_its_head_moves_and_by_its_own_labels(tmp_path: Path, depth: int) -> None:
    """Adam's first step is the gradient's sign; the gradient is taken here from the formula, text by text."""
    texts = corpus(5)
    head, _ = run(tmp_path, at_once(texts, weights=tuple(float(d == depth) for d in (1, 2, 3))), texts)
    fresh = medusa()
    losses = []
    for token_T, supervised_T, (final, _) in texts.texts:
        assert final is not None
        for at in range(depth + 1, len(token_T)):
            if supervised_T[at]:
                z_D = final[at - 1 - depth]
                for weight_KDD, bias_KD in zip(fresh.weights, fresh.biases, strict=True):
                    z_D = z_D + torch.nn.functional.silu(weight_KDD[depth - 1] @ z_D + bias_KD[depth - 1])
                losses.append(cross_entropy((READ_VD @ z_D)[None], token_T[at : at + 1]))
    torch.cat(losses).mean().backward()
    for (key, moved), plain in zip(head.named_parameters(), fresh.parameters(), strict=True):
        assert plain.grad is not None
        rate = rows(tmp_path)[0]["rate"]
        large = plain.grad.abs() > 1e-4
        torch.testing.assert_close(moved[large], -rate * plain.grad[large].sign(), atol=rate * 1e-2, rtol=0)
        assert large[depth - 1].any(), key
        assert (moved != 0).flatten(1).any(1).tolist() == [k + 1 == depth for k in range(HEADS)], key


# --- what counts -------------------------------------------------------------------------------------------


def test_supervised_tokens_are_counted_exactly(tmp_path: Path) -> None:
    texts, seen = corpus(), []
    _, at = run(tmp_path, training(evaluate_every=1), texts, report=lambda *_: seen.append(len(texts.read)))
    tokens = [row["held_out"]["tokens"] for row in rows(tmp_path) if "held_out" in row]
    assert len(tokens) == len(seen) == at.step
    for step, end in enumerate(seen):
        counts = [texts.supervised[i] for i in texts.read[(seen[step - 1] if step else 0) : end]]
        before = tokens[step - 1] if step else 0
        asked = min(50, 600 - before)
        assert tokens[step] - before == sum(counts)
        assert sum(counts) - max(counts) < asked <= sum(counts)
    assert at.tokens == tokens[-1] >= 600


def test_tokens_that_no_row_can_guess_are_not_counted(tmp_path: Path) -> None:
    """The first token has no anchor before it, and the second is the root of the only one."""
    _, at = run(tmp_path, training(tokens=1, step_tokens=7), Corpus([text("1111111", 1)]))
    assert at.tokens == 5


@pytest.mark.parametrize("step_tokens", [1, 50])
def test_every_text_once_an_epoch_in_a_new_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_tokens: int
) -> None:
    """Also where a step reaches into the next epoch."""
    calls = spied(monkeypatch, loop, "_micro")
    orders: dict[int, list[int]] = {}
    for number, seed in enumerate((0, 0, 1)):
        texts = corpus()
        how = training(seed=seed, step_tokens=step_tokens, tokens=4 * sum(texts.supervised) - 1)
        _, at = run(tmp_path / str(number), how, texts)
        order = [index for _, chosen, _ in calls for index in chosen]
        calls.clear()
        epochs = [order[i : i + 12] for i in range(0, 48, 12)]
        assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
        assert len(set(map(tuple, epochs))) == 4
        assert (at.epoch, at.position) == (4, 0)
        assert order == orders.setdefault(seed, order)
    assert orders[0] != orders[1]


def test_a_step_without_supervision_changes_nothing(tmp_path: Path) -> None:
    """0/0 elsewhere; here neither weights nor moments nor, with weight decay, anything else moves (B23)."""
    texts = Corpus([text("01", 1), text("1", 2), text("11", 3), text("000111", 4), text("000011", 5)])
    head, steps = medusa(), []

    def note(line: str, share: float) -> None:
        steps.append((round(25 * share), weights(head)))

    _, at = run(tmp_path, training(tokens=25, step_tokens=1, weight_decay=0.1), texts, head, report=note)
    still = 0
    last = (0, weights(medusa()))
    for tokens, now in steps:
        same = all(torch.equal(now[key], last[1][key]) for key in now)
        assert same == (tokens == last[0])
        still += same
        last = (tokens, now)
    assert still == at.skipped >= 3
    assert at.step == len(steps)


@pytest.mark.parametrize("texts", [[text("01", 1), text("1", 2)], [text("000111", 1)]])
def test_nothing_to_learn_is_said(tmp_path: Path, texts: list[Text]) -> None:
    """Else it would go round and round."""
    rounds = []

    def stop(*_: Any) -> None:
        rounds.append(1)
        assert len(rounds) < 20

    unsaid = [i for i in range(V) if i not in texts[0].token_T.tolist()]
    with pytest.raises(BadInput, match="No text has a token to learn from"):
        run(tmp_path, training(step_tokens=1), Corpus(texts), vocab=Trimmed(unsaid, V), report=stop)


@pytest.mark.parametrize("texts", [[], [text("0000", 1), text("0", 2)]])
def test_nothing_supervised_is_said(tmp_path: Path, texts: list[Text]) -> None:
    with pytest.raises(BadInput, match=f"{len(texts)} texts, and no supervised token"):
        train(medusa(), Corpus(texts), training(), tmp_path, readout=read, vocab=Full(V), evaluate=scored(1.0))
    assert not list(tmp_path.iterdir())


def test_labels_that_cannot_be_drafted_are_counted_and_not_learned(tmp_path: Path) -> None:
    vocab: DraftVocab = Trimmed([i for i in range(V - 1, -1, -1) if i % 4], V)
    rows_UD = READ_VD[vocab.ids_U]
    options: dict[str, Any] = {
        "readout": lambda depth: Readout(lambda h: h @ rows_UD.T, vocab.size, vocab.ids_U),
        "vocab": vocab,
    }
    texts = corpus()
    how = training(step_tokens=150, weights=(1.0,))
    with pytest.raises(TrainingStopped):
        run(tmp_path / "one", how, texts, until=0, **options)
    known = [t.token_T % 4 != 0 for t in texts.texts]
    per_text = [int((t.supervised_T & ~k).sum()) for t, k in zip(texts.texts, known, strict=True)]
    index_V = {int(token): u for u, token in enumerate(vocab.ids_U)}
    losses = []
    for i in texts.read:
        token_T, supervised_T, (final, _) = texts.texts[i]
        assert final is not None
        for t in range(2, len(token_T)):
            if supervised_T[t] and int(token_T[t]) in index_V:
                losses.append(-float(torch.log_softmax(rows_UD @ final[t - 2], 0)[index_V[int(token_T[t])]]))
    assert rows(tmp_path / "one")[0]["loss"] == pytest.approx([sum(losses) / len(losses)], rel=1e-4)
    at = progress_of(tmp_path / "one")
    assert at.unknown == sum(per_text[i] for i in texts.read) > 10
    assert at.tokens == sum(texts.supervised[i] - per_text[i] for i in texts.read)
    # the same with those labels unmarked, and their number of texts a step
    marked = Corpus([Text(t.token_T, t.supervised_T & k, t.features) for t, k in zip(texts.texts, known, strict=True)])
    marked.supervised = texts.supervised
    with pytest.raises(TrainingStopped):
        run(tmp_path / "two", how, marked, until=0, **options)
    one, other = stored(tmp_path / "one" / STATE), stored(tmp_path / "two" / STATE)
    demand_equal(one, other)
    assert progress_of(tmp_path / "two").unknown == 0


def test_autocast_is_finite_and_near(tmp_path: Path) -> None:
    """With a depth that has no rows in some micro-batches."""
    texts = Corpus([*corpus(6).texts, text("001", 9), text("0011", 10)])
    plain, cast = (
        run(tmp_path / str(on), training(autocast=on, micro_tokens=3, learning_rate=1e-3), texts)[0]
        for on in (False, True)
    )
    for key, weight in weights(cast).items():
        assert torch.isfinite(weight).all()
        assert weight.dtype == torch.float32
        torch.testing.assert_close(weight, weights(plain)[key], atol=5e-3, rtol=0)
    assert any(not torch.equal(a, b) for a, b in zip(weights(cast).values(), weights(plain).values(), strict=True))


def test_the_gradient_is_clipped_to_its_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norms: list[float] = []
    step = torch.optim.AdamW.step

    def call(self: Any, *args: Any) -> Any:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norms.append(float(torch.stack([g.norm() for g in grads]).norm()))
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", call)
    run(tmp_path / "a", training(clip=1e9, micro_tokens=20))
    free = list(norms)
    norms.clear()
    run(tmp_path / "b", training(clip=0.01, micro_tokens=20))
    assert min(free) > 0.1
    assert norms == pytest.approx([0.01] * len(norms), rel=1e-3)


def test_a_recurrent_head_trains_too(tmp_path: Path) -> None:
    """Its depths are unrolled, its objective is the one given, and all of it moves."""
    texts = Corpus([text("000" + "1" * 6, i, 48, 96) for i in range(8)])
    head, seen = Toy(alone=False), []

    class Noted(CrossEntropy):
        def __call__(self, said: Sequence[Predicted], true: Sequence[Wanted]) -> list[Tensor]:
            seen.append([s.depth for s in said])
            return super().__call__(said, true)

    before = weights(head)
    read_VD = noise(96, 48, seed=1)
    run(
        tmp_path, training(tokens=200), texts, head, vocab=Full(96), unrolling=SelfFed(steps=2), objective=Noted(),
        readout=lambda depth: Readout(lambda h: h @ read_VD.T, 96),
    )  # fmt: skip
    assert {tuple(depths) for depths in seen} == {(1, 2)}
    for key, weight in weights(head).items():
        assert not torch.equal(weight, before[key])


# --- the rate ----------------------------------------------------------------------------------------------


def test_the_rate_by_hand() -> None:
    how = training(learning_rate=2.0, warmup=0.1, final_rate=0.25)
    assert how.rate(0.0) == 0.0
    assert how.rate(0.05) == pytest.approx(1.0)
    assert how.rate(0.1) == pytest.approx(2.0)
    assert how.rate(0.55) == pytest.approx(0.25 * 2 + 0.75 * 2 / 2)
    assert how.rate(0.325) == pytest.approx(0.5 + 1.5 * (1 + math.cos(math.pi / 4)) / 2)
    assert how.rate(1.0) == how.rate(1.3) == pytest.approx(0.5)
    falling = [how.rate(0.1 + 0.01 * i) for i in range(91)]
    assert falling == sorted(falling, reverse=True)
    assert training(learning_rate=2.0, warmup=0.0).rate(0.0) == 2.0


def test_every_step_takes_the_rate_of_its_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    step = torch.optim.AdamW.step

    def call(self: Any, *args: Any) -> Any:
        rates.append(self.param_groups[0]["lr"])
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", call)
    how = training(warmup=0.2, evaluate_every=1)
    run(tmp_path, how)
    ends = [0, *(row["held_out"]["tokens"] for row in rows(tmp_path) if "held_out" in row)]
    middles = [(a + b) / 2 for a, b in pairwise(ends)]
    assert rates == pytest.approx([how.rate(m / how.tokens) for m in middles])
    assert rates[0] > 0
    logged = {row["step"]: row["rate"] for row in rows(tmp_path) if "rate" in row}
    assert logged == {step: pytest.approx(rates[step - 1]) for step in (1, 11, len(rates))}


# --- interrupted and resumed (S02) -------------------------------------------------------------------------

LONG = training(tokens=1200, micro_tokens=40)
SCORES = [1.0, 1.5, 1.2, 1.7, 1.1, 1.4, 1.3, 1.6]


def judged(head: Head) -> Measured:
    """A score of its weights alone, so that a resumed run gives the same; it rises and falls."""
    total = float(sum(w.double().abs().sum() for w in head.state_dict().values()))
    return Measured(1 + math.sin(40 * total) ** 2, [total, 0.0, 0.0])


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Head, Progress]:
    out = tmp_path_factory.mktemp("straight")
    head, at = run(out, LONG, evaluate=judged)
    assert at.step >= 20
    assert at.epoch >= 8
    assert len(at.history) >= 5
    assert 1 < [row["tokens"] for row in at.history].index(at.best_tokens) + 1 < len(at.history)
    return out, head, at


def demand_same_run(out: Path, head: Head, at: Progress, other: tuple[Path, Head, Progress]) -> None:
    assert at == other[2] == progress_of(out)
    demand_equal(weights(head), weights(other[1]))
    for name in (STATE, BEST):
        demand_equal(stored(out / name), stored(other[0] / name))
    assert (out / METRICS).read_text() == (other[0] / METRICS).read_text()


def test_the_state_holds_weights_and_moments(straight: tuple[Path, Head, Progress]) -> None:
    tensors = stored(straight[0] / STATE)
    for index, (key, weight) in enumerate(medusa().named_parameters()):
        assert tensors[f"head.{key}"].shape == weight.shape
        for moment in ("exp_avg", "exp_avg_sq"):
            assert tensors[f"optimiser.{index}.{moment}"].abs().sum() > 0
        assert int(tensors[f"optimiser.{index}.step"]) == straight[2].step


def test_stopped_after_every_step_it_ends_the_same(tmp_path: Path, straight: tuple[Path, Head, Progress]) -> None:
    stops = 0
    while True:
        try:
            head, at = run(tmp_path, LONG, evaluate=judged, until=0)
            break
        except TrainingStopped as stopped:
            stops += 1
            assert f"of {LONG.tokens} tokens" in str(stopped)
            assert progress_of(tmp_path).step == stops
    assert stops == straight[2].step - 1
    demand_same_run(tmp_path, head, at, straight)


@pytest.mark.parametrize("step", [1, 5, 11])
def test_ctrl_c_ends_the_step_and_is_resumed(tmp_path: Path, straight: tuple[Path, Head, Progress], step: int) -> None:
    assert threading.current_thread() is threading.main_thread()
    before, calls = signal.getsignal(signal.SIGINT), []

    def interrupt(*_: Any) -> None:
        calls.append(1)
        if len(calls) == step:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(TrainingStopped, match="the same command goes on"):
        run(tmp_path, LONG, evaluate=judged, report=interrupt)
    assert progress_of(tmp_path).step == step
    assert signal.getsignal(signal.SIGINT) is before
    head, at = run(tmp_path, LONG, evaluate=judged)
    demand_same_run(tmp_path, head, at, straight)


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path, straight: tuple[Path, Head, Progress]) -> None:
    before = signal.getsignal(signal.SIGINT)

    def twice(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, LONG, evaluate=judged, report=twice)
    assert signal.getsignal(signal.SIGINT) is before
    head, at = run(tmp_path, LONG, evaluate=judged)
    demand_same_run(tmp_path, head, at, straight)


def test_outside_the_main_thread_signals_are_left_alone(tmp_path: Path, straight: tuple[Path, Head, Progress]) -> None:
    ended: list[Any] = []
    thread = threading.Thread(target=lambda: ended.append(run(tmp_path, LONG, evaluate=judged)))
    thread.start()
    thread.join()
    demand_same_run(tmp_path, *ended[0], straight)


@pytest.mark.parametrize("torn", ["", '{"step": 9, "to', '{"step": 9, "held_out": {"tokens": 3}'])
@pytest.mark.parametrize(("saved", "killed"), [(3, 14), (10, 12), (0, 12)])
def test_a_kill_between_saves_repeats_what_was_lost(
    tmp_path: Path, straight: tuple[Path, Head, Progress], saved: int, killed: int, torn: str
) -> None:
    """Rows logged after the state was saved, and half a row, are not there twice."""

    def kill(at: int, error: BaseException) -> Callable[..., None]:
        calls: list[int] = []

        def call(*_: Any) -> None:
            calls.append(1)
            if len(calls) == at:
                raise error

        return call

    for _ in range(saved):
        with pytest.raises(TrainingStopped):
            run(tmp_path, LONG, evaluate=judged, until=0)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, LONG, evaluate=judged, report=kill(killed - saved, KeyboardInterrupt()))
    assert (tmp_path / STATE).exists() == bool(saved)
    assert rows(tmp_path)[-1]["step"] > saved
    with (tmp_path / METRICS).open("a") as file:
        file.write(torn)
    head, at = run(tmp_path, LONG, evaluate=judged)
    demand_same_run(tmp_path, head, at, straight)


@pytest.mark.parametrize("name", [STATE, BEST])
def test_a_kill_while_saving_leaves_the_state_before(
    tmp_path: Path, straight: tuple[Path, Head, Progress], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with pytest.raises(TrainingStopped):
        run(tmp_path, LONG, evaluate=judged, until=0)
    before = stored(tmp_path / STATE)

    real = Path.write_bytes

    def half(self: Path, data: bytes) -> int:
        if name in self.name:
            real(self, data[: len(data) // 2])
            raise KeyboardInterrupt
        return real(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", half)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, LONG, evaluate=judged, save_every=0 if name == STATE else 1e9)
    demand_equal(stored(tmp_path / STATE), before)
    head, at = run(tmp_path, LONG, evaluate=judged)
    demand_same_run(tmp_path, head, at, straight)


def test_a_finished_run_is_only_opened(tmp_path: Path) -> None:
    head, at = run(tmp_path, LONG, evaluate=judged)
    texts, again = corpus(), medusa()
    _, same = run(tmp_path, LONG, texts, again, evaluate=judged)
    assert same == at
    assert not texts.read
    demand_equal(weights(again), weights(head))


@pytest.mark.parametrize(("every", "saves"), [(0.0, 50), (25.0, 17), (1e9, 1)])
def test_it_saves_now_and_then_and_stops_on_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: float, saves: int
) -> None:
    """A clock that goes on 10 s with every look: one look a step, one more after a save, one more for `until`."""
    now = 0.0

    def monotonic() -> float:
        nonlocal now
        now += 10
        return now

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=monotonic, perf_counter=time.perf_counter))
    calls = spied(monkeypatch, loop, "save")
    how, texts = training(tokens=100, step_tokens=1), Corpus([text("0011", i) for i in range(2)])
    _, at = run(tmp_path / "a", how, texts, save_every=every)
    assert (at.step, len(calls)) == (50, saves)
    with pytest.raises(TrainingStopped):
        run(tmp_path / "b", how, texts, save_every=1e9, until=100)
    assert progress_of(tmp_path / "b").step == 6


def test_no_state_no_progress(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds no training state"):
        progress_of(tmp_path)


def test_another_config_is_refused_and_the_difference_shown(tmp_path: Path) -> None:
    with pytest.raises(TrainingStopped):
        run(tmp_path, LONG, until=0, record={"data": "abc", "head": {"heads": 3, "layers": 2}})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    changes: list[tuple[Training, dict[str, Any], str]] = [
        (training(tokens=1200, micro_tokens=40, seed=5), {}, "training.seed: was 0, now 5"),
        (training(tokens=1200, micro_tokens=41), {}, "training.micro_tokens: was 40, now 41"),
        (LONG, {"data": "xyz"}, "data: was 'abc', now 'xyz'"),
        (LONG, {"head": {"heads": 3, "layers": 1}}, "head.layers: was 2, now 1"),
        (LONG, {"start": "f00"}, "start: was None, now 'f00'"),
    ]
    for how, change, words in changes:
        record = {"data": "abc", "head": {"heads": 3, "layers": 2}} | change
        with pytest.raises(BadInput) as refused:
            run(tmp_path, how, record=record)
        lines = str(refused.value).splitlines()
        assert "a run made with other settings" in lines[0]
        assert lines[1:-1] == [f"  {words}"]
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# --- not finite (B23) --------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("where", ["feature", "loss", "gradient"])
def test_what_is_not_finite_is_said_and_its_batch_kept(tmp_path: Path, where: str, saved: bool) -> None:
    """One text, not read by the first step, brings a NaN: in its features, in the loss alone or the gradient alone."""
    texts, how = corpus(), training(micro_tokens=1)  # each text is a batch of its own
    with pytest.raises(TrainingStopped):
        run(tmp_path, how, texts, until=0)
    state, before = tmp_path / STATE, stored(tmp_path / STATE)
    bad = next(i for i in range(len(texts)) if i not in texts.read)
    token_T, supervised_T, (final, _) = texts.texts[bad]
    assert final is not None

    class Poison(CrossEntropy):
        def __call__(self, said: Sequence[Predicted], true: Sequence[Wanted]) -> list[Tensor]:
            losses = super().__call__(said, true)
            if torch.equal(true[0].label_S, token_T[supervised_T]):
                # nothing that depends on the head, or a 0 whose derivative is infinite
                losses[0] = losses[0] + (torch.nan if where == "loss" else (0 * said[0].feature_SF.sum()).sqrt())
            return losses

    if where == "feature":
        final[supervised_T.int().argmax()] = torch.nan
    if not saved:
        state.unlink()
    head = medusa()
    with pytest.raises(BadInput, match="not finite at step") as refused:
        run(tmp_path, how, texts, head, objective=None if where == "feature" else Poison())
    kept = stored(tmp_path / "bad-batch.safetensors")
    assert str(tmp_path / "bad-batch.safetensors") in str(refused.value)
    assert kept["token"].tolist() == [token_T.tolist()]
    assert kept["supervised"].bool().tolist() == [supervised_T.tolist()]
    assert torch.equal(kept["final"].nan_to_num(9), final[None].nan_to_num(9))
    assert all(torch.isfinite(w).all() for w in head.parameters())
    if saved:
        assert f"last good state in {state}" in str(refused.value)
        demand_equal(stored(state), before)
    else:
        assert "no state was saved yet" in str(refused.value)
        assert not state.exists()


def test_the_batch_kept_has_the_layers(tmp_path: Path) -> None:
    """A head that reads layers: those are where to look."""

    class Layered(Toy):
        needs = SimpleNamespace(final=False, layers=(2, 5))  # type: ignore[assignment]

        def absorb(self, cache: Any, new: Any) -> Any:
            return super().absorb(cache, new._replace(features=Features(sum(new.features.layers), ())))

    one = text("000111", 1, 48, 96)
    final = one.features.final
    assert final is not None
    layers = (final * 2, final * torch.nan)
    texts, head = Corpus([one._replace(features=Features(None, layers))]), Layered(alone=True)
    readout = Readout(lambda h: h @ noise(96, 48, seed=1).T, 96)
    with pytest.raises(BadInput, match="not finite"):
        run(tmp_path, training(), texts, head, vocab=Full(96), unrolling=SelfFed(steps=1), readout=lambda _: readout)
    kept = stored(tmp_path / "bad-batch.safetensors")
    assert torch.equal(kept["layer.2"][0], layers[0])
    assert kept["layer.5"].isnan().all()


# --- the best head -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "best"),
    [([1.0, 3.0, 2.0, 2.5], 1), ([1.0, 2.0, 2.0, 1.0], 1), ([0.0, 0.0], 0), ([1.0, 2.0, 3.0, 4.0], 3)],
)
def test_the_best_head_is_left_not_the_last(tmp_path: Path, scores: list[float], best: int) -> None:
    seen: list[dict[str, Tensor]] = []
    score = scored(*scores)

    def evaluate(head: Head) -> Measured:
        assert not head.training
        seen.append(weights(head))
        return score(head)

    how = training(tokens=100 * len(scores), step_tokens=50, evaluate_every=100)
    head, at = run(tmp_path, how, evaluate=evaluate)
    assert len(seen) >= len(scores)
    demand_equal(weights(head), seen[best])
    demand_equal(stored(tmp_path / BEST), seen[best])
    last = {k.removeprefix("head."): v for k, v in stored(tmp_path / STATE).items() if k.startswith("head.")}
    demand_equal(last, seen[-1])
    assert at.best == max(scores)
    assert at.best_tokens == at.history[best]["tokens"]
    assert head.training
    held = [row["held_out"] for row in rows(tmp_path) if "held_out" in row]
    assert held == at.history
    assert [row["by_depth"] for row in held] == [[0.5, 0.25, 0.125]] * len(seen)


def test_it_is_measured_every_so_many_tokens_and_at_the_end(tmp_path: Path) -> None:
    _, at = run(tmp_path, training(tokens=500, step_tokens=10, evaluate_every=120))
    tokens = [row["tokens"] for row in at.history]
    assert len(tokens) in (4, 5)
    assert tokens[-1] == at.tokens
    for before, after in zip([0, *tokens], tokens[:-1], strict=False):
        assert 120 <= after - before < 120 + 10 + 16


# --- settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        *({"tokens": 0}, {"step_tokens": 0}, {"micro_tokens": -1}, {"evaluate_every": 0}),
        *({"weights": ()}, {"learning_rate": 0.0}, {"warmup": 1.0}, {"warmup": -0.1}),
    ],
    ids=str,
)
def test_settings_that_cannot_train_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=next(iter(settings))):
        training(**settings)


def test_progress_is_one_line(tmp_path: Path) -> None:
    lines: list[tuple[str, float]] = []
    _, at = run(tmp_path, training(), report=lambda *line: lines.append(line))
    assert len(lines) == at.step
    assert all("\n" not in line and line.startswith("loss ") and "tokens/s" in line for line, _ in lines)
    assert "1.00 tokens per step (0.50 0.25 0.12 by depth)" in lines[-1][0]
    assert [share for _, share in lines] == sorted(share for _, share in lines)
    assert lines[-1][1] >= 1.0


def test_weights_of_the_paper() -> None:
    assert Training(tokens=1).weights == tuple(decay(5, 0.8))
