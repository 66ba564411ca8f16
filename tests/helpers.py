"""What several test files share: prompts, references that are not ours, spies, and the coverage each test asserts."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from headstart.decode import Request
from headstart.generation import Output, Piece
from headstart.requests import new_request, resolved
from headstart.sampling import Sampling
from headstart.targets.hf import HFTarget
from headstart.testing import tiny_target

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3", "gpt2")


def prompts(count: int, seed: int = 0, low: int = 1, high: int = 20, vocab: int = 96) -> list[list[int]]:
    """Random token ids; lengths within low..high."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(rng.randint(low, high))] for _ in range(count)]


@contextmanager
def stock_attention(model: Any) -> Iterator[None]:
    """Transformers' own attention in place of ours."""
    ours = model.config._attn_implementation
    if ours.startswith("headstart"):
        model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(ours)


def stock(target: Any, ids: list[int], count: int, **settings: Any) -> list[int]:
    """The greedy answer of transformers' own generate(): no code of ours takes part."""
    with stock_attention(target.model):
        out = target.model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            **settings,
        )
    return out[0, len(ids) :].tolist()


def causal_logits(target: Any, ids: list[int]) -> torch.Tensor:
    """`[T, V]` of one ordinary pass over the whole text, without a cache."""
    with torch.no_grad(), stock_attention(target.model):
        return target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def request(target: Any, ids: list[int], count: int, sampling: Sampling | None = None) -> Request:
    """What `generate` would hand to the loop for one prompt."""
    return new_request(target, ids, resolved(target, sampling or Sampling(), count), count, 0)


def blurred(noise: float, family: str = "llama", **config: Any) -> HFTarget:
    """The tiny target with disturbed weights: a draft model that is right some of the time."""
    target = tiny_target(family, **config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in target.model.parameters():
            weight += noise * weight.std(correction=0) * torch.randn(weight.shape, generator=generator)
    return target


def spied(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple[Any, ...]]:
    """Record the positional arguments of every call of a method; the list grows as it is called."""
    calls: list[tuple[Any, ...]] = []
    method = getattr(owner, name)

    def call(*args: Any) -> Any:
        calls.append(args)
        return method(*args)

    monkeypatch.setattr(owner, name, call)
    return calls


def steps(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces of a batch, step by step: within one step the request numbers rise."""
    group: list[Piece] = []
    for piece in pieces:
        if group and piece.request <= group[-1].request:
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


class Coverage:
    """What a test met. `demand` fails a test that did not see its case."""

    def __init__(self, *depths: int) -> None:
        self.depths = set(depths)
        self.accepted: set[int] = set()
        self.tokens: set[int] = set()
        self.ragged = False

    def see(self, *outputs: Output) -> None:
        """Accept lengths and tokens of finished answers."""
        for output in outputs:
            self.accepted |= set(output.stats.accepted)
            self.tokens |= set(output.token_ids)

    def see_steps(self, pieces: Iterable[Piece]) -> list[Output]:
        """Run a stream, note steps whose rows took different numbers of drafted tokens; outputs by request."""
        done: dict[int, Output] = {}
        for group in steps(pieces):
            self.ragged |= len({piece.accepted for piece in group}) > 1
            done |= {piece.request: piece.output for piece in group if piece.output is not None}
        outputs = [done[number] for number in sorted(done)]
        self.see(*outputs)
        return outputs

    def demand(self, distinct: int = 20, ragged: bool = False) -> None:
        """Nothing, some and all of a draft were accepted, enough tokens were met, rows differed in one step."""
        assert 0 in self.accepted, "no step refused its whole draft"
        assert any(0 < a < max(self.depths) for a in self.accepted), "no step accepted a part of its draft"
        assert self.depths <= self.accepted, "no step accepted its whole draft"
        assert len(self.tokens) >= distinct, f"only {len(self.tokens)} distinct tokens"
        assert self.ragged or not ragged, "no step accepted different lengths in different rows"
