"""Log-probabilities (bugs.md B25): the target's, one per emitted token, before temperature and processors."""

from __future__ import annotations

import pytest
import torch

import headstart as hs
from headstart.core import Kind
from headstart.errors import BadInput
from headstart.sampling import Sampling
from headstart.testing import Mixed, Oracle, Wrong
from helpers import Coverage, blurred, causal_logits, prompts, stock

CLOSE = 1e-4

WAYS = {
    "greedy": Sampling(logprobs=True, top_logprobs=3),
    "greedy with processors": Sampling(logprobs=True, top_logprobs=3, repetition_penalty=1.3, logit_bias={5: 2.0}),
    "sampled": Sampling(temperature=0.6, top_p=0.9, seed=4, logprobs=True, top_logprobs=3),
    "sampled with processors": Sampling(
        temperature=0.6, frequency_penalty=0.3, bad_words=[[7]], seed=4, logprobs=True, top_logprobs=3
    ),
}


@pytest.fixture
def target(tiny):
    """In fp64: with these large weights two ways to batch an fp32 pass differ by up to 1e-4 themselves."""
    return tiny(dtype=torch.float64)


def drafters(target):
    tree = hs.StaticTree(paths=[(0,), (1,), (0, 0), (0, 1)], kind=Kind.WITHOUT_REPLACEMENT)
    return {
        "plain": (None, None),
        "wrong": (Wrong(target, 4), None),
        "oracle": (Oracle(target, 4), None),
        "mixed": (Mixed(target, 4, [4, 0, 2, 1]), None),
        "mixed tree": (Mixed(target, 4, [4, 0, 2, 1], width=3), hs.Lossless()),
        "lookup": (hs.PromptLookup(depth=4, min_ngram=1, branches=2), None),
        "model": (hs.DraftModel(blurred(0.03), hs.Chain(depth=4, kind=Kind.IID)), None),
        "model tree": (hs.DraftModel(blurred(0.03), tree), None),
        "typical": (Oracle(target, 4), hs.Typical()),
    }


def check(target, ids, out, top):
    """Against one ordinary pass over prompt and answer."""
    logp = torch.log_softmax(causal_logits(target, [*ids, *out.token_ids])[len(ids) - 1 : -1].float(), -1)
    assert len(out.logprobs) == len(out.token_ids) == len(logp)
    for row, token, entry in zip(logp, out.token_ids, out.logprobs, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=CLOSE)
        assert len(entry.top) == top
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
        assert values == pytest.approx(row.topk(top).values.tolist() if top else [], abs=CLOSE)
        assert [float(row[other]) for other, _ in entry.top] == pytest.approx(values, abs=CLOSE)


@pytest.mark.parametrize("way", WAYS)
def test_b25_entries_are_those_of_a_teacher_forced_pass(target, way):
    how = WAYS[way]
    seen = Coverage(4)
    texts = prompts(3, seed=5, low=3)
    for drafter, verifier in drafters(target).values():
        outputs = hs.generate(target, texts, drafter=drafter, verifier=verifier, max_new_tokens=22, sampling=how)
        for ids, out in zip(texts, outputs, strict=True):
            check(target, ids, out, top=3)
        seen.see(*outputs)
    seen.demand()
    assert {0, 2, 4} <= seen.accepted


@pytest.mark.parametrize("accepts", ([0], [2], [4]), ids=("none", "partial", "all"))
def test_b25_equal_to_plain_decoding_for_each_accept_length(target, accepts):
    how = WAYS["greedy"]
    ids = prompts(1, seed=6, low=5)[0]
    plain = hs.generate(target, ids, max_new_tokens=31, sampling=how)
    out = hs.generate(target, ids, drafter=Mixed(target, 4, accepts), max_new_tokens=31, sampling=how)
    assert out.stats.accepted.get(accepts[0], 0) >= 30 // (accepts[0] + 1)
    assert out.token_ids == plain.token_ids
    for ours, other in zip(out.logprobs, plain.logprobs, strict=True):
        assert ours.logprob == pytest.approx(other.logprob, abs=CLOSE)
        assert [x for x, _ in ours.top] == [x for x, _ in other.top]


@pytest.mark.parametrize("way", WAYS)
def test_b25_streamed_entries_are_the_same(target, way):
    how = WAYS[way]
    texts = prompts(3, seed=7)
    for drafter, verifier in drafters(target).values():
        asked = {"drafter": drafter, "verifier": verifier, "max_new_tokens": 14, "sampling": how}
        streamed = [[], [], []]
        for piece in hs.stream(target, texts, **asked):
            assert [entry.token_id for entry in piece.logprobs] == piece.token_ids
            streamed[piece.request] += piece.logprobs
        assert [out.logprobs for out in hs.generate(target, texts, **asked)] == streamed


def test_b25_logprobs_alone_are_legal_and_off_is_off(target):
    ids = prompts(1)[0]
    out = hs.generate(target, ids, drafter=Oracle(target, 4), max_new_tokens=9, sampling=Sampling(logprobs=True))
    check(target, ids, out, top=0)
    assert hs.generate(target, ids, max_new_tokens=3).logprobs is None
    assert all(piece.logprobs == [] for piece in hs.stream(target, ids, max_new_tokens=3))
    with pytest.raises(BadInput, match="top_logprobs"):
        Sampling(top_logprobs=2)


def test_b25_more_alternatives_than_tokens_are_all_tokens(target):
    ids = prompts(1)[0]
    out = hs.generate(target, ids, max_new_tokens=2, sampling=Sampling(logprobs=True, top_logprobs=500))
    check(target, ids, out, top=96)
    assert sum(torch.tensor([value for _, value in out.logprobs[0].top]).exp()) == pytest.approx(1, abs=1e-4)


def test_b25_temperature_and_processors_do_not_show(target):
    """The same tokens, forced by a bias, get the log-probabilities that the model gives them."""
    ids = prompts(1, seed=8)[0]
    how = Sampling(temperature=0.3, seed=1, logit_bias={11: 100.0}, top_k=1, logprobs=True)
    out = hs.generate(target, ids, drafter=hs.PromptLookup(min_ngram=1), max_new_tokens=8, sampling=how)
    assert out.token_ids == [11] * 8
    check(target, ids, out, top=0)
    assert max(entry.logprob for entry in out.logprobs) < -1e-3


@pytest.mark.parametrize("offset", range(6))
def test_b25_an_answer_cut_inside_a_block(target, offset):
    """What is cut behind an EOS has no entries."""
    ids = prompts(1, seed=9, low=6)[0]
    text = stock(target, ids, 20)
    token = next(t for i, t in enumerate(text) if i >= 5 + offset and t not in text[:i])
    how = Sampling(eos=token, logprobs=True, top_logprobs=1)
    out = hs.generate(target, ids, drafter=Oracle(target, 4), max_new_tokens=20, sampling=how)
    assert out.finish_reason == "stop"
    check(target, ids, out, top=1)


def test_b25_rows_of_a_batch_that_want_different_things(target):
    texts = prompts(4, seed=10)
    settings = [
        Sampling(),
        Sampling(logprobs=True, top_logprobs=2),
        Sampling(temperature=0.7, seed=1),
        Sampling(temperature=0.7, seed=2, logprobs=True),
    ]
    drafter = Mixed(target, 4, [[4, 1], [0, 3], [2], [4]])
    outputs = hs.generate(target, texts, drafter=drafter, max_new_tokens=16, sampling=settings)
    assert [out.logprobs is None for out in outputs] == [True, False, True, False]
    check(target, texts[1], outputs[1], top=2)
    check(target, texts[3], outputs[3], top=0)
