"""From files of strangers to chats: every row is validated, and a bad one is named with its line.

A row is a JSON object whose fields say what it is:

    messages        OpenAI: `role` (system, user, assistant) and `content`, a string or a list of text parts
    conversations   ShareGPT: `from` (human, gpt, ...) and `value`
    turns           Spec-Bench: what the user says, turn by turn, without answers
    instruction     with optional `input`, or `instances` of which the first counts (self-instruct), and an answer
    prompt          one user message, and an answer
    question        one user message, with optional `answer`

An answer is the optional `output` or `response`; an optional field that is null or blank counts as absent. If a row
has several of these fields, the first in this list counts. Other fields are ignored.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from headstart.errors import BadInput
from headstart.prompts import packaged

Message = dict[str, str]
OnBad = Literal["refuse", "skip"]
SHAREGPT = {"human": "user", "user": "user", "system": "system"} | dict.fromkeys(
    ("gpt", "assistant", "chatgpt", "bing", "bard"), "assistant"
)
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".txt", ".md")
IDS = ("id", "question_id", "task_id", "conversation_id")
SHOWN = 5  # bad rows that a refusal lists


class Chat(NamedTuple):
    """One row: `messages` with role and content, or a document without roles in `text`. `category` may be empty."""

    id: str
    messages: list[Message]
    category: str
    text: str | None = None


class Skipped(NamedTuple):
    """A bad row that was left out: its line in the file (in a `.json` file its row), counted from 1, and why."""

    line: int
    reason: str


class Reading(NamedTuple):
    """What a file holds: good rows in file order, and the bad ones that were left out."""

    chats: list[Chat]
    skipped: list[Skipped]


def read(path: str | os.PathLike[str], *, on_bad: OnBad = "refuse") -> Reading:
    """All chats of a `.jsonl`, `.jsonl.gz` or `.json` file (a list of rows); a `.txt` or `.md` file is one text.

    Raises BadInput for a file that cannot be read, for one without a single good row, and, unless `on_bad` is
    "skip", for bad rows, of which it lists the first five.
    """
    if on_bad not in get_args(OnBad):
        raise BadInput(f"on_bad={on_bad!r}: expected one of {', '.join(get_args(OnBad))}.")
    path = Path(path)
    suffix = next((s for s in SUFFIXES if path.name.lower().endswith(s)), None)
    if suffix is None:
        raise BadInput(f"{path}: its name ends in none of {', '.join(SUFFIXES)}, which tell the format; rename it.")
    if suffix in (".txt", ".md"):
        return Reading([_document(path)], [])
    whole = suffix == ".json"
    reading = _sifted(_rows(path) if whole else _json_lines(path), "row" if whole else "line", path, on_bad)
    if not reading.chats:
        raise BadInput(f"{path} holds no chat{_listed(reading.skipped, 'row' if whole else 'line')}")
    return reading


def packaged_chats(*, held_out: bool = True) -> list[Chat]:
    """The prompts that ship with the package, as if read from a file."""
    return [Chat(p.id, p.messages, p.category) for p in packaged(held_out=held_out)]


def opening(chat: Chat) -> list[Message]:
    """The system messages and the first user turn: what a single answer is asked for."""
    system, turns = user_turns(chat)
    return [*system, *({"role": "user", "content": text} for text in turns[:1])]


def evenly(chats: Sequence[Chat], count: int) -> list[Chat]:
    """So many of them at most, from all over."""
    return list(chats[:: max(1, len(chats) // count)][:count])


def user_turns(chat: Chat) -> tuple[list[Message], list[str]]:
    """The leading system message, if any, and what the user says in order: all that a distiller replays.

    Raises BadInput for a text, which has no turns.
    """
    if chat.text is not None:
        raise BadInput(f"{chat.id} is a text without roles, so there is no user turn to replay; give a file of chats.")
    system = chat.messages[:1] if chat.messages[0]["role"] == "system" else []
    return system, [m["content"] for m in chat.messages if m["role"] == "user"]


def _sifted(rows: Iterator[tuple[int, Any]], unit: str, path: Path, on_bad: OnBad) -> Reading:
    """Good rows and bad ones; a row that is an exception could not even be parsed."""
    reading = Reading([], [])
    for number, row in rows:
        try:
            reading.chats.append(_chat(row, f"{unit} {number}"))
        except ValueError as error:
            reading.skipped.append(Skipped(number, _reason(error)))
            if on_bad == "refuse" and len(reading.skipped) == SHOWN:
                break
    if reading.skipped and on_bad == "refuse":
        raise BadInput(
            f"{path} has rows that cannot be read as chats{_listed(reading.skipped, unit)}\n"
            'Mend them, or leave such rows out with on_bad="skip" (--skip-bad).'
        )
    return reading


def _listed(bad: list[Skipped], unit: str) -> str:
    if not bad:
        return "; it is empty. Give at least one row."
    first = f" (the first {SHOWN})" if len(bad) >= SHOWN else ""
    return f"{first}:\n" + "\n".join(f"  {unit} {b.line}: {b.reason}" for b in bad[:SHOWN])


def _reason(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])[1:]
    said = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return f"{where} is missing"
    return f"{where}: {said}" + ("" if first["type"] == "value_error" else f"; saw {_short(first['input'])}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# Files


def _bytes(path: Path) -> Iterator[bytes]:
    """The lines of a file, unpacked, without a byte order mark."""
    if path.is_dir():
        raise BadInput(f"{path} is a directory; give one of the files in it.")
    if not path.exists():
        raise BadInput(f"{path} does not exist; give a file of chats.")
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file):
                yield line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{path} cannot be read to its end: {error}. Is it damaged?") from error


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(_bytes(path), start=1):
        try:
            yield number, line.decode()
        except UnicodeDecodeError as error:
            raise BadInput(f"{path}, line {number}: not UTF-8 ({error}). Convert the file to UTF-8.") from error


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in _lines(path):
        if line.strip():
            yield number, _parsed(line)


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    text = "".join(line for _, line in _lines(path))
    rows = _parsed(text) if text.strip() else []
    if not isinstance(rows, list):
        saw = str(rows) if isinstance(rows, ValueError) else f"it holds {_short(rows)}"
        raise BadInput(f"{path} is not a JSON list of rows: {saw}. One row per line is a file named .jsonl.")
    yield from enumerate(rows, start=1)


def _document(path: Path) -> Chat:
    text = "".join(line for _, line in _lines(path))
    if not text.strip():
        raise BadInput(f"{path} is empty; give a text.")
    return Chat(path.name, [], "", text)


def _parsed(text: str) -> Any:
    """The value, or the error as a value: the caller knows whether one bad row is the end."""
    try:
        return from_json(text)
    except ValueError as error:
        return ValueError(f"malformed JSON: {error}")


# Rows


def _chat(row: Any, place: str) -> Chat:
    if isinstance(row, ValueError):
        raise row
    if not isinstance(row, dict):
        raise ValueError(f"a row is a JSON object; saw {_short(row)}")
    form = next((form for field, form in FORMS.items() if row.get(field) is not None), None)
    if form is None:
        raise ValueError(f"no field that says what the row is ({', '.join(FORMS)}); saw {_short(list(row))}")
    messages = form.model_validate(row).messages_of()
    _demand_order(messages, form.free)
    names = (row.get(key) for key in IDS)
    name = next((n for n in names if isinstance(n, str | int) and not isinstance(n, bool) and n != ""), place)
    category = row.get("category")
    return Chat(str(name), messages, category if isinstance(category, str) else "")


def _demand_order(messages: list[Message], free: bool) -> None:
    """System, if any, comes first; then user and assistant take turns, the user first (unless the form is free)."""
    roles = [m["role"] for m in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if not turns:
        raise ValueError("no user message")
    for at, role in enumerate(turns):
        expected = "user" if at % 2 == 0 or free else "assistant"
        if role != expected:
            number = at + 1 + len(roles) - len(turns)
            raise ValueError(f"message {number} is by the {role}; expected the {expected} (roles must alternate)")


def _joined(value: object) -> object:
    """The text of OpenAI's content parts; anything else is left to the ordinary validation."""
    if not isinstance(value, list):
        return value
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"only content parts of type text can be read; saw {_short(part)}")
    return "".join(part["text"] for part in value)


def _filled(value: str) -> str:
    if not value.strip():
        raise ValueError("it is empty; expected at least one character")
    return value


def _role(value: object) -> object:
    if isinstance(value, str) and value not in SHAREGPT:
        raise ValueError(f"unknown role {value!r}; expected one of {', '.join(SHAREGPT)}")
    return value


def _blank_is_none(value: object) -> object:
    return None if isinstance(value, str) and not value.strip() else value


Filled = Annotated[str, AfterValidator(_filled)]
Content = Annotated[str, BeforeValidator(_joined), AfterValidator(_filled)]
Maybe = Annotated[str | None, BeforeValidator(_blank_is_none)]


class _Model(BaseModel):
    """Bytes from outside: no coercion, unknown fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


class _Said(_Model):
    role: Literal["system", "user", "assistant"]
    content: Content


class _ShareSaid(_Model):
    role: Annotated[str, AfterValidator(_role)] = Field(alias="from")
    content: Filled = Field(alias="value")


class _Instance(_Model):
    input: Maybe = None
    output: Maybe = None


class _Row(_Model):
    free: ClassVar[bool] = False  # whether user messages may follow each other

    def messages_of(self) -> list[Message]:
        raise NotImplementedError


class _OpenAI(_Row):
    messages: list[_Said]

    def messages_of(self) -> list[Message]:
        return [{"role": m.role, "content": m.content} for m in self.messages]


class _ShareGPT(_Row):
    conversations: list[_ShareSaid]

    def messages_of(self) -> list[Message]:
        return [{"role": SHAREGPT[m.role], "content": m.content} for m in self.conversations]


class _SpecBench(_Row):
    free: ClassVar[bool] = True
    turns: list[Filled]

    def messages_of(self) -> list[Message]:
        return [{"role": "user", "content": turn} for turn in self.turns]


class _Instruction(_Row):
    instruction: Filled
    input: Maybe = None
    output: Maybe = None
    response: Maybe = None
    instances: list[_Instance] = []

    def messages_of(self) -> list[Message]:
        first = self.instances[0] if self.instances else _Instance()
        asked = [self.instruction, self.input or first.input]
        return _asked("\n\n".join(part for part in asked if part), self.output or self.response or first.output)


class _Prompt(_Row):
    prompt: Filled
    output: Maybe = None
    response: Maybe = None

    def messages_of(self) -> list[Message]:
        return _asked(self.prompt, self.output or self.response)


class _Question(_Row):
    question: Filled
    answer: Maybe = None

    def messages_of(self) -> list[Message]:
        return _asked(self.question, self.answer)


FORMS: dict[str, type[_Row]] = {
    "messages": _OpenAI,
    "conversations": _ShareGPT,
    "turns": _SpecBench,
    "instruction": _Instruction,
    "prompt": _Prompt,
    "question": _Question,
}


def _asked(question: str, answer: str | None) -> list[Message]:
    said = [{"role": "user", "content": question}]
    return [*said, {"role": "assistant", "content": answer}] if answer else said
