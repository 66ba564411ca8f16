"""SIGKILL at 20 random moments of distillation, capture and training: the weights at the end are those of a run that
nobody disturbed, and so is every file of answers and features."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.heldout import HeldOut
from headstart.learn import of_row
from headstart.testing import tiny_target
from headstart.train import capture as capturing
from headstart.train.answers import read_answers
from headstart.train.capture import Window, capture
from headstart.train.distil import Given, distil
from headstart.train.loop import Training, train
from headstart.train.readers import Chat
from headstart.train.rollout import How
from headstart.train.state import BEST, STATE
from headstart.vocab.full import Full

KILLS = 20
STAGES = ("distil", "capture", "train")
TEMPLATE = "{% for m in messages %}{{ m['content'] }}.{% endfor %}"
TRAINING = Training(
    tokens=6000, step_tokens=200, micro_tokens=300, weights=(0.8, 0.64), evaluate_every=2000, learning_rate=1e-2
)


def work(out: Path) -> None:
    """All three stages; whatever is there already is not made again."""
    torch.set_num_threads(1)
    capturing.SHARD = 2
    target = tiny_target()
    target.tokenizer.chat_template = TEMPLATE
    rng = random.Random(7)
    words = ["".join(rng.choices("abcdefghijklmnop", k=4)) for _ in range(40)]
    chats = [Chat(str(i), [{"role": "user", "content": "".join(rng.choices(words, k=3))}], "") for i in range(48)]
    distil(target, Given(chats, unit=4), out / "answers", How(max_new_tokens=24))
    rows = read_answers(out / "answers", drop_duplicates=False)
    samples = [of_row(row) for row in rows]
    head = Medusa(MedusaConfig(heads=2), target.width, target.vocabulary.size)
    texts, held = (
        capture(target, part, head.needs, out / "features", window=Window(before=3))
        for part in (samples[4:], samples[:4])
    )
    measured = HeldOut(target, head, Full(target.vocabulary.size), held, depths=2, nodes=6)
    train(
        head, texts, TRAINING, out / "run",
        readout=measured.readout, vocab=measured.vocab, evaluate=measured.measure, save_every=0.0,
    )  # fmt: skip


def digests(out: Path) -> dict[str, str]:
    """Content of everything that later work reads."""
    files = [*out.glob("answers/part-*.jsonl"), *out.glob("features/*/shard-*"), out / "run" / BEST]
    return {str(f.relative_to(out)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def stage(out: Path) -> int:
    if (out / "run" / STATE).exists():
        return STAGES.index("train")
    return STAGES.index("capture" if any(out.glob("features/*/capture.json")) else "distil")


def killed_in(wanted: int, out: Path, delay: float) -> int | None:
    """Start the work, kill it some time after it has reached a stage; the stage it was in, None if it ended first."""
    child = multiprocessing.get_context("fork").Process(target=work, args=(out,))
    child.start()
    while stage(out) < wanted and child.exitcode is None:
        child.join(0.002)
    child.join(delay)
    if child.exitcode is not None:
        assert child.exitcode == 0
        return None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    return stage(out)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_twenty_kills_change_nothing(tmp_path: Path) -> None:
    start = time.perf_counter()
    work(tmp_path / "undisturbed")
    whole = time.perf_counter() - start
    expected = digests(tmp_path / "undisturbed")
    assert len(expected) > 12

    rng = random.Random(3)
    killed: Counter[str] = Counter()
    runs = [tmp_path / "0"]
    tries = 0
    while killed.total() < KILLS:
        wanted = tries % len(STAGES)
        tries += 1
        if stage(runs[-1]) > wanted:
            runs.append(tmp_path / str(len(runs)))
        found = killed_in(wanted, runs[-1], rng.uniform(0, 0.05) * whole)
        if found is None:
            runs.append(tmp_path / str(len(runs)))
        else:
            killed[STAGES[found]] += 1
    assert min(killed[name] for name in STAGES) >= 3, killed

    for out in runs:
        if out.exists():
            work(out)
            assert digests(out) == expected
            assert not list(out.rglob(".*")), "no half-written file is left by a run that ended"
