"""README does what it says: its example runs on the real model, its table is the one that bench/table.py writes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_short_and_its_links_lead_somewhere() -> None:
    assert len(TEXT.splitlines()) < 120
    for link in re.findall(r"\]\(([\w./-]+)\)", TEXT):
        assert (ROOT / link).exists(), link
    for name in re.findall(r"`((?:tests|bench|src)/[\w./-]+)`", TEXT):
        assert (ROOT / name).exists(), name


def test_the_table_is_not_stale() -> None:
    assert subprocess.run([sys.executable, ROOT / "bench/table.py", "--check"]).returncode == 0


@pytest.mark.real
def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.S)
    exec(compile(example, "README.md", "exec"), {})
    said = capsys.readouterr().out
    assert "apples, pears" in said.lower()  # how it goes on differs between CPUs in bf16
    assert len(said) > 300
