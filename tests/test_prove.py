"""The proof: its numbers are uniform when all is well, every control is caught, and the verdict follows."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from typing import Any

import pytest
import torch

import headstart as hs
from headstart.core import Kind, Shape
from headstart.drafters.base import Drafter
from headstart.drafters.draft_model import DraftModel
from headstart.prove import proof as module
from headstart.prove.controls import GREEDY, SAMPLED
from headstart.prove.greedy import Divergence, Identity, identity
from headstart.prove.places import Place, examine, kolmogorov, mean, normal, place, verdict
from headstart.prove.proof import LEVEL, Caught, judge, prove
from headstart.prove.sampled import Checked, check, look_up, speak
from headstart.testing.exact import random_table
from headstart.verify.lossless import Lossless
from headstart.verify.target_only import TargetOnly
from helpers import blurred, prompts

PATHS = [(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]
P = torch.tensor([0.1, 0.0, 0.4, 0.3, 0.2])


# --- places


def test_a_place_by_hand() -> None:
    at = place(P, 3, [], 0.5)
    assert (at.at, at.middle, at.mass) == (pytest.approx(0.4 + 0.15), pytest.approx(0.5 + 0.15 - 0.5), 0.0)
    middles = torch.tensor([place(P, t, [], 0.5).middle for t in range(5)])
    assert float(P @ middles) == pytest.approx(0.0, abs=1e-6)
    assert float(P @ middles**2) == pytest.approx(at.variance, abs=1e-6)
    at = place(P, 3, [4, 3], 0.5)
    assert (at.at, at.mass, at.accepted) == (pytest.approx(0.2 + 0.15), pytest.approx(0.5), True)
    at = place(P, 0, [4, 3], 0.25)
    assert (at.at, at.accepted) == (pytest.approx(0.5 + 0.4 + 0.025), False)
    assert place(P, 1, [], 0.5).possible is False and place(P, 0, [1], 0.5).possible is True
    tie = torch.tensor([0.25, 0.25, 0.5])
    assert [place(tie, t, [], 0.0).at for t in range(3)] == pytest.approx([0.5, 0.75, 0.0])


@pytest.mark.parametrize("tried", [[], [3], [4, 0], [2, 3, 4]])
def test_places_of_draws_from_the_law_are_uniform(tried: list[int]) -> None:
    rng = random.Random(len(tried))
    tokens = rng.choices(range(5), P.tolist(), k=4000)
    places = [place(P, t, tried, rng.random()) for t in tokens]
    assert kolmogorov([p.at for p in places]) > 0.01


def test_kolmogorov_knows_the_tables() -> None:
    """Critical values of the limit law, and of n = 20 (0.294 at 5 %, 0.352 at 1 %; exact tables)."""
    for t, p in ((1.3581, 0.05), (1.6276, 0.01), (1.2238, 0.10)):
        n = 2000
        gap = t / (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n))
        assert kolmogorov([max(0.0, (i + 1) / n - gap) for i in range(n)]) == pytest.approx(p, rel=2e-3)
    for gap, p in ((0.294, 0.05), (0.352, 0.01)):
        values = [max(0.0, (i + 1) / 20 - gap) for i in range(20)]  # the largest gap is exactly that
        assert kolmogorov(values) == pytest.approx(p, rel=0.08)
    assert kolmogorov([(i + 0.5) / 1000 for i in range(1000)]) == 1.0
    assert kolmogorov([]) == 1.0


def test_means_and_normals() -> None:
    assert normal(1.959964) == pytest.approx(0.05, rel=1e-5) and normal(-2.575829) == pytest.approx(0.01, rel=1e-5)
    assert mean([0.5] * 40) == 1.0
    assert mean([0.6] * 300) == pytest.approx(normal(0.1 * math.sqrt(3600)))


def test_too_few_places_say_nothing_and_impossible_tokens_say_all() -> None:
    few = [[Place(0.5, 0.0, 0.08, 0.0, False, True)] * 19]
    assert examine(few) == {}
    assert (verdict({}, 0), verdict({"a": 0.02, "b": 0.5}, 0), verdict({"a": 0.9}, 1)) == (1.0, 0.04, 0.0)


# --- sampled text


def together(parts: Any) -> tuple[list[Any], dict[int, int]]:
    """All batches as one."""
    answers, accepted = zip(*parts, strict=True)
    return [a for some in answers for a in some], dict(sum(accepted, Counter()))


def drafting(noise: float = 0.05) -> Drafter:
    return DraftModel(blurred(noise), policy=hs.StaticTree(paths=PATHS))


def test_what_was_tried_is_what_was_drafted(tiny: Any) -> None:
    target, drafter = tiny(), drafting()
    asked = prompts(20, seed=2)
    answers, accepted = together(
        speak(target, drafter, TargetOnly(), asked, hs.Sampling(temperature=1.0, seed=3, eos=()), 20)
    )
    assert [a.prompt for a in answers] == asked and all(len(a.tokens) == len(a.tried) == 20 for a in answers)
    assert all(a.tried[0] == [] for a in answers), "the prompt's own pass has no draft"
    assert max(accepted) >= 2
    taken = sum(t in tried for a in answers for t, tried in zip(a.tokens, a.tried, strict=True))
    assert taken == sum(k * n for k, n in accepted.items())
    drawn = DraftModel(blurred(0.05), policy=hs.Chain(depth=3, kind=Kind.IID))
    answers, _ = together(speak(target, drawn, Lossless(), asked, hs.Sampling(temperature=1.0, seed=3), 20))
    assert not any(tried for a in answers for tried in a.tried)


@pytest.mark.parametrize("chunk", [1, 7, 128])
def test_laws_are_those_of_the_text(tiny: Any, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from headstart.prove import sampled
    from helpers import causal_logits

    monkeypatch.setattr(sampled, "CHUNK", chunk)
    target = tiny()
    how = hs.Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.3, seed=5, eos=())
    (answer,), _ = together(speak(target, drafting(), TargetOnly(), [[5]], how, 24))
    places = look_up(target, answer, how, [0.25] * 24)
    logits = causal_logits(target, [*answer.prompt, *answer.tokens])
    for i, (token, found) in enumerate(zip(answer.tokens, places, strict=True)):
        history = hs.sampling.History(answer.prompt)
        for before in answer.tokens[:i]:
            history.emit(before)
        law_V = hs.sampling.law(logits[len(answer.prompt) - 1 + i], how, history, [])
        assert found.at == pytest.approx(place(law_V, token, answer.tried[i], 0.25).at, abs=1e-4)


def test_an_exact_decoder_passes() -> None:
    """p-values of 40 runs on a table target, two verifiers: none below 1e-3, and not crowded below 0.2."""
    table = random_table(8, 1, seed=4)
    values = []
    for seed in range(20):
        for verifier in (TargetOnly(), Lossless()):
            how = hs.Sampling(temperature=0.8, seed=seed)
            drafter = hs.PromptLookup(depth=3)
            found = check(table, drafter, verifier, [[1, 2, 3, 1, 2]] * 8, how, 60)
            values.append(found.p_value)
    assert min(values) > 1e-3 and sum(v < 0.2 for v in values) <= 16


@pytest.mark.parametrize("control", SAMPLED, ids=lambda c: c.name)
@pytest.mark.parametrize("seed", range(3))
def test_sampled_controls_are_caught(tiny: Any, control: Any, seed: int) -> None:
    target, drafter = tiny(), drafting()
    how = hs.Sampling(temperature=0.7, top_p=0.9, seed=seed, eos=())
    assert control.applies(drafter, how)
    found = module._sampled_control(control, target, drafter, prompts(32, seed=seed), how, 94)
    assert found.caught and found.p_value < LEVEL and found.tokens <= 3008


@pytest.mark.parametrize("control", GREEDY, ids=lambda c: c.name)
def test_greedy_controls_are_caught(tiny: Any, control: Any) -> None:
    target, drafter = tiny(), drafting()
    asked = prompts(12, seed=6, low=4)
    plain = identity(target, drafter, asked, 40)
    assert plain.identical == 12 and plain.tokens_per_step > 1.2
    found = module._greedy_control(control, target, drafter, asked, plain.plain, 40)
    assert found.caught and found.tokens < 480
    honest = control._replace(target=lambda target: target)
    assert not module._greedy_control(honest, target, drafter, asked, plain.plain, 40).caught


def test_controls_that_cannot_show_are_left_out() -> None:
    chain, cold = hs.PromptLookup(depth=3), hs.Sampling(temperature=1.0)
    assert chain.shape is Shape.CHAIN
    assert [c.name for c in GREEDY if c.applies(chain, cold)] == [c.name for c in GREEDY[:2]]
    assert [c.applies(chain, cold) for c in SAMPLED] == [True, True, False, True]


# --- greedy text


def test_a_divergence_is_located_and_weighed(tiny: Any) -> None:
    from headstart.prove.greedy import parting

    target = tiny()
    plain = hs.generate(target, [1, 2, 3], max_new_tokens=12).token_ids
    other = [*plain[:7], (plain[7] + 1) % 96, *plain[8:]]
    found = parting(target, 4, [1, 2, 3], plain, other)
    assert (found.prompt, found.at, found.plain, found.speculative) == (4, 7, plain[7], other[7])
    assert found.gap > 0 and not found.rounding and found.noise < 1e-3
    overrun = parting(target, 0, [1, 2, 3], plain, plain[:9])
    assert overrun.at == 8 and not overrun.rounding, "an answer of another length is no near tie"
    assert found._replace(gap=2 * found.noise).rounding


# --- the verdict


def result(divergences: list[Divergence] = [], rate: int = 1) -> Identity:  # noqa: B006
    return Identity(10, 10 - len(divergences), divergences, [], 110, {rate: 50})


def test_the_verdict_follows() -> None:
    far, near = Divergence(3, 5, 1, 2, 0.5, 1e-5), Divergence(3, 5, 1, 2, 1e-5, 1e-5)
    good = [(hs.Sampling(temperature=1.0), Checked(100, {}, 0, {"accepts: number": 0.3}, 0.3))]
    bad = [(hs.Sampling(temperature=1.0), Checked(100, {}, 0, {"accepts: number": 1e-9}, 1e-8))]
    caught = [Caught("x", "greedy", True, 9, None)]
    missed = [Caught("x", "greedy", False, 900, None)]
    assert judge(result(), None, good, caught) == ("pass", [])
    assert judge(result([near]), result([near]), good, caught)[0] == "pass"
    for arms in ((result([far]), None), (result(), result([far]))):
        said, reasons = judge(*arms, good, caught)
        assert said == "fail" and "prompt 3, token 5" in reasons[0]
    assert judge(result(), None, bad, caught)[0] == "fail"
    said, reasons = judge(result(), None, good, missed)
    assert said == "inconclusive" and "'x' was not caught in 900 tokens" in reasons[0]
    slow = Identity(10, 10, [], [], 110, {0: 95, 1: 5})
    said, reasons = judge(slow, None, good, caught)
    assert said == "inconclusive" and "1.00 tokens per step" in reasons[0]


def test_a_whole_proof(tiny: Any) -> None:
    target = tiny()
    found = prove(target, lambda at: drafting(0.03), prompts(12, seed=1, low=4), max_new_tokens=60, sampled_tokens=3000)
    assert found.verdict == "pass", found.reasons
    record = json.loads(json.dumps(found.record()))
    assert record["greedy"]["identical"] == record["greedy"]["prompts"] == 12
    assert [c["caught"] for c in record["negative_controls"]] == [True] * 8
    assert {"verdict", "greedy", "sampling", "negative_controls", "tokens_per_step"} <= record.keys()
