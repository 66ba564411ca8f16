"""The built wheel, installed with its declared dependencies in a clean environment and used from elsewhere."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
USE = """
import sys
from pathlib import Path
import headstart as hs
from headstart.prompts import packaged
from headstart.testing import Mixed, tiny_target
assert Path(hs.__file__).is_relative_to(sys.prefix), hs.__file__
target = tiny_target()
plain = hs.generate(target, "from outside", max_new_tokens=20)
fast = hs.generate(target, "from outside", drafter=Mixed(target, 3, [0, 1, 3]), max_new_tokens=20)
assert plain.token_ids == fast.token_ids and fast.stats.tokens_per_step > 1
assert len(packaged()) >= 40
print("works", hs.__version__)
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.install
def test_the_wheel_works_in_a_clean_environment(tmp_path: Path) -> None:
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "headstart/py.typed" in names
    assert "headstart/data/prompts.jsonl" in names
    assert not [n for n in names if n.startswith(("tests", "bench", "docs"))]
    run(sys.executable, "-m", "venv", tmp_path / "clean", cwd=tmp_path)
    python = tmp_path / "clean" / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    run(python, "-m", "pip", "install", "-q", "-c", constraints, "torch==2.13.0", cwd=tmp_path)
    run(python, "-m", "pip", "install", "-q", "-c", constraints, wheel, cwd=tmp_path)
    assert "works" in run(python, "-c", USE, cwd=tmp_path)
    assert "generate" in run(tmp_path / "clean" / "bin" / "headstart", "--help", cwd=tmp_path)
