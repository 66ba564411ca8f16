"""One device synchronisation per step: by source, and by counting."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import headstart as hs
from headstart.testing import Mixed, tiny_target
from headstart.verify import base as verify_base

SOURCE = Path(hs.__file__).parent
READERS = {"item", "tolist", "cpu", "numpy"}
# What a step runs on device tensors. verify/* works on tensors that to_host has brought over already.
STEP_FILES = [
    "decode.py",
    "tree.py",
    "drafters/base.py",
    "drafters/lookup.py",
    "policies/chain.py",
    "policies/static.py",
]


@pytest.mark.parametrize("name", STEP_FILES)
def test_no_reads_of_device_tensors_in_a_step(name: str) -> None:
    for node in ast.walk(ast.parse((SOURCE / name).read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            assert node.func.attr not in READERS, f"{name}:{node.lineno} reads a tensor from Python"


def test_the_target_reads_nothing_back_in_extend_and_commit() -> None:
    tree = ast.parse((SOURCE / "targets/hf.py").read_text())
    step = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name in {"extend", "commit", "_mask"}]
    assert len(step) == 3
    for function in step:
        called = {
            n.func.attr for n in ast.walk(function) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
        }
        assert not called & READERS


def test_one_transfer_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    calls: list[int] = []
    original = verify_base.to_host

    def counted(*tensors: Any) -> Any:
        calls.append(len(tensors))
        return original(*tensors)

    monkeypatch.setattr(verify_base, "to_host", counted)
    out = hs.generate(target, "count me", drafter=Mixed(target, 4, [0, 2, 4]), max_new_tokens=40)
    assert set(out.stats.accepted) >= {0, 2, 4}
    assert len(calls) == out.stats.passes + 1  # and one for the prompt
