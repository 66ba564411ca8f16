"""Prompts that ship with the package, written for it: 12 categories, for demos, tests, benches and training.

The held-out ones are what demos and figures use: they are never distilled.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import NamedTuple


class PackagedPrompt(NamedTuple):
    """A chat to be answered; `messages` ends with a user turn."""

    id: str
    category: str
    messages: list[dict[str, str]]
    held_out: bool = False


def packaged(*categories: str, held_out: bool = True) -> list[PackagedPrompt]:
    """The held-out prompts, or with `held_out=False` those to train on, in file order; of these categories or all."""
    text = files("headstart").joinpath("data/prompts.jsonl").read_text(encoding="utf-8")
    rows = [PackagedPrompt(**json.loads(line)) for line in text.split("\n") if line]  # not splitlines(): U+2028
    return [row for row in rows if row.held_out is held_out and (not categories or row.category in categories)]
