"""The packaged prompts and openers: what figures and training rest on."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from importlib.resources import files
from pathlib import Path

import pytest

import headstart.prompts
from headstart.errors import BadInput
from headstart.prompts import PackagedPrompt, packaged
from headstart.train.grams import RUN, WORD, Seen, grams
from headstart.train.selfprompt import openers

SHARED = Path(__file__).parents[2] / "shared" / "data"
HELD_OUT, OTHERS = packaged(), packaged(held_out=False)
ALL = HELD_OUT + OTHERS
CATEGORIES = (
    "chat", "code", "extraction", "languages", "maths", "multiturn",
    "qa", "rag", "reasoning", "roleplay", "summary", "translation",
)  # fmt: skip


def text(prompt: PackagedPrompt, *roles: str) -> str:
    return "\n".join(m["content"] for m in prompt.messages if not roles or m["role"] in roles)


def test_there_are_enough_of_every_kind() -> None:
    assert len(ALL) >= 400 and len(HELD_OUT) >= 40
    counts = Counter(p.category for p in ALL)
    assert tuple(sorted(counts)) == CATEGORIES and min(counts.values()) >= 25
    assert {p.category for p in HELD_OUT} == {p.category for p in OTHERS} == set(CATEGORIES)
    assert statistics.median(len(WORD.findall(text(p, "user"))) for p in ALL) >= 20


def test_held_out_and_others_are_told_apart() -> None:
    rows = [json.loads(line) for line in (files("headstart") / "data/prompts.jsonl").read_bytes().splitlines()]
    held_out = {row["id"] for row in rows if row.get("held_out")}
    assert {p.id for p in HELD_OUT} == held_out and {p.id for p in OTHERS} == {r["id"] for r in rows} - held_out
    assert all(p.held_out for p in HELD_OUT) and not any(p.held_out for p in OTHERS)
    assert [p.id for p in HELD_OUT] == [r["id"] for r in rows if r["id"] in held_out]  # in file order
    some = packaged("maths", "code", held_out=False)
    assert some == [p for p in OTHERS if p.category in ("maths", "code")] and some
    assert packaged("maths") == [p for p in HELD_OUT if p.category == "maths"]
    assert packaged("no such category") == []


def test_ids_are_unique_and_rows_hold_nothing_else() -> None:
    assert len({p.id for p in ALL}) == len(ALL)
    assert all(type(p.held_out) is bool for p in ALL)
    for p in ALL:
        assert p.id.startswith(f"{p.category}-"), p.id


def test_turns_alternate_and_end_with_the_users() -> None:
    several = 0
    for p in ALL:
        roles = [m["role"] for m in p.messages]
        asked = roles[1:] if roles[0] == "system" else roles
        assert asked == ["user", "assistant"] * (len(asked) // 2) + ["user"], p.id
        assert all(set(m) == {"role", "content"} and m["content"].strip() == m["content"] != "" for m in p.messages), (
            p.id
        )
        several += len(asked) > 1
        assert (len(asked) > 1) >= (p.category == "multiturn"), p.id
    assert several >= 25


def test_no_two_share_a_run_of_words() -> None:
    assert RUN == 8
    owner: dict[tuple[str, ...], str] = {}
    for p in ALL:
        for gram in grams(text(p)):
            assert owner.setdefault(gram, p.id) == p.id, f"{p.id} and {owner[gram]} share {' '.join(gram)!r}"


@pytest.mark.skipif(not SHARED.exists(), reason="the benchmark files are not here")
def test_none_shares_thirteen_words_with_a_benchmark() -> None:
    benchmark = Seen(run=13)
    for name in ("spec_bench_question", "mt_bench_question", "gsm8k_test"):
        for line in (SHARED / f"{name}.jsonl").read_text(encoding="utf-8").split("\n"):
            row = json.loads(line) if line else {}
            for asked in [*row.get("turns", []), *([row["question"]] if "question" in row else [])]:
                assert isinstance(asked, str)
                benchmark.add(asked)
    assert len(benchmark._grams) > 50_000
    assert [p.id for p in ALL if benchmark.overlaps(text(p))] == []


def test_line_separators_inside_a_prompt_do_not_end_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "one \u2028 two \x85 three"
    row = {"id": "x-1", "category": "x", "messages": [{"role": "user", "content": said}], "held_out": True}
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "prompts.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    monkeypatch.setattr(headstart.prompts, "files", lambda _: tmp_path)
    assert [p.messages[0]["content"] for p in packaged()] == [said]


# --- openers


def test_openers_are_shorter_than_a_run() -> None:
    every = openers()
    assert len(every) == len(set(every)) >= 100
    assert {name for name, _ in every} <= {*CATEGORIES, "rewriting", "ideas"}
    assert len({name for name, _ in every}) >= 10
    for name, words in every:
        count = len(WORD.findall(words))
        assert 1 <= count < RUN, f"{name}: {words!r}, so all prompts that grow from it would be near-duplicates"
        assert words.lstrip() == words


def test_openers_by_category() -> None:
    table = dict.fromkeys(name for name, _ in openers())
    assert openers(("maths",)) == [pair for pair in openers() if pair[0] == "maths"] != []
    assert openers(("qa", "chat")) == [*openers(("qa",)), *openers(("chat",))]
    with pytest.raises(BadInput, match=r"No openers of category cooking, nope; there are chat, .*ideas") as caught:
        openers(("nope", "chat", "cooking"))
    assert all(name in str(caught.value) for name in table)
