"""The trainer of every head: one function, from captured texts to a checkpoint chosen by tokens per step.

Its state on disk is one file, replaced whole: a run can be killed at any moment and ends with the same weights.
"""

from __future__ import annotations

import math
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headstart.core import Features, Readout, Report
from headstart.errors import BadInput, TrainingStopped
from headstart.heads.base import Head
from headstart.objectives.base import CrossEntropy, Objective, Predicted, Wanted, decay, reduce
from headstart.train.capture import Texts, neighbours
from headstart.train.files import same_or_refuse, write_tensors
from headstart.train.state import BEST, STATE, Progress, fill, log, resume, save
from headstart.unroll import Batch, Independent, Said, Unroll, supervised_counts, unroll
from headstart.vocab.base import DraftVocab


@dataclass(frozen=True, kw_only=True)
class Training:
    """How to train. `tokens` supervised tokens in all (texts are repeated, newly shuffled, if there are fewer);
    `step_tokens` of them per optimiser step; `micro_tokens` positions at most side by side. `weights` per depth."""

    tokens: int
    step_tokens: int = 2048
    micro_tokens: int = 4096
    learning_rate: float = 2e-3
    warmup: float = 0.05
    final_rate: float = 0.02
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 1.0
    weights: tuple[float, ...] = tuple(decay(5, 0.8))
    autocast: bool = False
    evaluate_every: int = 200_000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "step_tokens", "micro_tokens", "evaluate_every"):
            if getattr(self, name) < 1:
                raise BadInput(f"Training({name}={getattr(self, name)}): expected at least 1.")
        if not self.weights or self.learning_rate <= 0 or not 0 <= self.warmup < 1:
            raise BadInput(f"{self}: expected depth weights, a learning rate above 0 and a warm-up share below 1.")

    def rate(self, done: float) -> float:
        """Learning rate after a share `done` of the tokens: linear warm-up, then half a cosine down to a floor."""
        if done < self.warmup:
            return self.learning_rate * done / self.warmup
        fall = 0.5 * (1 + math.cos(math.pi * (min(done, 1.0) - self.warmup) / (1 - self.warmup)))
        return self.learning_rate * (self.final_rate + (1 - self.final_rate) * fall)


class Measured(NamedTuple):
    """What an evaluation says of a head: the figure that picks the checkpoint, and what to print beside it."""

    tokens_per_step: float
    by_depth: list[float]


Evaluate = Callable[[Head], Measured]


def train(
    head: Head,
    texts: Texts,
    how: Training,
    out: Path,
    *,
    readout: Callable[[int], Readout],
    vocab: DraftVocab,
    evaluate: Evaluate,
    unrolling: Unroll | None = None,
    objective: Objective | None = None,
    record: dict[str, Any] | None = None,
    report: Report | None = None,
    save_every: float = 30.0,
    until: float | None = None,
) -> Progress:
    """Train `head` in place and leave the best weights, by held-out tokens per step, in it and in `out`.

    `record` is what the run depends on beside `how` (data, target, head); resuming with another is refused.
    `until` stops after so many seconds as if by Ctrl-C, with the state saved. Raises TrainingStopped then, BadInput
    for a loss that is not finite (the batch is saved), for an `out` of another run, and if there is nothing to learn.
    """
    if not any(texts.supervised):
        raise BadInput(f"{len(texts)} texts, and no supervised token in them: there is nothing to train on.")
    unrolling, objective = unrolling or Independent(), objective or CrossEntropy()
    same_or_refuse(out / "run.json", {"training": asdict(how), **(record or {})}, "a run")
    optimiser = torch.optim.AdamW(head.parameters(), how.learning_rate, how.betas, weight_decay=how.weight_decay)
    at = resume(head, optimiser, out) or Progress()
    job = _Job(head, texts, how, out, readout, vocab, unrolling, objective)
    clock = _Clock(at, how, report)
    saved = time.monotonic()
    began = saved
    with _gently() as asked_to_stop:
        while at.tokens < how.tokens:
            losses = _step(job, optimiser, at)
            if at.step % 10 == 1 or at.tokens >= how.tokens:
                log(out, at, {"loss": losses, "rate": optimiser.param_groups[0]["lr"]})
            if at.tokens - at.evaluated >= how.evaluate_every or at.tokens >= how.tokens:
                _evaluate(job, at, evaluate)
            clock.show(losses)
            late = until is not None and time.monotonic() - began > until
            if asked_to_stop() or late or time.monotonic() - saved > save_every or at.tokens >= how.tokens:
                save(head, optimiser, at, out)
                saved = time.monotonic()
            if (asked_to_stop() or late) and at.tokens < how.tokens:
                raise TrainingStopped(f"Stopped at {at.tokens} of {how.tokens} tokens; the same command goes on.")
    fill(head, out / BEST)
    return at


class _Job(NamedTuple):
    head: Head
    texts: Texts
    how: Training
    out: Path
    readout: Callable[[int], Readout]
    vocab: DraftVocab
    unrolling: Unroll
    objective: Objective


def _step(job: _Job, optimiser: torch.optim.Optimizer, at: Progress) -> list[float]:
    """One optimiser step; the mean loss by depth, in nats."""
    how, depths = job.how, len(job.how.weights)
    batches = list(_micro(job, _choose(job, at), at))
    counts = [sum(c) for c in zip(*(supervised_counts(b.supervised_BT, depths) for b in batches), strict=True)]
    for group in optimiser.param_groups:  # the rate in the middle of the step: at its start the first one had none
        group["lr"] = how.rate((at.tokens + max(counts) / 2) / how.tokens)
    optimiser.zero_grad(set_to_none=True)
    sums = [0.0] * depths
    for batch in batches:
        device = next(job.head.parameters()).device.type
        with torch.autocast(device, torch.bfloat16, enabled=how.autocast):
            said = unroll(job.head, job.unrolling, batch, depths)
        if not said:
            at.skipped += 1
            continue
        losses = job.objective(*_paired(said, job))
        loss = reduce(losses, how.weights[: len(losses)], counts[: len(losses)])
        if not bool(torch.isfinite(loss)):
            raise _not_finite(job, batch, at)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.get_total_norm([p.grad for p in job.head.parameters() if p.grad is not None])
        if not bool(torch.isfinite(norm)):
            raise _not_finite(job, batch, at)
        for i, part in enumerate(losses):
            sums[i] += float(part.detach().sum())
    if any(counts):
        nn.utils.clip_grads_with_norm_(job.head.parameters(), how.clip, norm)
        optimiser.step()
    at.step += 1
    at.tokens += max(counts)
    if at.epoch and not at.tokens:
        raise BadInput("No text has a token to learn from: all are too short, or no label is in the draft vocabulary.")
    return [s / max(n, 1) for s, n in zip(sums, counts, strict=True)]


def _paired(said: Sequence[Said], job: _Job) -> tuple[list[Predicted], list[Wanted]]:
    predicted = [Predicted(s.depth, s.feature_SF, job.readout(s.depth)) for s in said]
    return predicted, [Wanted(job.vocab.labels(s.label_S)[0]) for s in said]


def _choose(job: _Job, at: Progress) -> list[int]:
    """The texts of the next step: in the epoch's order until they hold enough supervised tokens."""
    chosen: list[int] = []
    tokens = 0
    order = _order(job, at.epoch)
    while tokens < min(job.how.step_tokens, job.how.tokens - at.tokens):
        index = order[at.position]
        chosen.append(index)
        tokens += job.texts.supervised[index]
        at.position += 1
        if at.position == len(order):
            at.epoch, at.position = at.epoch + 1, 0
            order = _order(job, at.epoch)
    return chosen


def _order(job: _Job, epoch: int) -> list[int]:
    order = list(range(len(job.texts)))
    random.Random(f"{job.how.seed}/{epoch}").shuffle(order)
    return order


def _micro(job: _Job, chosen: Sequence[int], at: Progress) -> Iterator[Batch]:
    """The step's texts as padded batches of neighbours in length."""
    chosen = sorted(chosen, key=lambda i: (job.texts.lengths[i], i))
    for run in neighbours([job.texts.lengths[i] for i in chosen], job.how.micro_tokens):
        yield _batch(job, [chosen[i] for i in run], at)


def _batch(job: _Job, members: Sequence[int], at: Progress) -> Batch:
    """Right-padded; tokens that cannot be drafted are not supervised, and counted."""
    device = next(job.head.parameters()).device
    texts = [job.texts[i] for i in members]

    def padded(parts: Sequence[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(list(parts), batch_first=True).to(device)

    token_BT = padded([t.token_T for t in texts])
    supervised_BT = padded([t.supervised_T for t in texts])
    _, known_S = job.vocab.labels(token_BT.flatten())
    at.unknown += int((supervised_BT & ~known_S.view_as(token_BT)).sum())
    final = None if texts[0].features.final is None else padded([t.features.final for t in texts])  # type: ignore[misc]
    layers = tuple(padded(parts) for parts in zip(*(t.features.layers for t in texts), strict=True))
    return Batch(
        token_BT, supervised_BT & known_S.view_as(token_BT), Features(final, layers), [len(t.token_T) for t in texts]
    )


def _evaluate(job: _Job, at: Progress, evaluate: Evaluate) -> None:
    """Measure; the best weights so far are a file of their own, written before the state that knows of it."""
    job.head.eval()
    measured = evaluate(job.head)
    job.head.train()
    at.evaluated = at.tokens
    row = {"tokens": at.tokens, "tokens_per_step": measured.tokens_per_step, "by_depth": measured.by_depth}
    at.history.append(row)
    log(job.out, at, {"held_out": row})
    if measured.tokens_per_step > at.best:
        at.best, at.best_tokens = measured.tokens_per_step, at.tokens
        write_tensors(job.out / BEST, job.head.state_dict())


def _not_finite(job: _Job, batch: Batch, at: Progress) -> BadInput:
    path, state = job.out / "bad-batch.safetensors", job.out / STATE
    tensors = {"token": batch.token_BT, "supervised": batch.supervised_BT.to(torch.uint8)}
    if batch.features.final is not None:
        tensors["final"] = batch.features.final
    tensors |= {f"layer.{n}": x for n, x in zip(job.head.needs.layers, batch.features.layers, strict=True)}
    write_tensors(path, tensors)
    return BadInput(
        f"The loss or its gradient is not finite at step {at.step} ({at.tokens} tokens). The batch is in {path}, "
        f"{f'the last good state in {state}' if state.exists() else 'no state was saved yet'}. Look for NaN in the "
        "batch's features; if there is none, start anew with a lower learning rate."
    )


@contextmanager
def _gently() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is noted and obeyed between two steps; a second one interrupts at once."""
    asked = threading.Event()

    def note(signum: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)


class _Clock:
    """One line of progress."""

    def __init__(self, at: Progress, how: Training, report: Report | None) -> None:
        self.at, self.how, self.report = at, how, report
        self.first, self.start = at.tokens, time.perf_counter()

    def show(self, losses: Sequence[float]) -> None:
        if self.report is None:
            return
        rate = (self.at.tokens - self.first) / (time.perf_counter() - self.start)
        left = (self.how.tokens - self.at.tokens) / max(rate, 1e-9)
        best = "" if self.at.best < 0 else f", {self.at.best:.2f} tokens per step"
        if self.at.history:
            best += f" ({' '.join(f'{x:.2f}' for x in self.at.history[-1]['by_depth'])} by depth)"
        self.report(
            f"loss {' '.join(f'{x:.2f}' for x in losses)}{best}, {rate:.0f} tokens/s, {left / 60:.0f} min left",
            self.at.tokens / self.how.tokens,
        )
