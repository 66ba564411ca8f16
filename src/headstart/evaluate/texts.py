"""The target's own greedy answers to prompts, kept in the cache: what drafters are replayed along, and what a second
turn goes on from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from headstart.core import Features, Report, Taps
from headstart.errors import BadInput
from headstart.learn import of_row, stored_as
from headstart.replay import Spoken
from headstart.targets.base import Target
from headstart.train.answers import read_answers
from headstart.train.capture import Window, capture
from headstart.train.distil import Given, distil
from headstart.train.fingerprint import fingerprint, of_text
from headstart.train.readers import Chat
from headstart.train.rollout import How
from headstart.train.template import Sample

ROWS = 64  # answered side by side
LOOP = 8  # tokens of a run whose repetition counts as a loop


class Turn(NamedTuple):
    """One answered turn: which, its prompt as ids, and the answer with the features a drafter asked for."""

    chat: str
    turn: int
    category: str
    prompt: list[int]
    text: Spoken


def answered(
    target: Target,
    chats: Sequence[Chat],
    cache: Path,
    *,
    max_new_tokens: int,
    needs: Taps,
    window: Window,
    report: Report | None = None,
) -> list[Turn]:
    """Every turn's greedy answer, not cut where it loops; later turns see the target's own earlier answers. Answers of
    one token, which no drafter can shorten, are left out. Raises BadInput if none is left."""
    how = How(rows=ROWS, max_new_tokens=max_new_tokens, cut_loops=False)
    source = Given(chats, unit=64, name="evaluation", held_out=True)
    folder = cache / "answers" / of_text([fingerprint(target), sorted(source.config().items()), max_new_tokens])
    distil(target, source, folder, how, report=report)
    rows = [row for row in read_answers(folder, drop_duplicates=False) if len(row.response_ids) > 1]
    if not rows:
        raise BadInput("None of the prompts was answered with more than one token; there is nothing to measure.")
    texts = spoken(target, [of_row(row) for row in rows], cache, needs=needs, window=window, report=report)
    return [Turn(row.id, row.turn, row.category, row.prompt_ids, text) for row, text in zip(rows, texts, strict=True)]


def spoken(
    target: Target,
    samples: Sequence[Sample],
    cache: Path,
    *,
    needs: Taps,
    window: Window,
    report: Report | None = None,
) -> list[Spoken]:
    """Texts that end with their one answer, in their order, with features from the window's start on."""
    prompts = [sample.supervised.index(True) for sample in samples]
    if needs == Taps():
        return [Spoken(s.ids, prompt, Features(None, ())) for s, prompt in zip(samples, prompts, strict=True)]
    stored = stored_as(target, "auto")
    texts = capture(target, samples, needs, cache / "features", window=window, stored=stored, report=report)
    out = dict[int, Spoken]()
    for place, number in enumerate(texts.order):
        sample = samples[number]
        start = window.start(sample.supervised)
        out[number] = Spoken(sample.ids, prompts[number], texts[place].features, start)
    return [out[number] for number in range(len(samples))]


def looping(text: Spoken) -> list[bool]:
    """For each token of the answer: does it end a run of 8 that stood in the answer before?"""
    ids = text.ids[text.prompt :]
    seen: set[tuple[int, ...]] = set()
    out = []
    for i in range(len(ids)):
        run = tuple(ids[max(0, i + 1 - LOOP) : i + 1])
        out.append(len(run) == LOOP and run in seen)
        seen.add(run)
    return out
