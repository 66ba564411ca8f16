"""Overlap of texts by runs of words: near-duplicates flatter a held-out figure, diversity decides the real one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"  # kana and Chinese characters: each counts as a word
WORD = re.compile(f"[{UNSPACED}]|[^\\W{UNSPACED}]+")
RUN = 8  # words; two texts that share so many in a row are counted as near-duplicates


def grams(text: str, run: int = RUN) -> set[tuple[str, ...]]:
    """All runs of `run` words, lower-cased; a shorter text is one run, so that it still has a duplicate."""
    words = WORD.findall(text.lower())
    if not words:
        return set()
    return {tuple(words[i : i + run]) for i in range(max(1, len(words) - run + 1))}


class Seen:
    """The runs of every text let in so far."""

    def __init__(self, texts: Iterable[str] = (), run: int = RUN) -> None:
        self.run = run
        self._grams: set[tuple[str, ...]] = set()
        for text in texts:
            self.add(text)

    def overlaps(self, text: str) -> bool:
        """Does the text share a run with one let in before?"""
        return not self._grams.isdisjoint(grams(text, self.run))

    def add(self, text: str) -> None:
        """Let a text in."""
        self._grams |= grams(text, self.run)


class Diversity(NamedTuple):
    """`distinct`: share of runs that are new. `near_duplicates`: share of texts that share one with an earlier text."""

    texts: int
    runs: int
    distinct: float
    near_duplicates: float


def diversity(texts: Iterable[str], run: int = RUN) -> Diversity:
    """How much of a collection repeats itself."""
    seen = Seen(run=run)
    count = total = duplicates = 0
    for text in texts:
        count += 1
        total += len(grams(text, run))
        duplicates += seen.overlaps(text)
        seen.add(text)
    return Diversity(count, total, len(seen._grams) / max(total, 1), duplicates / max(count, 1))
