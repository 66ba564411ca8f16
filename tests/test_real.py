"""Greedy identity on SmolLM2-135M-Instruct in fp32: 30 packaged prompts x 96 tokens, every arm against
transformers `generate()`. Batch 4 (plain: 15) runs all prompts, batch 1 every fifth one; `make test-all` runs all of
both.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

import headstart as hs
from headstart.prompts import packaged
from headstart.requests import encode
from headstart.testing import Mixed
from helpers import stock_attention

pytestmark = pytest.mark.real
PROMPTS, TOKENS, DEPTH = 30, 96, 5
ACCEPTS = [0, 5, 2, 5, 1, 5, 4, 3, 5, 0, 5]
EVERY = 1 if os.environ.get("HEADSTART_TEST_ALL") else 5


@pytest.fixture(scope="module")
def target() -> Any:
    return hs.load_target("smollm2-135m", dtype="fp32")


@pytest.fixture(scope="module")
def prompts(target: Any) -> list[list[int]]:
    every = packaged()
    chosen = [every[i * len(every) // PROMPTS] for i in range(PROMPTS)]
    assert len({p.category for p in chosen}) >= 10
    return [encode(target, p.messages) for p in chosen]


@pytest.fixture(scope="module")
def reference(target: Any, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What stock `generate()` says, computed once for all workers, in left-padded batches."""
    path = tmp_path_factory.getbasetemp().parent / "smollm2-reference.json"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            order = sorted(range(PROMPTS), key=lambda i: len(prompts[i]))
            said: dict[int, list[int]] = {}
            for start in range(0, PROMPTS, 10):
                chunk = order[start : start + 10]
                said |= dict(zip(chunk, stock(target, [prompts[i] for i in chunk]), strict=True))
            path.write_text(json.dumps([said[i] for i in range(PROMPTS)]))
    return json.loads(path.read_text())


def stock(target: Any, prompts: list[list[int]], **processors: Any) -> list[list[int]]:
    width = max(map(len, prompts))
    ids = torch.tensor([[2] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    with stock_attention(target.model):
        out = target.model.generate(
            ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False, pad_token_id=2, **processors
        )
    answers = []
    for row in out[:, width:].tolist():
        answers.append(row[: row.index(2) + 1] if 2 in row else row)
    return answers


class _Script:
    """Foresight that reads the known answer instead of running the model."""

    def __init__(self, known: dict[tuple[int, ...], list[int]]) -> None:
        self.known, self.tokens, self.steps = known, [], 0
        self.start: int | None = None

    def ahead(self, depth: int) -> list[int]:
        if self.start is None:  # the first draft follows prompt + root
            self.start = len(self.tokens) - 1
            self.answer = self.known[tuple(self.tokens[:-1])]
        done = len(self.tokens) - self.start
        return self.answer[done : done + depth]


class Known(Mixed):
    """`Mixed` with the greedy continuation given."""

    def __init__(self, target: Any, known: dict[tuple[int, ...], list[int]], width: int) -> None:
        super().__init__(target, DEPTH, ACCEPTS, width)
        self.known = known

    def start(self, n_requests: int) -> list[Any]:
        return [(b, _Script(self.known)) for b in range(n_requests)]


def run(target: Any, prompts: list[list[int]], batch: int, drafter: Any) -> list[Any]:
    if batch == 1:
        return [hs.generate(target, p, drafter=drafter, max_new_tokens=TOKENS) for p in prompts]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    outputs: dict[int, Any] = {}
    for start in range(0, len(order), batch):
        chunk = order[start : start + batch]
        answers = hs.generate(target, [prompts[i] for i in chunk], drafter=drafter, max_new_tokens=TOKENS)
        outputs |= dict(zip(chunk, answers, strict=True))
    return [outputs[i] for i in range(len(prompts))]


def drafter_of(name: str, target: Any, prompts: list[list[int]], reference: list[list[int]]) -> Any:
    known = {tuple(p): r for p, r in zip(prompts, reference, strict=True)}
    return {
        "plain": None,
        "lookup-chain": hs.PromptLookup(),
        "lookup-tree": hs.PromptLookup(branches=3, nodes=20),
        "mixed-chain": Known(target, known, width=1),
        "mixed-tree": Known(target, known, width=3),
    }[name]


ARMS = ["plain", "lookup-chain", "lookup-tree", "mixed-chain", "mixed-tree"]


@pytest.mark.parametrize(("arm", "batch"), [(arm, b) for arm in ARMS for b in ((1, 15) if arm == "plain" else (1, 4))])
def test_greedy_identity(
    arm: str, batch: int, target: Any, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    step = EVERY if batch == 1 else 1
    some, expected = prompts[::step], reference[::step]
    outputs = run(target, some, batch, drafter_of(arm, target, prompts, reference))
    assert [o.token_ids for o in outputs] == expected
    assert len({t for o in outputs for t in o.token_ids}) > 200
    accepted = sum((Counter(o.stats.accepted) for o in outputs), Counter())
    if arm.startswith("mixed"):
        assert set(accepted) == set(range(DEPTH + 1))
    if arm.startswith("lookup"):
        assert accepted[0] and max(accepted) >= 8 and sum(accepted[k] for k in range(1, 8))


def test_greedy_identity_with_processors(target: Any, prompts: list[list[int]]) -> None:
    from transformers.generation import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

    some = [min(prompts, key=len)]
    expected = stock(target, some, logits_processor=LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.2)]))
    how = hs.Sampling(repetition_penalty=1.2)
    for drafter in (None, hs.PromptLookup(min_ngram=1), Known(target, {tuple(some[0]): expected[0]}, width=2)):
        out = hs.generate(target, some[0], drafter=drafter, max_new_tokens=TOKENS, sampling=how)
        assert out.token_ids == expected[0]
    assert set(out.stats.accepted) >= {0, 5}


def test_the_cached_directory_is_plain_safetensors(target: Any) -> None:
    assert isinstance(target.path, Path)
    assert (target.path / "config.json").exists()
    assert list(target.path.glob("*.safetensors"))
    assert not list(target.path.glob("*.bin"))
    assert target.can.tree and target.can.rollback and target.can.taps
    assert target.eos == (2,)
