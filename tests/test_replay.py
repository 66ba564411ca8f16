"""What replay says of a drafter is what decoding does with it: the same steps, text by text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headstart as hs
from headstart import replay as module
from headstart.core import Budget, Committed, Draft, Features, Kind, Shape, Taps
from headstart.drafters.base import Plain, Sprout, from_sprouts
from headstart.drafting import HeadDrafter
from headstart.heads.base import Head
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.heldout import HeldOut
from headstart.policies.base import Policy
from headstart.replay import Replayed, Spoken, replay
from headstart.targets.base import prefill
from headstart.targets.hf import HFTarget
from headstart.testing import tiny_target
from headstart.train.capture import Captured, Window, capture
from headstart.train.template import Sample
from headstart.tune.tree import NEVER
from headstart.unroll import Batch, Independent, SelfFed, Unroll, unroll
from headstart.vocab.base import DraftVocab
from headstart.vocab.full import Full
from headstart.vocab.trimmed import Trimmed
from helpers import Coverage, prompts
from test_unroll import Toy

NEW, DEPTH = 40, 3
PROMPTS = prompts(5, seed=3, low=1, high=12)
PATHS = [(0,), (1,), (0, 0), (2,), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 2)]
POLICIES: dict[str, Policy] = {"chain": hs.Chain(depth=DEPTH), "tree": hs.StaticTree(paths=PATHS)}


def spoken(target: HFTarget, prompt: list[int], answer: list[int], start: int = 0) -> Spoken:
    """The text with the features of one pass over it."""
    ids = prompt + answer
    _, _, features = prefill(target, target.empty(1), [ids], Taps(final=True))
    assert features.final is not None
    return Spoken(ids, len(prompt), Features(features.final[0, start:].clone(), ()), start)


@cache
def said(eos: int | None = None) -> tuple[HFTarget, list[list[int]]]:
    target = tiny_target(eos=eos)
    return target, [o.token_ids for o in hs.generate(target, PROMPTS, max_new_tokens=NEW)]


def half_taught(head: Head, how: Unroll, vocab: DraftVocab) -> Head:
    """Has seen the first half of each answer until it knew most of it: right at times."""
    target, answers = said()
    texts = [p + a[: NEW // 2] for p, a in zip(PROMPTS, answers, strict=True)]
    _, _, features = prefill(target, target.empty(len(texts)), texts, Taps(final=True))
    assert features.final is not None
    token_BT = nn.utils.rnn.pad_sequence([torch.tensor(t) for t in texts], batch_first=True)
    inside_BT = torch.arange(token_BT.shape[1]) < torch.tensor([[len(t)] for t in texts])
    known_BT = vocab.labels(token_BT.flatten())[1].view_as(token_BT)
    batch = Batch(token_BT, inside_BT & known_BT, Features(features.final.clone(), ()), [len(t) for t in texts])
    readout, optimiser = target.readout(vocab.ids_U), torch.optim.Adam(head.parameters(), 0.02)
    for _ in range(25):
        losses = [
            nn.functional.cross_entropy(readout.project(s.feature_SF), vocab.labels(s.label_S)[0])
            for s in unroll(head, how, batch, DEPTH)
        ]
        optimiser.zero_grad()
        torch.stack(losses).sum().backward()
        optimiser.step()
    return head


FULL, TRIMMED = Full(96), Trimmed([i for i in range(95, -1, -1) if i % 5], 96)
HEADS: dict[str, tuple[Callable[[], Head], Unroll, DraftVocab]] = {
    "medusa": (lambda: Medusa(MedusaConfig(heads=DEPTH), 48, 96), Independent(), FULL),
    "trimmed": (lambda: Medusa(MedusaConfig(heads=DEPTH), 48, 96), Independent(), TRIMMED),
    "recurrent": (lambda: Toy(alone=False), SelfFed(steps=None), FULL),
    "two slots": (lambda: Toy(alone=True, slots=2), SelfFed(steps=None), FULL),
}


@cache
def drafter(name: str, policy: str, eos: int | None = None) -> HeadDrafter:
    return HeadDrafter(taught(name), said(eos)[0], POLICIES[policy], HEADS[name][2])


@cache
def taught(name: str) -> Head:
    make, how, vocab = HEADS[name]
    return half_taught(make(), how, vocab)


def per_text(outputs: Sequence[Any]) -> list[tuple[int, int]]:
    return [(o.stats.tokens - 1, o.stats.passes) for o in outputs]


def demand_same(result: Replayed, outputs: Sequence[Any]) -> None:
    """Text by text, and the sums."""
    assert result.per_text == per_text(outputs)
    accepted: Counter[int] = Counter()
    for output in outputs:
        accepted.update(output.stats.accepted)
    assert result.accepted == dict(accepted)
    assert result.steps == sum(steps for _, steps in result.per_text) == sum(result.accepted.values())
    assert result.tokens == sum(tokens for tokens, _ in result.per_text)
    assert result.tokens == sum((length + 1) * times for length, times in result.accepted.items())


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("name", list(HEADS))
def test_replay_is_decoding(name: str, policy: str) -> None:
    target, answers = said()
    outputs = hs.generate(target, PROMPTS, max_new_tokens=NEW, drafter=drafter(name, policy))
    assert [o.token_ids for o in outputs] == answers
    texts = [spoken(target, p, a) for p, a in zip(PROMPTS, answers, strict=True)]
    result = replay(drafter(name, policy), texts)
    demand_same(result, outputs)
    for text, output in zip(texts, outputs, strict=True):
        alone = replay(drafter(name, policy), [text])
        assert alone.accepted == dict(sorted(output.stats.accepted.items()))
        assert alone.tokens_per_step == output.stats.tokens_per_step
    coverage = Coverage(DEPTH)
    coverage.see(*outputs)
    coverage.demand()
    assert len({o.stats.passes for o in outputs}) > 1


@pytest.mark.parametrize("policy", list(POLICIES))
def test_answers_that_stop_are_replayed_to_their_stop(policy: str) -> None:
    """The stop may stand anywhere in a block: steps are counted as decoding counts them."""
    free = said()[1]
    eos = free[0][17]
    target, answers = said(eos)
    outputs = hs.generate(target, PROMPTS, max_new_tokens=NEW, drafter=drafter("medusa", policy, eos))
    assert [o.token_ids for o in outputs] == answers
    assert len({len(a) for a in answers}) > 1
    texts = [spoken(target, p, a) for p, a in zip(PROMPTS, answers, strict=True)]
    demand_same(replay(drafter("medusa", policy, eos), texts), outputs)


@pytest.mark.parametrize("name", ["medusa", "recurrent"])
def test_answers_of_every_length_side_by_side(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One and two tokens included; they leave the batch one after the other."""
    target, answers = said()
    outputs, texts = [], []
    for count in (1, 2, 3, 4, 5, 17):
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            outputs.append(hs.generate(target, prompt, max_new_tokens=count, drafter=drafter(name, "tree")))
            texts.append(spoken(target, prompt, answer[:count]))
    assert per_text(outputs)[0] == (0, 0)
    assert per_text(outputs)[5] == (1, 1)
    demand_same(replay(drafter(name, "tree"), texts), outputs)
    demand_same(replay(drafter(name, "tree"), texts[::-1]), outputs[::-1])
    for batch in (1, 4):
        monkeypatch.setattr(module, "BATCH", batch)
        demand_same(replay(drafter(name, "tree"), texts), outputs)


def test_nothing_to_replay() -> None:
    target, answers = said()
    for texts in ([], [spoken(target, PROMPTS[0], answers[0][:1])]):
        result = replay(drafter("medusa", "tree"), texts)
        assert result == Replayed([[]] * len(texts))
        assert result.tokens_per_step == 0.0
        assert result.unconditional() == result.conditional() == []


@pytest.mark.parametrize("before", [1, 2, 4])
def test_features_from_a_window_on_are_enough_for_a_head_that_looks_no_further(before: int) -> None:
    target, answers = said()
    starts = [max(0, len(p) - before) for p in PROMPTS]
    assert len(set(starts)) > 2
    texts = [spoken(target, p, a, start) for p, a, start in zip(PROMPTS, answers, starts, strict=True)]
    whole = [spoken(target, p, a) for p, a in zip(PROMPTS, answers, strict=True)]
    for policy in POLICIES:
        assert replay(drafter("medusa", policy), texts) == replay(drafter("medusa", policy), whole)


def test_fewer_nodes_are_fewer_tokens() -> None:
    target, answers = said()
    texts = [spoken(target, p, a) for p, a in zip(PROMPTS, answers, strict=True)]
    few, all_ = (replay(drafter("medusa", "tree"), texts, max_nodes=n) for n in (2, 99))
    assert set(few.accepted) == {0, 1}
    assert few.tokens == all_.tokens
    assert few.steps > all_.steps


# --- what the drafter is handed ----------------------------------------------------------------------------


class Witness(Plain):
    """Checks everything that it is handed: feature t is t, that of layer 5 is 100 + t. Right for `right` tokens."""

    needs = Taps(final=True, layers=(5,))
    kind, shape = Kind.POINT, Shape.CHAIN

    def __init__(self, texts: Sequence[Spoken], right: Sequence[int], extra: int = 0) -> None:
        super().__init__()
        self.texts, self.right, self.extra = texts, right, extra

    def start(self, n_requests: int) -> Any:
        long = [n for n, t in enumerate(self.texts) if len(t.ids) > t.prompt + 1]
        assert n_requests == len(long)
        return [(n, self.texts[n].start, 0) for n in long]  # text, next position, steps

    def absorb(self, state: Any, new: Committed) -> Any:
        out = []
        assert new.features.final is not None
        width = max(map(len, new.tokens))
        assert new.features.final.shape == new.features.layers[0].shape == (len(state), width, 2)
        for b, (n, at, steps) in enumerate(state):
            text, tokens = self.texts[n], new.tokens[b]
            end = at + len(tokens)
            assert tokens == text.ids[at:end]
            assert tokens
            assert new.roots[b] == text.ids[end]
            assert steps or end == text.prompt
            assert len(new.kept[b]) == len(tokens)
            want = torch.arange(at, end).float()[:, None].expand(-1, 2)
            assert torch.equal(new.features.final[b, : len(tokens)], want)
            assert torch.equal(new.features.layers[0][b, : len(tokens)], want + 100)
            out.append((n, end, steps + 1))
        return out

    def draft(self, state: Any, budget: Budget, sampling: Any, coins: Any) -> Draft:
        sprouts = []
        for (n, at, steps), depth in zip(state, budget.depth, strict=True):
            ids = self.texts[n].ids
            assert depth == len(ids) - at - 2 >= 0
            right = ids[at + 1 : at + 1 + self.right[(steps - 1) % len(self.right)]][:depth]
            wrong = [(ids[at + 1 + len(right)] + 1) % 96] if len(right) < depth else []
            sprouts.append(Sprout([ids[at], *right, *wrong], [0, *range(len(right) + len(wrong))]))
        return from_sprouts(sprouts, torch.device("cpu"))

    def select(self, state: Any, requests: Sequence[int]) -> Any:
        assert list(requests) == sorted(requests)
        return [state[r] for r in requests]


def numbered(n: int, prompt: int, start: int = 0) -> Spoken:
    ids = torch.randint(0, 96, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    at_TD = torch.arange(start, n).float()[:, None].expand(-1, 2)
    return Spoken(ids, prompt, Features(at_TD, (at_TD + 100,)), start)


def test_the_drafter_is_handed_what_decoding_would_hand_it() -> None:
    texts = [numbered(20, 4), numbered(9, 7, 6), numbered(3, 2, 1), numbered(4, 2), numbered(31, 12, 9), numbered(5, 1)]
    right = [2, 0, 3]
    result = replay(Witness(texts, right), texts)
    for text, (tokens, steps) in zip(texts, result.per_text, strict=True):
        left, taken = len(text.ids) - text.prompt - 1, []
        while left:
            taken.append(min(right[len(taken) % 3], left - 1))
            left -= taken[-1] + 1
        assert (tokens, steps) == (sum(taken) + len(taken), len(taken))
    assert set(result.accepted) == {0, 1, 2, 3}


class Tree(Witness):
    """A wrong elder sibling, whose child would be right, stands before the right path at every level."""

    def draft(self, state: Any, budget: Budget, sampling: Any, coins: Any) -> Draft:
        sprouts = []
        for n, at, _ in state:
            first, second, *_ = [*self.texts[n].ids[at + 1 :], 0, 0]
            wrong = (first + 1) % 96
            sprouts.append(Sprout([self.texts[n].ids[at], wrong, first, second, wrong, second], [0, 0, 0, 1, 2, 2]))
        depth_N = torch.tensor([0, 1, 1, 2, 2, 2])
        valid_BN = depth_N <= torch.tensor(budget.depth)[:, None]
        return replace(from_sprouts(sprouts, torch.device("cpu")), valid_BN=valid_BN)


def test_the_path_of_a_tree_is_found_and_what_is_invalid_is_not_on_it() -> None:
    texts = [numbered(20, 4), numbered(9, 7), numbered(14, 12), numbered(30, 3)]
    result = replay(Tree(texts, [0]), texts)
    lengths = [len(t.ids) - t.prompt - 1 for t in texts]
    assert result.per_text == [(n, -(-n // 3)) for n in lengths]


# --- figures -----------------------------------------------------------------------------------------------


def test_rates_by_hand() -> None:
    """10 steps: 4 accepted nothing, 3 one, 1 two, 2 three."""
    result = Replayed([[0] * 4 + [1] * 3 + [2], [3] * 2])
    assert (result.steps, result.tokens, result.accepted) == (10, 21, {0: 4, 1: 3, 2: 1, 3: 2})
    assert result.per_text == [(13, 8), (8, 2)] and result.only([1]).tokens == 8
    assert result.tokens_per_step == pytest.approx(2.1)
    assert result.unconditional() == pytest.approx([0.6, 0.3, 0.2])
    assert result.conditional() == pytest.approx([0.6, 0.5, 2 / 3])
    assert 1 + sum(result.unconditional()) == pytest.approx(result.tokens_per_step)
    never = Replayed([[0] * 3])
    assert never.unconditional() == never.conditional() == []
    gap = Replayed([[1, 3]])
    assert gap.conditional() == pytest.approx([1.0, 0.5, 1.0])


# --- held-out answers --------------------------------------------------------------------------------------


def held(place: Path, window: Window) -> Captured:
    target, answers = said()
    texts = [Sample(p + a, [False] * len(p) + [True] * len(a)) for p, a in zip(PROMPTS, answers, strict=True)]
    return capture(target, texts, Taps(final=True), place, window=window)


def naive_ranks(name: str, children: int) -> list[list[int]]:
    """Of every anchor from the prompt's last token on: the rank of each true token below its root."""
    target, answers = said()
    head, vocab = taught(name), HEADS[name][2]
    out = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        text = spoken(target, prompt, answer)
        assert text.features.final is not None
        for anchor in range(len(prompt) - 1, len(text.ids) - 2):
            row = []
            for depth in range(1, DEPTH + 1):
                if anchor + 1 + depth < len(text.ids):
                    z_D = _feature(head, text.features.final[anchor], depth)
                    logits_U = target.readout(vocab.ids_U).project(z_D[None])[0]
                    ranked = vocab.to_target(logits_U.sort(descending=True, stable=True).indices).tolist()[:children]
                    token = text.ids[anchor + 1 + depth]
                    row.append(ranked.index(token) if token in ranked else NEVER)
            out.append(row)
    return out


def _feature(head: Head, anchor_D: Tensor, depth: int) -> Tensor:
    """Medusa's formula, one block."""
    with torch.no_grad():
        return anchor_D + nn.functional.silu(head.weights[0][depth - 1] @ anchor_D + head.biases[0][depth - 1])  # type: ignore[index]


@pytest.mark.parametrize("name", ["medusa", "trimmed"])
@pytest.mark.parametrize("before", [None, DEPTH + 1])
def test_held_out_figures_are_those_of_decoding(tmp_path: Path, name: str, before: int | None) -> None:
    target, _ = said()
    bench = HeldOut(
        target, taught(name), HEADS[name][2], held(tmp_path, Window(before=before)), depths=DEPTH, nodes=12
    )  # fmt: skip
    ranks = naive_ranks(name, 16)
    assert sorted(bench.ranks()) == sorted(ranks)
    assert any(NEVER in row for row in ranks)
    measured = bench.measure(bench.head)
    for depth, share in enumerate(measured.by_depth):
        hits = [row[depth] == 0 for row in ranks if len(row) > depth]
        assert share == pytest.approx(sum(hits) / len(hits))
    outputs = hs.generate(target, PROMPTS, max_new_tokens=NEW, drafter=bench.drafter(bench.tree()))
    steps, tokens = (sum(x) for x in zip(*((o.stats.passes, o.stats.tokens - 1) for o in outputs), strict=True))
    assert measured.tokens_per_step == tokens / steps > 1.3
    assert len(bench.tree()) == 11


def test_a_head_is_measured_again_after_it_has_changed(tmp_path: Path) -> None:
    """The weights are looked at when it is asked, not when it was built."""
    target, _ = said()
    head = half_taught(Medusa(MedusaConfig(heads=DEPTH), 48, 96), Independent(), FULL)
    bench = HeldOut(target, head, FULL, held(tmp_path, Window(before=4)), depths=DEPTH, nodes=12)
    good = bench.measure(head).tokens_per_step
    with torch.no_grad():
        for weight in head.parameters():
            weight += 3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    assert bench.measure(head).tokens_per_step < good
