"""Prompts that ship with the package, written for it: 12 categories, for demos, tests and benches."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import NamedTuple


class PackagedPrompt(NamedTuple):
    """A chat to be answered; `messages` ends with a user turn."""

    id: str
    category: str
    messages: list[dict[str, str]]


def packaged(*categories: str) -> list[PackagedPrompt]:
    """All packaged prompts, or those of the given categories, in file order."""
    text = files("headstart").joinpath("data/prompts.jsonl").read_text(encoding="utf-8")
    rows = [PackagedPrompt(**json.loads(line)) for line in text.splitlines()]
    return [row for row in rows if not categories or row.category in categories]
