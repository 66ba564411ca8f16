"""Batches with ragged acceptance (bugs.md B15): one pass a step for all, each row as if it were alone."""

from __future__ import annotations

from collections import Counter

import pytest

import headstart as hs
from headstart.core import Kind
from headstart.errors import BadInput
from headstart.sampling import Sampling
from headstart.testing import Mixed, Oracle
from headstart.verify.target_only import TargetOnly
from helpers import Coverage, blurred, prompts, spied, stock

PATTERNS = [[0, 4, 2], [4], [3, 0], [1, 4, 4, 0]]


def alone(target, ids, number, width, **settings):
    """Row `number` of the batch, run by itself with the same pattern."""
    return hs.generate(target, ids, drafter=Mixed(target, 4, PATTERNS[number % 4], width), **settings)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("width", [1, 3])
def test_b15_each_row_equals_its_own_run(tiny, family, width):
    """Prompts of 1, 3, 9 and 17 tokens; row 2 ends early, inside its first block."""
    target, coverage = tiny(family), Coverage(4)
    for seed in (3,):
        texts = [ids[:n] for ids, n in zip(prompts(4, seed=seed, low=17, high=17), (1, 3, 9, 17), strict=True)]
        early = stock(target, texts[2], 2)[1]
        settings = [Sampling(), Sampling(), Sampling(eos=early), Sampling()]
        pieces = hs.stream(
            target, texts, drafter=Mixed(target, 4, PATTERNS, width), max_new_tokens=30, sampling=settings
        )
        outputs = coverage.see_steps(pieces)
        for number, (ids, out, how) in enumerate(zip(texts, outputs, settings, strict=True)):
            single = alone(target, ids, number, width, max_new_tokens=30, sampling=how)
            assert (out.token_ids, out.text, out.finish_reason) == (single.token_ids, single.text, single.finish_reason)
            assert (out.stats.accepted, out.stats.drafted) == (single.stats.accepted, single.stats.drafted)
            assert out.token_ids == stock(target, ids, 30, eos_token_id=list(how.eos_ids) or None)
        assert [out.finish_reason for out in outputs] == ["length", "length", "stop", "length"]
        assert len(outputs[2].token_ids) <= 2
    coverage.demand(ragged=True)


@pytest.mark.parametrize("width", [1, 3])
def test_b15_one_target_pass_a_step_for_the_whole_batch(tiny, monkeypatch, width):
    target, twin = tiny(), tiny(seed=0)
    texts = prompts(7, seed=6)
    passes = spied(monkeypatch, target, "extend")
    outputs = hs.generate(target, texts, drafter=Mixed(twin, 4, PATTERNS, width), max_new_tokens=25)
    steps = Counter(out.stats.passes for out in outputs)
    assert len(steps) > 2, "all rows took the same number of steps"
    assert len(passes) == 1 + max(steps)  # the prompts' pass, then one a step
    rows = [len(tokens) for _, tokens, _, _ in passes]
    assert rows[0] == 7 and rows == sorted(rows, reverse=True)
    assert rows[1:] == [sum(n >= step for n in steps.elements()) for step in range(1, max(steps) + 1)]


def test_b15_plain_decoding_of_a_batch_is_one_pass_a_token(tiny, monkeypatch):
    target = tiny()
    passes = spied(monkeypatch, target, "extend")
    outputs = hs.generate(target, prompts(5, seed=6), max_new_tokens=9)
    assert len(passes) == 9
    assert all(out.stats.tokens_per_step == 1 and out.stats.accepted == {0: 8} for out in outputs)


def test_a_batch_of_64(tiny):
    target, coverage = tiny(), Coverage(4)
    texts = prompts(64, seed=7)
    outputs = coverage.see_steps(
        hs.stream(target, texts, drafter=Mixed(target, 4, PATTERNS, width=2), max_new_tokens=9)
    )
    assert len(outputs) == 64
    for ids, out in zip(texts, outputs, strict=True):
        assert out.token_ids == stock(target, ids, 9)
    coverage.demand(distinct=60, ragged=True)


def test_a_batch_beyond_what_the_target_takes_is_refused(tiny):
    with pytest.raises(BadInput, match=r"257.*256"):
        hs.generate(tiny(), prompts(257))
    with pytest.raises(BadInput, match=r"260.*256"):  # 52 prompts, 5 samples each
        hs.generate(tiny(), prompts(52), sampling=Sampling(temperature=1.0, n=5))


MIXED_ROWS = [
    Sampling(),
    Sampling(temperature=0.8, seed=1),
    Sampling(repetition_penalty=1.3, frequency_penalty=0.4),
    Sampling(temperature=1.2, top_p=0.9, seed=2),
    Sampling(temperature=0.7, top_k=8, presence_penalty=0.5, seed=3, logprobs=True, top_logprobs=2),
    Sampling(min_new_tokens=20, eos=(1, 2, 3, 4, 5, 6, 7, 8)),
]


@pytest.mark.parametrize("width", [1, 3])
def test_rows_that_sample_beside_greedy_ones(tiny, width):
    """With a seed each row is the text of its own run, whatever else is in the batch."""
    target, coverage = tiny(), Coverage(4)
    texts = prompts(6, seed=8)
    together = hs.stream(
        target, texts, drafter=Mixed(target, 4, PATTERNS, width), max_new_tokens=25, sampling=MIXED_ROWS
    )
    for number, (ids, out, how) in enumerate(zip(texts, coverage.see_steps(together), MIXED_ROWS, strict=True)):
        single = alone(target, ids, number, width, max_new_tokens=25, sampling=how)
        assert (out.token_ids, out.finish_reason) == (single.token_ids, single.finish_reason)
        assert out.stats.accepted == single.stats.accepted
        assert (out.logprobs is None) == (single.logprobs is None) == (not how.logprobs)
        for ours, theirs in zip(out.logprobs or [], single.logprobs or [], strict=True):
            assert ours.token_id == theirs.token_id
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    coverage.demand(ragged=True)


TREE = hs.StaticTree(paths=[(0,), (1,), (0, 0), (0, 1), (0, 0, 0)], kind=Kind.WITHOUT_REPLACEMENT)
POLICIES = {"chain": hs.Chain(depth=4, kind=Kind.IID), "point": hs.Chain(depth=4), "tree": TREE}


@pytest.mark.parametrize("name", POLICIES)
def test_b15_sampled_rows_with_a_draft_model(tiny, name):
    """Rows near their end draft less than the others; that must not touch their randomness."""
    target, coverage = tiny(), Coverage(POLICIES[name].depth)
    drafter = hs.DraftModel(blurred(0.05), POLICIES[name])
    texts = prompts(6, seed=9)
    settings = [Sampling(temperature=t, seed=n) for n, t in enumerate((0.5, 1.0, 0.0, 0.7, 1.0, 0.6))]
    outputs = coverage.see_steps(hs.stream(target, texts, drafter=drafter, max_new_tokens=25, sampling=settings))
    for ids, out, how in zip(texts, outputs, settings, strict=True):
        single = hs.generate(target, ids, drafter=drafter, max_new_tokens=25, sampling=how)
        assert (out.token_ids, out.stats.accepted) == (single.token_ids, single.stats.accepted)
        if not how.temperature:
            assert out.token_ids == stock(target, ids, 25)
    coverage.demand(ragged=True)


def test_b15_target_only_sampling_gives_the_text_of_plain_decoding(tiny):
    """One draw a token: the same seed, the same text, with any draft and in any company."""
    target, coverage = tiny(), Coverage(4)
    texts = prompts(6, seed=10)
    settings = [Sampling(temperature=0.5, seed=n) for n in range(6)]
    plain = [
        hs.generate(target, ids, max_new_tokens=25, sampling=how) for ids, how in zip(texts, settings, strict=True)
    ]
    for drafter in (Oracle(target, 4), Mixed(target, 4, PATTERNS, width=3)):
        pieces = hs.stream(target, texts, drafter=drafter, max_new_tokens=25, sampling=settings, verifier=TargetOnly())
        assert [out.token_ids for out in coverage.see_steps(pieces)] == [out.token_ids for out in plain]
    coverage.demand(ragged=True)


def test_several_samples_of_each_prompt_are_rows_of_the_batch(tiny):
    target, texts = tiny(), prompts(3, seed=11)
    how = Sampling(temperature=1.0, seed=5, n=4)
    outputs = hs.generate(target, texts, drafter=hs.PromptLookup(min_ngram=1), max_new_tokens=10, sampling=how)
    assert [len(out.samples) for out in outputs] == [4, 4, 4]
    assert all(len({tuple(s.token_ids) for s in out.samples}) > 1 for out in outputs)
    single = hs.generate(target, texts[1], drafter=hs.PromptLookup(min_ngram=1), max_new_tokens=10, sampling=how)
    assert [s.token_ids for s in single.samples] == [s.token_ids for s in outputs[1].samples]


def test_messages_strings_and_ids_as_batches(tiny):
    target = tiny()
    chat = [{"role": "user", "content": "hello"}]
    for batch in (["one", "another one"], [chat, [*chat, *chat]], [[3], [4, 5]]):
        outputs = hs.generate(target, batch, max_new_tokens=5)
        assert [out.token_ids for out in outputs] == [
            hs.generate(target, one, max_new_tokens=5).token_ids for one in batch
        ]
    assert isinstance(hs.generate(target, ["one"], max_new_tokens=5), list)
