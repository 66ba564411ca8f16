"""Files of strangers: every format reads to the same chats, and every bad row is named."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.errors import BadInput
from headstart.train.readers import Chat, Reading, Skipped, read, user_turns

SHARED = Path(__file__).parents[2] / "shared" / "data"
GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
SAID = GOOD["messages"]
SYSTEM = {"role": "system", "content": "be brief"}


def user(*texts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text} for text in texts]


def answered(question: str, answer: str) -> list[dict[str, str]]:
    return [*user(question), {"role": "assistant", "content": answer}]


def openai(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": "x"} for role in roles]}


def lines(folder: Path, *rows: object, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


# Formats

FORMATS = [
    (GOOD, SAID),
    ({"messages": [SYSTEM, *SAID]}, [SYSTEM, *SAID]),
    ({"messages": [*SAID, *user("and?")]}, [*SAID, *user("and?")]),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}]},
        user("a b"),
    ),
    ({"messages": [{"role": "user", "content": "hi", "name": "Ann", "weight": 1}], "tools": []}, user("hi")),
    ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}, SAID),
    *(
        ({"conversations": [{"from": "user", "value": "hi"}, {"from": name, "value": "hello"}]}, SAID)
        for name in ("assistant", "chatgpt", "bing", "bard")
    ),
    (
        {"conversations": [{"from": "system", "value": "be brief"}, {"from": "human", "value": "hi", "weight": None}]},
        [SYSTEM, *user("hi")],
    ),
    ({"turns": ["one", "two"], "reference": ["r"]}, user("one", "two")),
    ({"instruction": "Sort these", "input": "2 1", "output": "1 2"}, answered("Sort these\n\n2 1", "1 2")),
    ({"instruction": "Sort these", "input": "", "response": "1 2"}, answered("Sort these", "1 2")),
    ({"instruction": "Sort these", "input": None, "output": " "}, user("Sort these")),
    (
        {"instruction": "Sort these", "instances": [{"input": "2 1", "output": "1 2"}, {"input": "4 3"}]},
        answered("Sort these\n\n2 1", "1 2"),
    ),
    ({"instruction": "Sort these", "instances": []}, user("Sort these")),
    ({"prompt": "hi"}, user("hi")),
    ({"prompt": "hi", "response": "hello"}, SAID),
    ({"prompt": "hi", "output": "hello"}, SAID),
    ({"question": "hi"}, user("hi")),
    ({"question": "hi", "answer": "hello"}, SAID),
    ({"prompt": "other", "question": "other"} | GOOD, SAID),  # the first field of the list counts
    ({"messages": None, "question": "hi"}, user("hi")),  # tables turned to JSON are full of nulls
]  # fmt: skip


@pytest.mark.parametrize(("row", "messages"), FORMATS)
def test_formats(tmp_path: Path, row: dict[str, Any], messages: list[dict[str, str]]) -> None:
    assert read(lines(tmp_path, row)) == Reading([Chat("line 1", messages, "")], [])


@pytest.mark.parametrize(
    ("fields", "name", "category"),
    [
        ({"id": "a", "question_id": 3}, "a", ""),
        ({"question_id": 81, "category": "writing"}, "81", "writing"),
        ({"task_id": "HumanEval/0"}, "HumanEval/0", ""),
        ({"conversation_id": "0000", "category": 5}, "0000", ""),
        ({"id": 0}, "0", ""),
        ({"id": "", "category": None}, "line 1", ""),
        ({"id": True, "task_id": [1]}, "line 1", ""),
    ],
)
def test_names_and_categories(tmp_path: Path, fields: dict[str, Any], name: str, category: str) -> None:
    assert read(lines(tmp_path, GOOD | fields)).chats == [Chat(name, SAID, category)]


def test_files_of_every_kind_hold_the_same(tmp_path: Path) -> None:
    rows = [GOOD | {"id": "a"}, {"prompt": "schön 日本 \u2028 🧑‍🚀", "id": "b"}]
    expected = Reading([Chat("a", SAID, ""), Chat("b", user("schön 日本 \u2028 🧑‍🚀"), "")], [])
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    assert "\u2028" in text  # which is no line break in a file
    bodies = {
        "a.jsonl": text.encode(),
        "b.JSONL": f"\ufeff{text}\n\n".encode(),  # byte order mark, blank lines
        "c.jsonl": text.replace("\n", "\r\n\r\n").encode(),
        "d.jsonl.gz": gzip.compress(text.encode()),
        "e.json": json.dumps(rows, indent=1).encode(),
    }
    for name, body in bodies.items():
        (tmp_path / name).write_bytes(body)
        assert read(tmp_path / name) == expected, name
        assert read(str(tmp_path / name), on_bad="skip") == expected, name


@pytest.mark.parametrize("name", ["book.txt", "book.md"])
def test_a_text_is_one_document(tmp_path: Path, name: str) -> None:
    body = '# One\n\ntwo\r\n{"messages": []}\n'
    (tmp_path / name).write_bytes(body.encode())
    assert read(tmp_path / name) == Reading([Chat(name, [], "", body)], [])


ROLES = st.integers(1, 6).map(lambda n: ["user", "assistant", "user", "assistant", "user", "assistant"][:n])
WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(str.strip)


@given(chats=st.lists(st.tuples(ROLES, st.lists(WORDS, min_size=7, max_size=7), st.booleans()), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, chats: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("rows")
    said = [list(zip((["system"] if system else []) + roles, words, strict=False)) for roles, words, system in chats]
    expected = [[{"role": role, "content": word} for role, word in chat] for chat in said]
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    openai_rows = [{"messages": chat} for chat in expected]
    share_rows = [{"conversations": [{"from": names[role], "value": word} for role, word in chat]} for chat in said]
    for rows in (openai_rows, share_rows):
        reading = read(lines(folder, *rows))
        assert [chat.messages for chat in reading.chats] == expected and not reading.skipped
        for chat in reading.chats:
            system, turns = user_turns(chat)
            assert system == [m for m in chat.messages if m["role"] == "system"]
            assert turns == [m["content"] for m in chat.messages if m["role"] == "user"]


# Bad rows

BAD = [
    ('{"messages": [', "malformed JSON"),
    ('{"prompt": "\\ud800"}', "malformed JSON"),
    ("[" * 50_000, "malformed JSON"),
    ('["hi"]', r"a row is a JSON object; saw \['hi'\]"),
    ("null", "a row is a JSON object; saw None"),
    ("{}", r"no field that says what the row is \(messages, conversations, turns, .*question\); saw \[\]"),
    ({"text": "a document?", "code": "x"}, r"no field that says.*saw \['text', 'code'\]"),
    ({"prompt": ""}, "prompt: it is empty"),
    ({"prompt": " \n"}, "prompt: it is empty"),
    ({"prompt": 5}, "prompt: Input should be a valid string; saw 5"),
    ({"prompt": SAID}, "prompt: Input should be a valid string"),
    ({"prompt": "x", "response": ["y"]}, r"response: Input should be a valid string; saw \['y'\]"),
    ({"question": "x", "answer": ["y"]}, "answer: Input should be a valid string"),
    ({"instruction": ""}, "instruction: it is empty"),
    ({"instruction": "x", "input": 5}, "input: Input should be a valid string; saw 5"),
    ({"instruction": "x", "instances": [{"input": 5}]}, r"instances\[0\].input: Input should be a valid string"),
    ({"turns": []}, "no user message"),
    ({"turns": "one"}, "turns: Input should be a valid list; saw 'one'"),
    ({"turns": ["one", ""]}, r"turns\[1\]: it is empty"),
    ({"turns": ["one", {"role": "user"}]}, r"turns\[1\]: Input should be a valid string"),
    ({"messages": []}, "no user message"),
    ({"messages": {}}, "messages: Input should be a valid list"),
    ({"messages": ["hi"]}, r"messages\[0\]: .*saw 'hi'"),
    ({"messages": [{"role": "user"}]}, r"messages\[0\].content is missing"),
    ({"messages": [{"content": "x"}]}, r"messages\[0\].role is missing"),
    ({"messages": [{"role": "user", "content": None}]}, r"messages\[0\].content: .*saw None"),
    ({"messages": answered("x", "")}, r"messages\[1\].content: it is empty"),
    ({"messages": [{"role": "user", "content": []}]}, r"messages\[0\].content: it is empty"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}]},
        r"messages\[0\].content: only content parts of type text can be read; saw {'type': 'image_url'",
    ),
    ({"messages": user([{"type": "text", "text": 5}])}, r"messages\[0\].content: only content parts of type text"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, r"messages\[0\].content: only content parts of type text"),
    (openai("user", "tool"), r"messages\[1\].role: Input should be 'system', 'user' or 'assistant'; saw 'tool'"),
    (openai("human"), r"messages\[0\].role: Input should be"),
    (openai("system"), "no user message"),
    (openai("assistant", "user"), "message 1 is by the assistant; expected the user"),
    (openai("system", "assistant"), "message 2 is by the assistant; expected the user"),
    (openai("user", "user"), "message 2 is by the user; expected the assistant"),
    (openai("user", "assistant", "assistant"), "message 3 is by the assistant; expected the user"),
    (openai("user", "system", "assistant"), "message 2 is by the system; expected the assistant"),
    (openai("system", "system", "user"), "message 2 is by the system; expected the user"),
    ({"conversations": [{"from": "gpt", "value": "x"}]}, "message 1 is by the assistant; expected the user"),
    ({"conversations": [{"from": "tool", "value": "x"}]}, r"conversations\[0\].from: unknown role 'tool'.*human"),
    ({"conversations": [{"from": "human", "value": ""}]}, r"conversations\[0\].value: it is empty"),
    ({"conversations": [{"from": "human"}]}, r"conversations\[0\].value is missing"),
    ({"conversations": [{"role": "human", "value": "x"}]}, r"conversations\[0\].from is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "match"), BAD, ids=range(len(BAD)))
def test_bad_rows(tmp_path: Path, row: Any, match: str) -> None:
    good, bad = json.dumps(GOOD), row if isinstance(row, str) else json.dumps(row)
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{good}\n\n{bad}\n{good}\n", encoding="utf-8")
    with pytest.raises(BadInput, match=rf'(?s)rows\.jsonl.*\n  line 3: {match}.*on_bad="skip" \(--skip-bad\)'):
        read(path)
    reading = read(path, on_bad="skip")
    assert [chat.id for chat in reading.chats] == ["line 1", "line 4"]
    assert [skipped.line for skipped in reading.skipped] == [3]
    path.write_text(bad, encoding="utf-8")
    with pytest.raises(BadInput, match=rf"(?s)holds no chat.*line 1: {match}"):
        read(path, on_bad="skip")


def test_in_a_list_the_rows_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([GOOD, 5, {"prompt": "hi"}], indent=2))
    with pytest.raises(BadInput, match=r"\n  row 2: a row is a JSON object; saw 5\n"):
        read(path)
    reading = read(path, on_bad="skip")
    assert [chat.id for chat in reading.chats] == ["row 1", "row 3"]
    assert reading.skipped == [Skipped(2, "a row is a JSON object; saw 5")]


def test_a_refusal_lists_the_first_five(tmp_path: Path) -> None:
    path = lines(tmp_path, GOOD, *range(7))
    with pytest.raises(BadInput) as caught:
        read(path)
    message = str(caught.value)
    assert "the first 5" in message and str(path) in message
    assert [f"line {n}:" in message for n in range(1, 9)] == [False, *[True] * 5, False, False]
    assert [skipped.line for skipped in read(path, on_bad="skip").skipped] == list(range(2, 9))
    path.write_bytes(path.read_bytes() + b"\n\xff")  # nothing is read after the fifth
    with pytest.raises(BadInput, match="line 6"):
        read(path)
    with pytest.raises(BadInput) as caught:
        read(lines(tmp_path, GOOD, 1, GOOD, 2))
    assert "the first 5" not in str(caught.value) and "line 4" in str(caught.value)


def test_long_values_are_shortened(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        read(lines(tmp_path, {"prompt": ["x" * 10_000]}))
    assert len(str(caught.value)) < 500


# Bad files


BAD_FILES = [
    ("a.jsonl", b"", "holds no chat; it is empty"),
    ("a.jsonl", b"\xef\xbb\xbf \n\n", "holds no chat; it is empty"),
    ("a.json", b"", "holds no chat; it is empty"),
    ("a.json", b"[]", "holds no chat; it is empty"),
    ("a.json", b'{"prompt": "hi"}', r"not a JSON list of rows: it holds .*\.jsonl"),
    ("a.json", b'{"prompt": "hi"}\n{"prompt": "hi"}', r"not a JSON list of rows: malformed JSON.*\.jsonl"),
    ("a.txt", b" \n", "is empty; give a text"),
    ("a.jsonl", b'{"prompt": "hi"}\n{"prompt": "\xff"}', r"line 2: not UTF-8.*Convert"),
    ("a.json", b'[{"prompt": "\xff"}]', "line 1: not UTF-8"),
    ("a.md", b"one\ntwo\n\xff", "line 3: not UTF-8"),
    ("a.jsonl", '{"prompt": "hi"}'.encode("utf-16"), "line 1: not UTF-8"),
    ("a.jsonl.gz", b'{"prompt": "hi"}', "cannot be read to its end.*damaged"),
    ("a.jsonl.gz", gzip.compress(b'{"prompt": "hi"}' * 99)[:-9], "cannot be read to its end.*damaged"),
    ("a.jsonl.gz", gzip.compress(b"")[:10] + b"\xff" * 20, "cannot be read to its end.*damaged"),
    ("a.csv", b"prompt\nhi", r"ends in none of \.jsonl, \.jsonl\.gz"),
    ("a.json.gz", b"", "ends in none of"),
]


@pytest.mark.parametrize(("name", "body", "match"), BAD_FILES, ids=range(len(BAD_FILES)))
@pytest.mark.parametrize("on_bad", ["refuse", "skip"])
def test_bad_files(tmp_path: Path, name: str, body: bytes, match: str, on_bad: Any) -> None:
    (tmp_path / name).write_bytes(body)
    with pytest.raises(BadInput, match=match) as caught:
        read(tmp_path / name, on_bad=on_bad)
    assert name in str(caught.value)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.txt", "rows.jsonl.gz"])
def test_missing_files_and_directories(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match="does not exist"):
        read(tmp_path / name)
    (tmp_path / name).mkdir()
    with pytest.raises(BadInput, match="is a directory"):
        read(tmp_path / name)


def test_an_unknown_way_with_bad_rows(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"on_bad='drop'.*refuse, skip"):
        read(lines(tmp_path, GOOD), on_bad="drop")  # type: ignore[arg-type]


FIELDS = ["messages", "conversations", "turns", "prompt", "role", "content", "from", "value", "id"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(["user", "gpt"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner),
    max_leaves=12,
)


@given(
    body=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()),
    suffix=st.sampled_from(["jsonl", "json"]),
)
@settings(max_examples=80, deadline=None)
def test_whatever_the_bytes_chats_or_a_clear_refusal(
    tmp_path_factory: pytest.TempPathFactory, body: bytes, suffix: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"any.{suffix}"
    path.write_bytes(body)
    try:
        reading = read(path, on_bad="skip")
    except BadInput as error:
        assert str(path) in str(error)
    else:
        assert reading.chats
        assert all(m["content"].strip() for chat in reading.chats for m in chat.messages)


# Turns


def test_user_turns() -> None:
    assert user_turns(Chat("a", [SYSTEM, *SAID, *user("and?")], "")) == ([SYSTEM], ["hi", "and?"])
    assert user_turns(Chat("a", user("one", "two"), "")) == ([], ["one", "two"])
    with pytest.raises(BadInput, match=r"book\.txt is a text without roles"):
        user_turns(Chat("book.txt", [], "", "text"))


# Published files


@pytest.mark.parametrize(
    ("name", "rows", "roles"),
    [
        ("fastchat_dummy_conversation.json", 500, {"user", "assistant"}),
        ("modelopt_synthetic_conversations_1k.jsonl", 1000, {"user", "assistant"}),
        ("spec_bench_question.jsonl", 480, {"user"}),
        ("gsm8k_test.jsonl", 1319, {"user", "assistant"}),
        ("self_instruct_seed_tasks.jsonl", 175, {"user", "assistant"}),
        ("smollm2_135m_distilled.jsonl.gz", None, {"user", "assistant"}),
    ],
)
def test_published_files_hold_no_bad_row(name: str, rows: int | None, roles: set[str]) -> None:
    if not (SHARED / name).exists():
        pytest.skip(f"{name} is not part of the repository")
    reading = read(SHARED / name)
    assert len(reading.chats) == rows or (rows is None and len(reading.chats) > 2000)
    assert {m["role"] for chat in reading.chats for m in chat.messages} == roles
    if name.startswith("spec_bench"):
        assert Counter(len(user_turns(chat)[1]) for chat in reading.chats) == {1: 400, 2: 80}
        assert Counter(chat.category for chat in reading.chats)["summarization"] == 80
        assert reading.chats[0].id == "81"
