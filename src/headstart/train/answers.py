"""Directories of answers: what `distil` writes and training reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from headstart.errors import BadInput
from headstart.train.files import read_jsonl
from headstart.train.grams import Diversity, Seen, diversity
from headstart.train.readers import Message

TOO_LONG = "too long"  # a row without an answer: its prompt leaves no room for one
INVENTED = "self"  # source of prompts that the target made up


class Row(NamedTuple):
    """One answered turn. `messages` ends with the user's, or with the text that a base model goes on from; ids are what
    the target saw and said. `ended` as in `Answer`, or TOO_LONG: then nothing was said, and later turns are missing."""

    id: str
    turn: int
    source: str
    category: str
    messages: list[Message]
    prompt_ids: list[int]
    response_ids: list[int]
    ended: str


class Summary(NamedTuple):
    """What a directory of answers holds; prompts that were too long to be answered count in `ended` only."""

    answers: int
    tokens: int
    prompt_tokens: int
    ended: dict[str, int]
    sources: dict[str, int]
    categories: dict[str, int]
    prompts: Diversity


def read_rows(path: Path) -> list[Row]:
    """Raises BadInput for a damaged file."""
    try:
        return [Row(**row) for row in read_jsonl(path)]
    except TypeError as error:
        raise BadInput(f"{path} does not hold answers: {error}. Run the command that made it again.") from error


def read_answers(*folders: Path, drop_duplicates: bool = True) -> list[Row]:
    """All answers in these directories, in the order of their units. An invented prompt that is a near-duplicate of an
    earlier one, from another part or directory, is left out; given prompts are what they are (`summary` counts theirs).
    Raises BadInput where there are no answers."""
    rows: list[Row] = []
    seen = Seen()
    for folder in folders:
        paths = sorted(folder.glob("part-*.jsonl"))
        if not paths:
            raise BadInput(f"{folder} holds no answers (part-*.jsonl); make some with `headstart distill`.")
        for path in paths:
            left_out = set()
            for row in read_rows(path):
                text = user_text(row.messages)
                talk = (row.id, user_text(row.messages[:2]))  # the first turn, perhaps behind a system message
                if drop_duplicates and row.source == INVENTED and row.turn == 0 and seen.overlaps(text):
                    left_out.add(talk)
                if talk not in left_out:
                    seen.add(text)
                    rows.append(row)
    return rows


def summary(rows: Sequence[Row]) -> Summary:
    """Counts and diversity of answers."""
    answered = [row for row in rows if row.response_ids]
    return Summary(
        answers=len(answered),
        tokens=sum(len(row.response_ids) for row in answered),
        prompt_tokens=sum(len(row.prompt_ids) for row in answered),
        ended=dict(Counter(row.ended for row in rows)),
        sources=dict(Counter(row.source for row in answered)),
        categories=dict(Counter(row.category or "free" for row in answered)),
        prompts=diversity(user_text(row.messages) for row in answered if row.turn == 0),
    )


def user_text(messages: Sequence[Message]) -> str:
    """What the user said, turn by turn: the text that overlaps are looked for in."""
    return "\n".join(m["content"] for m in messages if m["role"] == "user")
