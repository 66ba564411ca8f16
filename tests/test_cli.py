"""The command line, on a tiny target saved as a directory: what a user types and what comes back."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headstart import cli_common
from headstart.targets.hf import HFTarget
from headstart.testing import tiny_target


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    target = tiny_target("gemma3", tie_word_embeddings=True)
    target.model.save_pretrained(path)
    target.tokenizer.save_pretrained(path)
    return path


def test_the_module_runs_as_a_command(directory: Path) -> None:
    command = [sys.executable, "-m", "headstart", "generate", str(directory), "hi", "-m", "4", "--dtype", "fp32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "4 tokens" in done.stdout
    assert done.stderr == ""


def test_generate_with_show_compare_and_json(run: Callable[..., Any], directory: Path, tmp_path: Path) -> None:
    record = tmp_path / "out.json"
    done = run(
        "generate", directory, "abcabcabc", "-m", "24", "--dtype", "fp32", "--compare", "--show", "--json", record
    )
    assert done.returncode == 0, done.stderr
    assert "plain" in done.stdout
    assert "yes" in done.stdout  # identical
    answers = json.loads(record.read_text())
    assert answers["plain"]["token_ids"] == answers["speculative"]["token_ids"]
    assert len(answers["plain"]["token_ids"]) == 24
    assert answers["speculative"]["tokens_per_step"] > 1.5


@pytest.mark.parametrize("drafter", ["none", "lookup", "directory"])
def test_every_drafter_gives_the_same_text(run: Callable[..., Any], directory: Path, drafter: str) -> None:
    name = directory if drafter == "directory" else drafter
    common = ("generate", directory, "abcabcabc", "-m", "16", "--dtype", "fp32")
    done = run(*common, "--drafter", name)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == run(*common, "--drafter", "none").stdout.splitlines()[0]


def test_prompt_from_standard_input_and_fetch(run: Callable[..., Any], directory: Path) -> None:
    piped = run("generate", directory, "-", "-m", "8", "--dtype", "fp32", "--raw", text="hello")
    assert piped.returncode == 0, piped.stderr
    assert "8 tokens" in piped.stdout
    assert run("fetch", directory).stdout.strip() == str(directory)


def test_chat_keeps_going_until_an_empty_line(run: Callable[..., Any], directory: Path) -> None:
    done = run("chat", directory, "-m", "8", "--dtype", "fp32", text="hello\nand again\n\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ended by length") == 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("generate", "no-such-model", "hi"), "smollm2-135m"),
        (("generate", "DIR", ""), "empty"),
        (("generate", "DIR", "hi", "-m", "0"), "max_new_tokens=0"),
        (("generate", "DIR", "hi", "-m", "-3"), "max_new_tokens=-3"),
        (("generate", "DIR", "hi", "--temperature", "-1"), "temperature"),
        (("generate", "DIR", "hi", "--stop", ""), "stop"),
        (("generate", "DIR", "hi", "--dtype", "int3"), "int3"),
        (("generate", "DIR", "hi", "--drafter", "medusa"), "medusa"),
        (("generate", "DIR", "x" * 600, "--raw"), "context"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_1(
    run: Callable[..., Any], directory: Path, args: tuple[str, ...], said: str
) -> None:
    done = run(*(str(directory) if a == "DIR" else a for a in args))
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "error:" in done.stderr


def test_a_draft_model_for_another_vocabulary_is_refused(
    run: Callable[..., Any], directory: Path, tmp_path: Path
) -> None:
    other = tiny_target(vocab_size=80)
    other.model.save_pretrained(tmp_path)
    other.tokenizer.save_pretrained(tmp_path)
    done = run("generate", directory, "hi", "--drafter", tmp_path)
    assert done.returncode == 1
    assert "another vocabulary" in done.stderr


def test_ctrl_c_in_mid_stream_keeps_what_was_said(
    run: Callable[..., Any], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run("generate", directory, "hello", "-m", "40", "--dtype", "fp32", "--drafter", "none").stdout
    extend, calls = HFTarget.extend, []

    def interrupted(self: HFTarget, *args: Any) -> Any:
        calls.append(1)
        if len(calls) > 20:
            raise KeyboardInterrupt
        return extend(self, *args)

    monkeypatch.setattr(HFTarget, "extend", interrupted)
    done = run("generate", directory, "hello", "-m", "40", "--dtype", "fp32", "--drafter", "none")
    assert done.returncode == 130
    assert "interrupted" in done.stderr
    assert "Traceback" not in done.stderr
    said = done.stdout.rstrip("\n")
    assert len(said) > 5
    assert whole.startswith(said)


def test_progress_in_a_log_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(cli_common.time, "monotonic", lambda: now)
    with cli_common.progress() as report:
        for second in range(35):
            now = float(second)
            report(f"at {second} s", second / 100 if second < 20 else None)
    out, err = capsys.readouterr()
    assert (out, err.splitlines()) == ("", [" 16%  at 16 s", "at 32 s"])


def test_prove_says_what_it_found(run: Callable[..., Any], tmp_path: Path) -> None:
    target = tiny_target("gemma3", tie_word_embeddings=True)
    target.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}.{% endfor %}"
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abcabcabc", "cab cab", "fed fed fed")))
    small = ("--count", 3, "-m", 24, "--sampled-tokens", 200, "--dtype", "fp32")
    record = tmp_path / "proof.json"
    done = run("prove", tmp_path / "target", "lookup", "--prompts", prompts, "--out", record, *small)
    found = json.loads(record.read_text())
    assert found["greedy"]["prompts"] == found["greedy"]["identical"] == 3
    assert done.returncode == {"pass": 0, "inconclusive": 3}[found["verdict"]], done.stderr
    assert found["verdict"] in done.stdout and "3 of 3 identical" in done.stdout and "control:" in done.stdout
    done = run("prove", tmp_path / "target", "none", "--prompts", prompts, *small)
    assert done.returncode == 1 and "nothing to prove" in done.stderr and "Traceback" not in done.stderr
    prompts.write_text("")
    done = run("prove", tmp_path / "target", "lookup", "--prompts", prompts, *small)
    assert done.returncode == 1 and "Traceback" not in done.stderr
