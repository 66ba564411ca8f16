"""Files that are whole or not there, and settings that are kept beside the work they shaped."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from headstart.errors import BadInput
from headstart.testing import table_target, tiny_target
from headstart.train.files import read_jsonl, same_or_refuse, whole, write_json, write_jsonl, write_tensors
from headstart.train.fingerprint import fingerprint, of_tensors, of_text

ROWS: list[Any] = [
    {"text": "schön 日本 🧑‍🚀", "n": [1, 2.5, None, True]},
    {"text": "all line ends: \n \r\n \r \u2028 \u2029 \x85 \x0b \x0c \x1c \x1d \x1e \ufeff"},
    [],
    "\u2028",
]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- whole


def test_a_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "file"
    with whole(path) as draft:
        draft.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new" and names(path.parent) == ["file"]
    with whole(path) as draft:
        draft.write_text("newer")
        assert path.read_text() == "new"
    assert path.read_text() == "newer" and names(path.parent) == ["file"]


@pytest.mark.parametrize("stop", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("old", ["old", None])
def test_a_block_that_raises_leaves_the_old_file_and_no_draft(
    tmp_path: Path, stop: type[BaseException], old: str | None
) -> None:
    path = tmp_path / "file"
    if old:
        path.write_text(old)
    with pytest.raises(stop), whole(path) as draft:
        draft.write_text("half")
        raise stop
    assert names(tmp_path) == (["file"] if old else [])
    assert old is None or path.read_text() == old


def test_what_a_kill_left_is_swept_away_and_nothing_else(tmp_path: Path) -> None:
    left = [".a[1].0123abcd", ".a[1].ffffffff"]
    others = [".a[1].json.0123abcd", ".a1.0123abcd", ".b.0123abcd", ".a[1].0123abcdef", "a[1].0123abcd", ".hidden"]
    for name in [*left, *others]:
        (tmp_path / name).write_text("x")
    with whole(tmp_path / "a[1]") as draft:
        assert not draft.exists()
        draft.write_text("y")
    assert names(tmp_path) == sorted([*others, "a[1]"])


def test_two_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "distil.json"  # every part of a run writes it when they start together
    with whole(path) as one, whole(path) as other:
        assert one != other
        one.write_text("same")
        other.write_text("same")
    assert path.read_text() == "same" and names(tmp_path) == ["distil.json"]


def test_a_block_must_write_its_draft(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), whole(tmp_path / "file"):
        pass


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("where", ["open", "replace", "fsync", "mkdir"])
def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, where: str) -> None:
    path = tmp_path / ("new/file" if where == "mkdir" else "file")
    if where != "mkdir":
        path.write_text("old")

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path if where in ("open", "mkdir") else os, where, full)
    with pytest.raises(BadInput, match=r"disk is full: .*file could not be written.*same command again"):
        write_jsonl(path, ROWS)
    monkeypatch.undo()
    assert names(tmp_path) == ([] if where == "mkdir" else ["file"])
    assert where == "mkdir" or path.read_text() == "old"


def test_other_errors_of_the_system_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any) -> None:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(PermissionError):
        write_json(tmp_path / "file", {})
    assert names(tmp_path) == []


def test_a_file_in_the_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    for path in (tmp_path / "out" / "x.json", tmp_path / "out" / "deep" / "x.json"):
        with pytest.raises(BadInput, match=r"out.* cannot be made a directory"):
            same_or_refuse(path, {}, "answers")


def test_a_block_that_meets_a_file_is_not_told_of_directories(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError), whole(tmp_path / "file"):
        (tmp_path / "other").touch()
        (tmp_path / "other").touch(exist_ok=False)


# --- rows


def test_rows_come_back(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, iter(ROWS))
    assert read_jsonl(path) == ROWS
    text = path.read_bytes().decode()
    assert text.count("\n") == len(ROWS) and text.endswith("\n")
    assert "日本" in text  # readable, and a third of the size of escapes
    write_jsonl(path, [])
    assert path.read_bytes() == b"" and read_jsonl(path) == []


@settings(max_examples=50, deadline=None)
@given(st.lists(st.dictionaries(st.text(max_size=4), st.text(max_size=12) | st.integers(), max_size=3), max_size=4))
def test_any_rows_come_back(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    write_jsonl(path, rows)
    assert read_jsonl(path) == rows


def test_a_document_comes_back(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", ROWS)
    text = (tmp_path / "x.json").read_text(encoding="utf-8")
    assert json.loads(text) == ROWS and "日本" in text


def test_a_torn_file_is_refused_at_every_length(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, ROWS[:2])
    good = path.read_bytes()
    ends = {0, good.index(b"\n") + 1, len(good)}  # a cut between two rows cannot be seen
    for length in range(len(good)):
        path.write_bytes(good[:length])
        if length in ends:
            assert read_jsonl(path) == ROWS[: good[:length].count(b"\n")]
        else:
            with pytest.raises(BadInput, match=r"rows\.jsonl is damaged.*again"):
                read_jsonl(path)


@pytest.mark.parametrize("body", [b"\n", b"{}\n\n", b'{"a":\n', b"\xff\n", b"\0\0\0\n", b'{"a":1}'])
def test_damage_is_refused(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "rows.jsonl").write_bytes(body)
    with pytest.raises(BadInput, match="damaged"):
        read_jsonl(tmp_path / "rows.jsonl")


# --- tensors


def test_tensors_come_back(tmp_path: Path) -> None:
    x = torch.arange(6.0).view(2, 3)
    named = {"plain": x, "turned": x.T, "part": x[:, 1], "half": x.to(torch.bfloat16), "one": x.sum()}
    write_tensors(tmp_path / "new" / "x.safetensors", named, {"note": "schön"})
    with safe_open(tmp_path / "new" / "x.safetensors", "pt") as file:
        assert file.metadata() == {"note": "schön"} and set(file.keys()) == set(named)
        for name, tensor in named.items():
            assert torch.equal(file.get_tensor(name), tensor) and file.get_tensor(name).dtype == tensor.dtype
    assert names(tmp_path / "new") == ["x.safetensors"]


def test_a_full_disk_is_said_by_safetensors_too(tmp_path: Path) -> None:
    for text, expected in (("I/O error: No space left on device (os error 28)", BadInput), ("header", SafetensorError)):
        with pytest.raises(expected, match="disk is full" if expected is BadInput else "header"), whole(tmp_path / "x"):
            raise SafetensorError(text)
    assert names(tmp_path) == []


# --- settings

CONFIG: dict[str, Any] = {"seed": 1, "words": (3, 120), "name": "schön", "deep": {"a": [1], "b": None}}


def test_the_same_settings_go_on(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.json"
    same_or_refuse(path, CONFIG, "answers")
    before = path.read_bytes()
    same_or_refuse(path, dict(reversed(CONFIG.items())), "answers")
    assert path.read_bytes() == before


def test_every_difference_is_shown_with_both_values(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    same_or_refuse(path, CONFIG, "answers")
    before = path.read_bytes()
    other = CONFIG | {"seed": 2, "deep": {"a": [1], "b": 0}, "extra": "x"}
    del other["words"]
    with pytest.raises(BadInput) as caught:
        same_or_refuse(path, other, "answers")
    first, *lines, last = str(caught.value).splitlines()
    assert str(tmp_path) in first and "answers made with other settings" in first and "another directory" in last
    assert lines == [
        "  deep.b: was None, now 0",
        "  extra: was None, now 'x'",
        "  seed: was 1, now 2",
        "  words: was [3, 120], now None",
    ]
    assert path.read_bytes() == before


def test_settings_written_by_a_faster_process_are_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    write_json(path, {"seed": 1})
    there = [False, True]
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda p: there.pop(0) if p == path and there else exists(p))

    def late(draft: Any, to: Any) -> None:
        raise FileNotFoundError  # swept away

    monkeypatch.setattr(os, "replace", late)
    with pytest.raises(BadInput, match="seed: was 1, now 2"):
        same_or_refuse(path, {"seed": 2}, "answers")


# --- content hashes


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_a_fingerprint_is_that_of_the_content(family: str) -> None:
    one = tiny_target(family)
    assert fingerprint(one) == fingerprint(tiny_target(family)) != fingerprint(tiny_target(family, seed=1))
    made = {fingerprint(one)}
    one.tokenizer.chat_template = "other"
    made.add(fingerprint(one))
    with torch.no_grad():
        list(one.model.parameters())[-1].view(-1)[-1] += 1e-3
    made.add(fingerprint(one))
    made.add(fingerprint(tiny_target(family, dtype=torch.bfloat16)))
    assert len(made) == 4


def test_hashes_see_names_shapes_types_order_and_labels() -> None:
    x = torch.arange(6.0)
    forms = [
        [("a", x)], [("b", x)], [("a", x.view(2, 3))], [("a", x.view(2, 3).T)], [("a", x.view(torch.int32))],
        [("a", x), ("b", x)], [("b", x), ("a", x)], [("a", x[0])], [("a", x[:1])], [("a", x[:0])], [],
    ]  # fmt: skip
    hashes = [of_tensors(form) for form in forms]
    assert len(set(hashes)) == len(forms) and {len(h) for h in hashes} == {16}
    assert of_tensors(forms[0], "l") not in (*hashes, of_tensors(forms[0], "m"))
    assert of_tensors([("a", torch.stack([x, x], 1)[:, 0])]) == hashes[0]  # values count, not strides
    assert of_text([1], "a") == of_text([1], "a") != of_text([1, "a"])


def test_a_table_has_a_fingerprint() -> None:
    assert fingerprint(table_target([0.5, 0.5])) != fingerprint(table_target([0.4, 0.6]))
