"""Fixtures for all tests."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from headstart.cli import main
from headstart.targets.hf import HFTarget
from headstart.testing import tiny_target

torch.set_num_threads(1)  # tiny models: more threads only wait for each other


@pytest.fixture(scope="session")
def tiny() -> Callable[..., HFTarget]:
    """`tiny_target`, made once per set of arguments. Shared: tests must not change what it returns."""
    return cache(tiny_target)


class Result(NamedTuple):
    """What a command said."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """The entry point in this process, which has torch loaded already."""

    def call(*args: str | Path, text: str = "") -> Result:
        monkeypatch.setattr(sys, "argv", ["headstart", *map(str, args)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capfd.readouterr()
        return Result(int(end.value.code or 0), out, err)

    return call
