"""docs/bugs.md names every id of the public bug log, and only tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IDS = {f"B{i:02}" for i in range(1, 26)} | {f"S{i:02}" for i in range(1, 21)}
# What this part of the package must hold by itself: a row that only points to later work is not enough.
HELD = {f"B{i:02}" for i in range(1, 26)} | {
    f"S{i:02}" for i in (1, 2, 3, 5, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17, 18)
}  # fmt: skip


def rows() -> dict[str, str]:
    lines = (ROOT / "docs/bugs.md").read_text().splitlines()
    return {m[1]: line for line in lines if (m := re.match(r"\| ([BS]\d\d) \|", line))}


def test_every_id_is_mapped() -> None:
    assert set(rows()) == IDS


def test_named_tests_exist() -> None:
    named = [pair for line in rows().values() for pair in re.findall(r"`(test_\w+\.py)::(test_\w+)`", line)]
    assert len(named) > 30
    for file, name in named:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"{file}::{name} does not exist"


def test_what_decoding_must_hold_names_a_test() -> None:
    for name in sorted(HELD):
        assert "::test_" in rows()[name], f"{name} names no test"
