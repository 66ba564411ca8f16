"""Answers in files: every turn, resumed at any point to the same bytes, shared between processes, never held-out."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headstart as hs
from headstart.errors import BadInput
from headstart.prompts import packaged
from headstart.targets.hf import HFTarget
from headstart.testing import tiny_target
from headstart.train import distil as module
from headstart.train.answers import TOO_LONG, Row, Summary, read_answers, summary
from headstart.train.distil import BARREN, Given, SelfPrompts, Source, distil, estimate
from headstart.train.files import write_jsonl
from headstart.train.grams import Diversity
from headstart.train.readers import Chat
from headstart.train.rollout import How
from headstart.train.selfprompt import Invented, Inventing
from headstart.train.template import prompt_ids

CHATML = (
    "{% if messages[0].role != 'system' %}{{ '<|system\nYou help.|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|' + m.role + '\n' + m.content + '|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant\n' }}{% endif %}"
)
EOS = (7, 30, 41, 66)
HOW = How(max_new_tokens=10)
LOOSE = Inventing(max_tokens=16, seeded=0.3, words=(1, 200), distinct_words=0.0)


def chat_target(template: str | None = CHATML, **config: Any) -> HFTarget:
    target = tiny_target(**{"eos": EOS, **config})
    target.tokenizer.chat_template = template
    if template is None:
        target.tokenizer.bos_token = "\n"
    return target


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def chat(name: str, *turns: str, system: str = "", category: str = "") -> Chat:
    """User turns with answers of somebody else between them."""
    messages = [said("system", system)] if system else []
    for turn in turns:
        messages += [said("user", turn), said("assistant", f"somebody's answer to {turn}")]
    return Chat(name, messages[:-1], category)


CHATS = [
    chat("one", "Who is there?", category="qa"),
    chat("two", "Tell me more of it, please.", "And then?", "Why?", system="Be brief."),
    chat("three", "Ok", "Go on!", category="chat"),
    chat("four", "A somewhat longer question about nothing at all?"),
    chat("five", "Sums: 17 + 4"),
]
SHORT_FIRST = ["three", "five", "one", "two", "four"]


def rows_of(folder: Path) -> list[Row]:
    return read_answers(folder, drop_duplicates=False)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def many(count: int, seed: int = 0) -> list[Chat]:
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefgh", k=4)) for _ in range(60)]
    return [chat(str(i), *(" ".join(rng.choices(words, k=rng.randint(1, 6))) for _ in range(1 + i % 2)))
            for i in range(count)]  # fmt: skip


# --- given prompts


def test_every_user_turn_is_answered_after_the_targets_own_answers(tmp_path: Path) -> None:
    target = chat_target()
    distil(target, Given(CHATS, unit=3), tmp_path, HOW)
    rows = rows_of(tmp_path)
    assert [(r.id, r.turn) for r in rows] == [
        ("three", 0), ("five", 0), ("one", 0), ("three", 1), ("two", 0), ("four", 0), ("two", 1), ("two", 2),
    ]  # fmt: skip
    by_id = {c.id: c for c in CHATS}
    ends = Counter(r.ended for r in rows)
    assert set(ends) == {"stop", "length"}
    for name in SHORT_FIRST:
        messages = [m for m in by_id[name].messages if m["role"] == "system"]
        asked = [m for m in by_id[name].messages if m["role"] == "user"]
        for row, question in zip((r for r in rows if r.id == name), asked, strict=True):
            messages.append(question)
            answer = hs.generate(target, messages, max_new_tokens=10)
            assert row.messages == messages and row.prompt_ids == prompt_ids(target.tokenizer, messages)
            assert row.response_ids == answer.token_ids and (row.ended == "stop") == (row.response_ids[-1] in EOS)
            assert (row.source, row.category) == ("given", by_id[name].category)
            messages.append(said("assistant", answer.text))  # without the text of the stop id
    assert sorted(files_of(tmp_path)) == ["distil.json", "part-00000.jsonl", "part-00001.jsonl"]


def test_answers_may_be_sampled_and_cut_where_they_loop(tmp_path: Path) -> None:
    target = chat_target(eos=None)
    for name, how in {
        "a": How(max_new_tokens=6, temperature=1.0, seed=1),
        "b": How(max_new_tokens=6, temperature=1.0, seed=2),
    }.items():
        distil(target, Given(CHATS, unit=9, name="files"), tmp_path / name, how)
    one, other = ([r.response_ids for r in rows_of(tmp_path / name)] for name in "ab")
    assert one != other and all(len(ids) == 6 for ids in one + other)
    assert {r.source for r in rows_of(tmp_path / "a")} == {"files"}


HELD_OUT = packaged()


def like_held_out() -> list[Chat]:
    long = next(p for p in HELD_OUT if len(p.messages) == 1 and len(p.messages[0]["content"].split()) > 30)
    words = long.messages[0]["content"].split()
    eight = " ".join(words[3:13])
    return [
        *(Chat(f"packaged {p.id}", p.messages, p.category) for p in HELD_OUT),
        chat("one turn of it", "Something else", f"My dog says: {eight.upper()} -- what now?"),
        chat("across a line", " ".join(words[3:8]) + "\n" + " ".join(words[8:13])),
    ]


def test_held_out_prompts_and_what_is_like_them_are_left_out(tmp_path: Path) -> None:
    short = chat("shared words only", " ".join(HELD_OUT[0].messages[0]["content"].split()[:5]))
    document = Chat("book.txt", [], "", "a text without turns")
    source = Given([*like_held_out(), *CHATS, short, document], unit=4)
    assert [t.id for t in source.kept] == [*SHORT_FIRST[:3], *(t.id for t in source.kept[3:])]
    assert {t.id for t in source.kept} == {*SHORT_FIRST, "shared words only"}
    assert source.dropped == len(HELD_OUT) + 2 + 1
    for_measuring = Given([*like_held_out(), *CHATS, short, document], unit=4, held_out=True)
    assert len(for_measuring.kept) == len(HELD_OUT) + 2 + len(CHATS) + 1 and for_measuring.dropped == 1
    for chats in (like_held_out(), [document], []):
        with pytest.raises(BadInput, match="None of the prompts can be answered"):
            Given(chats, unit=4)


def test_a_held_out_prompt_of_several_turns_is_known_by_any_of_them() -> None:
    several = next(p for p in HELD_OUT if p.category == "multiturn")
    asked = [m["content"] for m in several.messages if m["role"] == "user"]
    longest = max(asked, key=lambda text: len(text.split()))
    assert len(longest.split()) >= 8
    assert [t.id for t in Given([chat("x", longest), *CHATS], unit=4).kept] == SHORT_FIRST


# --- prompts without room


def test_prompts_that_leave_no_room_are_written_down_and_counted(tmp_path: Path) -> None:
    target = chat_target(max_positions=128)
    room = 128 - 10 - len(prompt_ids(target.tokenizer, [said("user", "x")])) + 1
    chats = [
        chat("just fits", "a" * room), chat("one too many", "b" * (room + 1)), chat("short", "hi"),
        chat("second turn", "c" * 40, "d" * 40, "e"), chat("far too long", "f" * 300, "and on?"),
    ]  # fmt: skip
    distil(target, Given(chats, unit=2), tmp_path, HOW)
    rows = rows_of(tmp_path)
    unanswered = {(r.id, r.turn) for r in rows if r.ended == TOO_LONG}
    assert unanswered == {("one too many", 0), ("far too long", 0), ("second turn", 1)}
    assert all((r.response_ids == []) == (r.ended == TOO_LONG) for r in rows)
    assert {(r.id, r.turn) for r in rows} - unanswered == {("just fits", 0), ("short", 0), ("second turn", 0)}
    fits = next(r for r in rows if r.id == "just fits")
    assert len(fits.prompt_ids) + 10 == 128
    assert fits.response_ids == hs.generate(target, fits.messages, max_new_tokens=10).token_ids
    found = summary(rows)
    assert found.ended[TOO_LONG] == 3 and found.answers == 3 and found.prompts.texts == 3
    assert sum(found.ended.values()) == 6


def test_a_later_unit_may_hold_nothing_but_long_prompts(tmp_path: Path) -> None:
    target = chat_target(max_positions=128)
    chats = [chat("short", "hi"), *(chat(str(i), "x" * 200) for i in range(4))]
    seen: list[str] = []
    for _ in range(2):
        distil(target, Given(chats, unit=2), tmp_path, HOW, report=lambda message, _: seen.append(message))
        assert Counter(r.ended == TOO_LONG for r in rows_of(tmp_path)) == {True: 4, False: 1}
    assert seen[-1].startswith("5 of 5 prompts"), "all are done with, answered or not"


def test_no_room_for_any_answer_is_an_error(tmp_path: Path) -> None:
    target = chat_target(max_positions=128)
    closest = 128 - min(len(prompt_ids(target.tokenizer, [said("user", text)])) for text in ("Ok", "Sums: 17 + 4"))
    with pytest.raises(BadInput, match=rf"No prompt leaves room for 120 tokens; the closest leaves {closest}\."):
        distil(target, Given(CHATS, unit=2), tmp_path, How(max_new_tokens=120))
    assert list(files_of(tmp_path)) == ["distil.json"]


# --- going on


class Interrupted(Exception):
    pass


def interrupting(at: int) -> Callable[[str, float | None], None]:
    calls = iter(range(at + 1))

    def report(message: str, share: float | None) -> None:
        if next(calls) == at:
            raise Interrupted

    return report


def given() -> Source:
    return Given(many(7), unit=3)


def invented() -> Source:
    return SelfPrompts(7, LOOSE, unit=3)


GREEDY, SAMPLED = How(max_new_tokens=4), How(max_new_tokens=4, temperature=1.0, seed=5)


@pytest.mark.parametrize(
    ("source", "template", "how"),
    [(given, CHATML, GREEDY), (given, CHATML, SAMPLED), (invented, CHATML, GREEDY), (invented, None, SAMPLED)],
    ids=["given", "given, sampled", "invented", "invented by a base model, sampled"],
)
def test_interrupted_anywhere_it_ends_with_the_same_bytes(
    tmp_path: Path, source: Callable[[], Source], template: str | None, how: How
) -> None:
    target = chat_target(template)
    messages: list[str] = []
    distil(target, source(), tmp_path / "straight", how, report=lambda message, _: messages.append(message))
    expected = files_of(tmp_path / "straight")
    assert len(expected) >= 4 and len(messages) >= 12
    last, states = len(messages) - 1, set()
    for at in sorted({*range(0, last, 5), last - 1, last}):
        out = tmp_path / str(at)
        with pytest.raises(Interrupted):
            distil(target, source(), out, how, report=interrupting(at))
        states.add(len(files_of(out)))
        assert files_of(out).items() <= expected.items(), "only whole units"
        if at < last - 1:
            with pytest.raises(Interrupted):
                distil(target, source(), out, how, report=interrupting(1))
        distil(target, source(), out, how)
        assert files_of(out) == expected
    assert states == set(range(1, len(expected) + 1))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "straight").iterdir()}
    distil(target, source(), tmp_path / "straight", how)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "straight").iterdir()} == before


def test_what_was_accepted_before_an_interruption_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a base model too, whose rows have no turns."""
    text = " ".join(f"w{i}" for i in range(9))
    monkeypatch.setattr(
        module,
        "invent",
        lambda target, how, count, unit: [Invented(text, [95, 1, 2], ""), Invented(f"own {unit} x", [95, unit], "")],
    )
    target = chat_target(None)
    for count in (1, 3):
        distil(target, SelfPrompts(count, LOOSE, unit=2), tmp_path, HOW)
    assert [r.id for r in rows_of(tmp_path)] == ["self-0-0", "self-0-1", "self-1-0"]
    assert [r.messages for r in rows_of(tmp_path)] == [[said("user", t)] for t in (text, "own 0 x", "own 1 x")]
    assert [r.prompt_ids for r in rows_of(tmp_path)] == [[95, 1, 2], [95, 0], [95, 1]]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "torn": lambda body: body[: len(body) * 2 // 3],
    "last line end missing": lambda body: body[:-1],
    "empty": lambda body: b"",
    "zeros": lambda body: bytes(len(body)),
    "a field missing": lambda body: body.replace(b'"turn":0,', b"", 1),
    "a field too many": lambda body: body.replace(b'"turn":0,', b'"turn":0,"extra":1,', 1),
    "lists": lambda body: b"[1]\n[2]\n",
    "not UTF-8": lambda body: b"\xff" + body,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_unit_is_never_taken_as_done(tmp_path: Path, damage: str) -> None:
    target = chat_target()
    distil(target, given(), tmp_path, HOW)
    expected = files_of(tmp_path)
    path = tmp_path / "part-00001.jsonl"
    path.write_bytes(DAMAGE[damage](expected[path.name]))
    assert files_of(tmp_path) != expected
    if damage != "empty":  # a unit of invented prompts may have kept none
        with pytest.raises(BadInput, match=r"part-00001\.jsonl .*command that made it again"):
            read_answers(tmp_path)
    distil(target, given(), tmp_path, HOW)
    assert files_of(tmp_path) == expected


# --- what must not be mixed


def test_other_work_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    target = chat_target()
    distil(target, given(), tmp_path, HOW)
    before = files_of(tmp_path)
    retold = [c._replace(messages=[said("user", c.messages[0]["content"][::-1]), *c.messages[1:]]) for c in many(7)]
    advised = [c._replace(messages=[said("system", "x"), *c.messages]) for c in many(7)]
    renamed = [c._replace(id=f"{c.id}x") for c in many(7)]
    others: list[tuple[str, HFTarget, Source, How]] = [
        ("  max_new_tokens: was 10, now 11", target, given(), How(max_new_tokens=11)),
        ("  temperature: was 0.0, now 0.5", target, given(), How(max_new_tokens=10, temperature=0.5)),
        ("  top_p: was 1.0, now 0.9", target, given(), How(max_new_tokens=10, top_p=0.9)),
        ("  seed: was 0, now 3", target, given(), How(max_new_tokens=10, seed=3)),
        ("  cut_loops: was True, now False", target, given(), How(max_new_tokens=10, cut_loops=False)),
        ("  unit: was 3, now 2", target, Given(many(7), unit=2), HOW),
        *(("  prompts: was ", target, Given(new, unit=3), HOW) for new in (retold, advised, renamed)),
        ("  count: was 7, now 6", target, Given(many(6), unit=3), HOW),
        ("  source: was 'given', now 'other'", target, Given(many(7), unit=3, name="other"), HOW),
        ("  source: was 'given', now 'self'", target, invented(), HOW),
        ("  target: was ", chat_target(seed=1), given(), HOW),
        ("  target: was ", chat_target(CHATML + " "), given(), HOW),
        ("  stops: was [7, 30, 41, 66], now [7]", chat_target(eos=7), given(), HOW),
    ]  # fmt: skip
    for difference, other, source, how in others:
        with pytest.raises(BadInput, match="holds answers made with other settings") as caught:
            distil(other, source, tmp_path, how)
        shown = [line for line in str(caught.value).splitlines() if line.startswith("  ")]
        assert any(line.startswith(difference) for line in shown), (difference, shown)
        assert len(shown) <= 2 or source.name == "self", shown
        assert files_of(tmp_path) == before
    distil(chat_target(), given(), tmp_path, HOW)


def test_settings_of_invented_prompts_are_compared_but_their_number_is_not(tmp_path: Path) -> None:
    target = chat_target()
    distil(target, SelfPrompts(2, LOOSE, unit=3), tmp_path / "a", HOW)
    few = files_of(tmp_path / "a")
    with pytest.raises(BadInput, match=r"inventing\.seed: was 0, now 1"):
        distil(target, SelfPrompts(2, dataclasses.replace(LOOSE, seed=1), unit=3), tmp_path / "a", HOW)
    for count, out in ((7, "a"), (7, "b"), (1, "a")):
        distil(target, SelfPrompts(count, LOOSE, unit=3), tmp_path / out, HOW)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b") and few.items() < files_of(tmp_path / "a").items()


# --- parts


@pytest.mark.parametrize(("count", "batch", "n"), [(7, 3, 2), (8, 2, 2), (9, 4, 2), (7, 2, 3), (5, 3, 4), (1, 1, 2)])
def test_parts_make_the_files_of_one_process(tmp_path: Path, count: int, batch: int, n: int) -> None:
    target, how = chat_target(), How(max_new_tokens=2)
    for k in reversed(range(n)):
        distil(target, Given(many(count), batch), tmp_path / "parts", how, part=(k, n))
        numbers = {int(name[5:10]) for name in files_of(tmp_path / "parts") if name.startswith("part-")}
        assert {number for number in numbers if number % n == k} == set(range(k, -(-count // batch), n))
    distil(target, Given(many(count), batch), tmp_path / "one", how)
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "one")
    assert len(files_of(tmp_path / "one")) == -(-count // batch) + 1


def test_parts_of_invented_prompts(tmp_path: Path) -> None:
    target = chat_target()
    for k in range(2):
        distil(target, SelfPrompts(9, LOOSE, unit=3), tmp_path, HOW, part=(k, 2))
    rows = rows_of(tmp_path)
    shares = Counter(int(r.id.split("-")[1]) % 2 for r in rows)
    assert min(shares.values()) >= 5 and len({r.id for r in rows}) == len(rows)


# --- invented prompts


def scripted(monkeypatch: pytest.MonkeyPatch, *units: list[str]) -> list[int]:
    """In the place of `invent`: these texts, unit by unit, and those of the last one for ever."""
    asked: list[int] = []

    def invent(target: object, how: Inventing, count: int, unit: int) -> list[Invented]:
        asked.append(unit)
        return [Invented(text, [], "qa") for text in units[min(unit, len(units) - 1)]]

    monkeypatch.setattr(module, "invent", invent)
    return asked


def test_they_stop_at_the_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [[f"prompt {unit} {name} x" for name in "abc"[: 3 - unit % 2]] for unit in range(9)]
    for count, units in ((1, 1), (3, 1), (4, 2), (5, 2), (6, 3), (8, 3), (9, 4)):  # 3, 2, 3, 2, ... a unit
        asked = scripted(monkeypatch, *texts)
        distil(chat_target(), SelfPrompts(count, LOOSE, unit=3), tmp_path / str(count), How(max_new_tokens=1))
        assert asked == list(range(units)), count
        rows = rows_of(tmp_path / str(count))
        assert count <= len(rows) <= count + 2
        assert [r.messages for r in rows] == [[said("user", t)] for unit in texts[:units] for t in unit]
        assert [r.id for r in rows[:4]] == ["self-0-0", "self-0-1", "self-0-2", "self-1-0"][: len(rows)]
        assert {(r.source, r.category) for r in rows} == {("self", "qa")}


def test_no_held_out_prompt_comes_out_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["\n".join(m["content"] for m in c.messages if m["role"] == "user") for c in like_held_out()]
    wide = dataclasses.replace(LOOSE, words=(1, 10_000))
    scripted(monkeypatch, [*texts, "a prompt of its own", *texts], ["another of its own"])
    source = SelfPrompts(2, wide, unit=4)
    distil(chat_target(), source, tmp_path, How(max_new_tokens=1))
    assert [r.messages[0]["content"] for r in rows_of(tmp_path)] == ["a prompt of its own", "another of its own"]
    assert source.dropped == Counter({"near-duplicate": 2 * len(texts)})


def test_a_target_that_invents_nothing_usable_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = scripted(
        monkeypatch, ["this one is fine"], [""] * 3, *[["x"] * 3] * 3, ["so is this one"], ["", "a a a a a"]
    )
    source = SelfPrompts(9, Inventing(), unit=3)
    with pytest.raises(
        BadInput, match=rf"{BARREN} units of 3 invented prompts held none .*'length': 32.*'repetition': 20"
    ):
        distil(chat_target(), source, tmp_path, How(max_new_tokens=1))
    assert asked == list(range(6 + BARREN))
    assert [r.messages[0]["content"] for r in rows_of(tmp_path)] == ["this one is fine", "so is this one"]


@pytest.mark.parametrize(
    "make", [lambda n: SelfPrompts(n, LOOSE, 3), lambda n: SelfPrompts(3, LOOSE, n), lambda n: Given(CHATS, n)]
)
def test_counts_are_checked(make: Callable[[int], Source]) -> None:
    for wrong in (0, -1):
        with pytest.raises(BadInput, match=rf"(count|unit)={wrong}: expected at least 1"):
            make(wrong)


# --- reading


def row(name: str, *messages: str, turn: int = 0, **fields: Any) -> Row:
    """Messages are the user's and the target's in turn."""
    spoken = [said("user" if i % 2 == 0 else "assistant", text) for i, text in enumerate(messages)]
    made = Row(name, turn, "self", "", spoken, [1, 2, 3], [4, 5], "stop")
    return made._replace(**fields)


def words(start: int, count: int = 10) -> str:
    return " ".join(f"w{i}" for i in range(start, start + count))


def write(path: Path, *rows: Row) -> None:
    write_jsonl(path, [r._asdict() for r in rows])


def test_near_duplicates_are_left_out_across_parts_and_directories(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    a, b, c = row("a", words(0)), row("b", words(20)), row("c", words(40))
    write(first / "part-00010.jsonl", row("a2", words(2)))  # shares 8 words with a
    write(first / "part-00002.jsonl", a, b)
    write(second / "part-00000.jsonl", row("b2", "x " + words(20)), c, row("a3", words(3)))
    (second / "distil.json").write_text("{}")
    assert read_answers(first, second) == [a, b, c, row("a3", words(3))]
    assert [r.id for r in read_answers(second, first)] == ["b2", "c", "a3", "a"]
    assert [r.id for r in read_answers(first, second, drop_duplicates=False)] == ["a", "b", "a2", "b2", "c", "a3"]
    assert read_answers(first) == [a, b]


def test_a_conversation_is_left_out_with_all_its_turns(tmp_path: Path) -> None:
    asked, answer, more = words(0), "said", words(30)
    kept = [row("a", asked), row("b", "short one"), row("a", asked, answer, more, turn=1)]
    write(tmp_path / "part-00000.jsonl", *kept)
    write(
        tmp_path / "part-00001.jsonl",
        row("c", f"new {asked}"),
        row("c", "not the same conversation"),  # though of the same id: "line 1" of two files
        row("d", f"so {more}"),  # like a second turn
        row("c", f"new {asked}", answer, "go on", turn=1),
        row("c", "not the same conversation", answer, "go on", turn=1),
        row("d", f"so {more}", answer, "go on", turn=1),
    )
    rows = read_answers(tmp_path)
    assert rows[:3] == kept and [(r.id, r.turn, r.messages[0]["content"]) for r in rows[3:]] == [
        ("c", 0, "not the same conversation"), ("c", 1, "not the same conversation"),
    ]  # fmt: skip


def test_a_directory_without_answers_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "some" / "part-00000.jsonl", row("a", "x"))
    (tmp_path / "none").mkdir()
    for folder in (tmp_path / "none", tmp_path / "missing"):
        with pytest.raises(BadInput, match=rf"{folder.name} holds no answers .*headstart distill"):
            read_answers(tmp_path / "some", folder)


def test_summary_by_hand() -> None:
    rows = [
        row("a", words(0), category="qa"),
        row("a", words(0), "x", "go on", turn=1, category="qa", prompt_ids=[1] * 7, ended="length"),
        row("b", words(5), source="given", response_ids=[1] * 5, ended="loop"),
        row("c", words(1), source="given"),
        row("d", words(50), source="given", category="chat", prompt_ids=[1] * 900, response_ids=[], ended=TOO_LONG),
    ]
    assert summary(rows) == Summary(
        answers=4,
        tokens=2 + 2 + 5 + 2,
        prompt_tokens=3 + 7 + 3 + 3,
        ended={"stop": 2, "length": 1, "loop": 1, TOO_LONG: 1},
        sources={"self": 2, "given": 2},
        categories={"qa": 2, "free": 2},
        prompts=Diversity(3, 9, 7 / 9, 1 / 3),  # w0..w9, w5..w14, w1..w10: runs that start at 0-2, 5-7, 1-3
    )
    assert summary([]) == Summary(0, 0, 0, {}, {}, {}, Diversity(0, 0, 0.0, 0.0))


# --- progress


@pytest.mark.parametrize("source", [given, invented])
def test_progress_is_reported(tmp_path: Path, source: Callable[[], Source]) -> None:
    told: list[tuple[str, float]] = []

    def report(message: str, share: float | None) -> None:
        assert share is not None
        told.append((message, share))

    distil(chat_target(), source(), tmp_path, HOW, report=report)
    shares = [share for _, share in told]
    assert shares == sorted(shares) and shares[-1] == 1.0 and shares[0] < 0.5
    assert "min left" not in told[0][0] and told[-1][0].endswith("about 0 min left")
    assert int(told[-1][0].split()[0]) >= 7 and " of 7 prompts, " in told[-1][0] and " tokens/s" in told[-1][0]
    told.clear()
    distil(chat_target(), source(), tmp_path, HOW, report=report)
    assert not told, "nothing is left to do"


def test_speed_and_time_left_are_those_of_this_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 of 100 were there before; 10 more take a minute."""
    now = iter([100.0, 110.0, 160.0, 170.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(now))
    told: list[tuple[str, float | None]] = []
    clock = module._Clock(100, lambda message, share: told.append((message, share)))
    clock.skip(40)
    clock.tick(600)
    clock.finish(10)
    clock.tick(100)
    assert told == [
        ("40 of 100 prompts, 60 tokens/s", 0.4),
        ("50 of 100 prompts, 10 tokens/s, about 5 min left", 0.5),
        ("50 of 100 prompts, 10 tokens/s, about 6 min left", 0.5),
    ]


def test_a_large_unit_does_not_make_more_than_a_batch_too_much(tmp_path: Path) -> None:
    how = dataclasses.replace(LOOSE, rows=4)
    for count, most in ((2, 4), (6, 10)):
        distil(chat_target(), SelfPrompts(count, how, unit=100), tmp_path / str(count), HOW)
        assert count <= summary(read_answers(tmp_path / str(count))).prompts.texts <= most


def test_totals() -> None:
    assert [Given(many(7), 3).total((0, n)) for n in (1, 2, 3, 9)] == [7, 4, 3, 1]
    assert [SelfPrompts(7, LOOSE, 3).total((0, n)) for n in (1, 2, 3, 9)] == [7, 4, 3, 1]


def test_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that says: 2 s for the first pass over the prompts, then 0.5 s for each further token."""
    now = iter([0.0, 2.0, 10.0, 13.0] * 3)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(
        module, "rollout", lambda t, prompts, how, stops: asked.append((len(prompts), how.max_new_tokens))
    )
    how = How(rows=20, max_new_tokens=100)
    text = estimate(chat_target(), Given(many(50), 3), how)
    assert asked == [(20, 2), (20, 1), (20, 3)]
    prompt = 2 / (20 * 16) * 64 * 50  # 64 tokens a prompt
    assert text == (
        "50 conversations, 20 side by side: about 40 tokens/s, at most "
        f"{(prompt + 0.5 * 100 * 2.5) / 60:.0f} min a turn and {50 * 164 * 12 / 2**20:.0f} MiB"
    )
    own = estimate(chat_target(), SelfPrompts(100, LOOSE, 20), how, part=(1, 2))
    assert f"{(prompt + 0.5 * (100 + 64) * 2.5) / 60:.0f} min" in own and own.startswith("50 conversations")
    assert estimate(chat_target(), Given(many(5), 3), how).startswith("5 conversations, 5 side by side")


def test_estimate_with_the_real_clock() -> None:
    assert "conversations, 5 side by side" in estimate(chat_target(), Given(CHATS, 8), HOW)
