"""The target answers prompts, given or invented: its own greedy text is what a draft head has to guess.

The work is cut into units of some conversations; each is one file, written whole, so a run can be killed at any moment
and goes on where it was. Units do not depend on each other's answers: `part=(k, n)` lets n processes or machines share
a directory.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from headstart.core import Report
from headstart.errors import BadInput
from headstart.prompts import packaged
from headstart.targets.base import Target
from headstart.train.answers import INVENTED, TOO_LONG, Row, read_rows, user_text
from headstart.train.files import same_or_refuse, write_jsonl
from headstart.train.fingerprint import fingerprint
from headstart.train.grams import Seen
from headstart.train.readers import Chat, Message, user_turns
from headstart.train.rollout import Answer, How, rollout
from headstart.train.selfprompt import Invented, Inventing, invent, keep
from headstart.train.template import prompt_ids

FORMAT = 1
BARREN = 20  # units in a row without one usable prompt, after which nothing more is expected


@dataclass
class Talk:
    """A conversation to be answered turn by turn. `ids` is a prompt in tokens, for models without chat turns."""

    id: str
    category: str
    system: list[Message]
    turns: list[str]
    ids: list[int] = field(default_factory=list)


class Source(Protocol):
    """Where prompts come from. `talks` is None once there are no more; `wanted` conversations are still to be made."""

    name: str

    def config(self) -> dict[str, Any]:
        """What shapes it, for the record that a resumed run is compared with."""
        ...

    def talks(self, target: Target, unit: int, seen: Seen, wanted: int) -> list[Talk] | None:
        """The conversations of a unit; None: no more."""
        ...

    def total(self, part: tuple[int, int]) -> int:
        """Conversations that this part will answer in all."""
        ...


class Given:
    """Prompts from files, sorted by length, so that those of a unit are alike. Packaged held-out prompts, and what
    shares a run of words with one, are left out unless `held_out` says that these answers are for measuring."""

    def __init__(self, chats: Sequence[Chat], unit: int, name: str = "given", *, held_out: bool = False) -> None:
        self.name, self.unit = name, _at_least_one(unit, "unit")
        kept_back = Seen() if held_out else Seen(user_text(p.messages) for p in packaged())
        talks = [Talk(chat.id, chat.category, *user_turns(chat)) for chat in chats if chat.text is None]
        self.kept = [t for t in talks if t.turns and not kept_back.overlaps("\n".join(t.turns))]
        self.dropped = len(chats) - len(self.kept)
        self.kept.sort(key=lambda t: sum(map(len, t.turns)))
        if not self.kept:
            raise BadInput("None of the prompts can be answered: they hold no user turn, or are held-out prompts.")

    def config(self) -> dict[str, Any]:
        """Prompts by digest."""
        digest = hashlib.sha256(repr([(t.id, t.system, t.turns) for t in self.kept]).encode()).hexdigest()[:16]
        return {"prompts": digest, "count": len(self.kept), "unit": self.unit}

    def talks(self, target: Target, unit: int, seen: Seen, wanted: int) -> list[Talk] | None:
        """The next slice."""
        return self.kept[unit * self.unit : (unit + 1) * self.unit] or None

    def total(self, part: tuple[int, int]) -> int:
        """An equal share."""
        return math.ceil(len(self.kept) / part[1])


class SelfPrompts:
    """Prompts that the target invents: `count` of them in all parts together, each part its share, or up to a batch
    more."""

    name = INVENTED

    def __init__(self, count: int, how: Inventing, unit: int) -> None:
        self.count, self.how, self.unit = _at_least_one(count, "count"), how, _at_least_one(unit, "unit")
        self.dropped: Counter[str] = Counter()
        self._barren = 0

    def config(self) -> dict[str, Any]:
        """All but the count: a run may be told to go on for longer."""
        return {"unit": self.unit, "inventing": asdict(self.how)}

    def talks(self, target: Target, unit: int, seen: Seen, wanted: int) -> list[Talk] | None:
        """Invented, filtered, and unlike anything accepted before in this part. Raises BadInput if none come."""
        size = min(self.unit, max(wanted, self.how.rows))  # a batch costs little more than a few of its rows
        kept, dropped = keep(invent(target, self.how, size, unit), self.how, seen)
        self.dropped += dropped
        self._barren = 0 if kept else self._barren + 1
        if self._barren == BARREN:
            raise BadInput(
                f"{BARREN} units of {self.unit} invented prompts held none worth answering; dropped so far: "
                f"{dict(self.dropped)}. Give prompts, other categories or another seed; what was answered is safe."
            )
        return [_talk(prompt, unit, i) for i, prompt in enumerate(kept)]

    def total(self, part: tuple[int, int]) -> int:
        """An equal share."""
        return math.ceil(self.count / part[1])


def _at_least_one(value: int, name: str) -> int:
    if value < 1:
        raise BadInput(f"{name}={value}: expected at least 1.")
    return value


def _talk(prompt: Invented, unit: int, number: int) -> Talk:
    return Talk(f"self-{unit}-{number}", prompt.category, [], [prompt.text], prompt.ids)


def distil(
    target: Target,
    source: Source,
    out: Path,
    how: How,
    *,
    part: tuple[int, int] = (0, 1),
    report: Report | None = None,
) -> None:
    """Answer all prompts of this part into `out`; units that are there already are not answered again.

    Raises BadInput if `out` holds answers of another target or other settings, with the differences, or if not even
    the first unit leaves room for answers.
    """
    made_by = {"format": FORMAT, "target": fingerprint(target), "stops": list(target.eos)}
    record = {**made_by, "source": source.name, **source.config(), **asdict(how)}
    same_or_refuse(out / "distil.json", record, "answers")
    seen = Seen(user_text(p.messages) for p in packaged())
    clock = _Clock(source.total(part), report)
    unit = part[0]
    while clock.done < clock.total:
        path = out / f"part-{unit:05d}.jsonl"
        rows = _finished(path)
        if rows:
            for row in rows:
                seen.add(user_text(row.messages))
            clock.skip(_talks(rows))
        else:
            talks = source.talks(target, unit, seen, clock.total - clock.done)
            if talks is None:
                break
            rows = _answers(target, talks, source.name, how, clock)
            if unit == 0 and rows and not any(row.response_ids for row in rows):
                closest = target.can.max_positions - min(len(row.prompt_ids) for row in rows)
                raise BadInput(f"No prompt leaves room for {how.max_new_tokens} tokens; the closest leaves {closest}.")
            write_jsonl(path, (row._asdict() for row in rows))
            clock.finish(len(talks))
        unit += part[1]


def _finished(path: Path) -> list[Row]:
    """What a unit holds already: nothing if it is not there or was damaged since; then it is made (again)."""
    try:
        return read_rows(path) if path.exists() else []
    except BadInput:
        return []


def _talks(rows: Sequence[Row]) -> int:
    return sum(row.turn == 0 for row in rows)


def _answers(target: Target, talks: list[Talk], source: str, how: How, clock: _Clock) -> list[Row]:
    """First turns first; a turn sees the target's own earlier answers, and is asked as soon as they are there."""
    history = [list(talk.system) for talk in talks]
    rows: dict[tuple[int, int], Row] = {}  # by turn and talk
    asked: list[tuple[int, int]] = []  # as rollout numbers them

    def ask(turn: int, i: int) -> list[int] | None:
        """The prompt of a turn; None if there is no such turn, or no room for it."""
        talk = talks[i]
        if turn == len(talk.turns):
            return None
        history[i].append({"role": "user", "content": talk.turns[turn]})
        ids = talk.ids or prompt_ids(target.tokenizer, history[i])
        rows[turn, i] = Row(talk.id, turn, source, talk.category, list(history[i]), ids, [], TOO_LONG)
        if len(ids) + how.max_new_tokens > target.can.max_positions:
            return None
        asked.append((turn, i))
        return ids

    def follow(number: int, answer: Answer) -> list[int] | None:
        turn, i = asked[number]
        rows[turn, i] = rows[turn, i]._replace(response_ids=answer.ids, ended=answer.ended)
        said = answer.ids[:-1] if answer.ended == "stop" else answer.ids
        text = target.tokenizer.decode(said, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        history[i].append({"role": "assistant", "content": text})
        more = ask(turn + 1, i)
        if more is None:
            clock.over()
        return more

    prompts = [ids for i in range(len(talks)) if (ids := ask(0, i)) is not None]
    turns = [len(talks[i].turns) for _, i in asked]
    rollout(target, prompts, how, target.eos, clock.tick, follow, turns)
    return [rows[place] for place in sorted(rows)]


PROBE_TOKENS = 16  # per row, of the probe's prompts
PROMPT_TOKENS = 64  # of a usual prompt, template included: estimates only
BYTES_PER_TOKEN = 12  # of JSON


def estimate(target: Target, source: Source, how: How, part: tuple[int, int] = (0, 1)) -> str:
    """What the work will take at most, from a probe of a few seconds at the real batch size."""
    count = source.total(part)
    rows = min(how.rows, count)
    prompts = [[(7 * i + 3 * j) % target.vocabulary.size for j in range(PROBE_TOKENS)] for i in range(rows)]
    rollout(target, prompts, How(rows=rows, max_new_tokens=2), ())  # a first pass costs more than the others
    seconds = []
    for new in (1, 3):
        start = time.perf_counter()
        rollout(target, prompts, How(rows=rows, max_new_tokens=new), ())
        seconds.append(time.perf_counter() - start)
    step = max(seconds[1] - seconds[0], 1e-6) / 2
    prompt = seconds[0] / (rows * PROBE_TOKENS) * PROMPT_TOKENS * count
    answer = step * how.max_new_tokens * count / rows
    invented = step * PROMPT_TOKENS * count / rows if isinstance(source, SelfPrompts) else 0.0
    tokens = count * (how.max_new_tokens + PROMPT_TOKENS)
    return (
        f"{count} conversations, {rows} side by side: about {rows / step:.0f} tokens/s, at most "
        f"{(prompt + answer + invented) / 60:.0f} min a turn and {tokens * BYTES_PER_TOKEN / 2**20:.0f} MiB"
    )


class _Clock:
    """Progress of one part: conversations done, tokens per second, time left."""

    def __init__(self, total: int, report: Report | None) -> None:
        self.total, self._report = total, report
        self.done = self._made = self._over = self._tokens = 0
        self._start = time.perf_counter()

    def skip(self, count: int) -> None:
        self.done += count

    def over(self) -> None:
        """A conversation of the unit at work has ended; it is not safe on disk yet."""
        self._over += 1

    def finish(self, count: int) -> None:
        self.done += count
        self._made += count
        self._over = 0
        self.tick(0)

    def tick(self, tokens: int) -> None:
        self._tokens += tokens
        if self._report is None:
            return
        seconds = time.perf_counter() - self._start
        left = ""
        done, made = min(self.done + self._over, self.total), self._made + self._over
        if made:
            left = f", about {(self.total - done) * seconds / made / 60:.0f} min left"
        self._report(f"{done} of {self.total} prompts, {self._tokens / seconds:.0f} tokens/s{left}", done / self.total)
