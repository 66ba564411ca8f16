"""Where generation stops (bugs.md B01 to B04), and what text, token_ids and finish_reason then are."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import headstart as hs
from headstart.decode import decode
from headstart.generation import Output
from headstart.sampling import Sampling
from headstart.testing import Mixed, Oracle, Wrong
from headstart.verify.lossless import Lossless
from helpers import Coverage, prompts, request, stock

K = 5  # drafted tokens a step
LENGTH = 20
FIRST_OF_SECOND_BLOCK = 1 + (K + 1)  # the prompt's pass emits one token, each full step K + 1


def drafters(target: Any) -> list[Any]:
    """Every way to propose: nothing, all right, any accept length, lookup; chains and trees."""
    pattern = [0, K, 2, 1, K, 4, 3]
    stubs = [Oracle(target, K), Oracle(target, K, 3), Mixed(target, K, pattern), Mixed(target, K, pattern, 3)]
    return [None, *stubs, hs.PromptLookup(min_ngram=1, branches=3)]


def both(target: Any, ids: list[int], **settings: Any) -> Output:
    """Generate and stream, and demand that they say the same."""
    out = hs.generate(target, ids, **settings)
    pieces = list(hs.stream(target, ids, **settings))
    last = pieces[-1].output
    assert last is not None and [p for p in pieces if p.output is not None] == pieces[-1:]
    assert (last.text, last.token_ids, last.finish_reason) == (out.text, out.token_ids, out.finish_reason)
    assert "".join(p.text for p in pieces) == out.text
    assert [token for p in pieces for token in p.token_ids] == out.token_ids
    assert out.stats.tokens == len(out.token_ids)
    return out


def plain_with_new_token_at(target: Any, at: int) -> list[tuple[list[int], list[int]]]:
    """Prompts whose greedy answer has, at position `at`, a token that it did not have before."""
    found = []
    for ids in prompts(40, seed=at):
        answer = hs.generate(target, ids, max_new_tokens=LENGTH).token_ids
        if answer[at] not in answer[:at]:
            found.append((ids, answer))
        if len(found) == 2:
            return found
    pytest.fail(f"no prompt brings a new token at position {at}")


@pytest.fixture
def small(tiny):
    """One layer is enough here: where an answer ends does not depend on the model."""
    return partial(tiny, num_hidden_layers=1)


def test_b01_eos_inside_a_block(small):
    target, coverage = small(), Coverage(K)
    for offset in range(K + 1):
        at = FIRST_OF_SECOND_BLOCK + offset
        for number, (ids, answer) in enumerate(plain_with_new_token_at(target, at)):
            never = next(i for i in range(96) if i not in answer)
            eos = [never, answer[at]] if number else answer[at]
            for drafter in drafters(target):
                out = both(target, ids, drafter=drafter, max_new_tokens=LENGTH, sampling=Sampling(eos=eos))
                assert out.token_ids == answer[: at + 1]
                assert out.text == target.tokenizer.decode(answer[:at])
                assert out.finish_reason == "stop"
                coverage.see(out)
    coverage.demand()


def test_b01_the_first_of_several_eos_ends_the_answer(small):
    target, coverage = small(), Coverage(K)
    for ids in prompts(4, seed=1):
        answer = hs.generate(target, ids, max_new_tokens=LENGTH).token_ids
        eos = [answer[15], answer[13], answer[14]]
        first = next(i for i, token in enumerate(answer) if token in eos)
        assert stock(target, ids, LENGTH, eos_token_id=eos) == answer[: first + 1]
        for drafter in drafters(target):
            out = both(target, ids, drafter=drafter, max_new_tokens=LENGTH, sampling=Sampling(eos=eos))
            assert (out.token_ids, out.finish_reason) == (answer[: first + 1], "stop")
            coverage.see(out)
    coverage.demand()


@pytest.mark.parametrize("width", [1, 3])
def test_b01_nothing_after_eos_is_left_in_the_cache(small, width):
    target = small()
    for offset in range(K + 1):
        at = FIRST_OF_SECOND_BLOCK + offset
        ids, answer = plain_with_new_token_at(target, at)[0]
        one = request(target, ids, LENGTH, Sampling(eos=answer[at]))
        *_, last = decode(target, [one], Oracle(target, K, width), Lossless())
        assert last.emissions[0].tokens == answer[FIRST_OF_SECOND_BLOCK : at + 1]
        assert last.state.roots == [answer[at]]
        assert last.state.cache.lengths == [len(ids) + at]  # all but the EOS itself


def test_b01_eos_as_the_first_token_and_from_the_target(small):
    ids = [5, 17, 60]
    answer = hs.generate(small(), ids, max_new_tokens=4).token_ids
    target = small(eos=answer[0])
    assert target.eos == (answer[0],)
    for drafter in drafters(target):
        out = both(target, ids, drafter=drafter)
        assert (out.token_ids, out.text, out.finish_reason) == (answer[:1], "", "stop")


def test_ignore_eos_and_an_empty_list_go_on(small):
    ids = [5, 17, 60]
    answer = hs.generate(small(), ids, max_new_tokens=LENGTH).token_ids
    target = small(eos=(answer[3], answer[8]))
    for how in (Sampling(ignore_eos=True), Sampling(eos=())):
        for drafter in drafters(target):
            out = both(target, ids, drafter=drafter, max_new_tokens=LENGTH, sampling=how)
            assert (out.token_ids, out.finish_reason) == (answer, "length")
            assert out.text == target.tokenizer.decode(answer)
    assert hs.generate(target, ids, max_new_tokens=LENGTH).finish_reason == "stop"


# (start, end) within the answer: across blocks 1 and 2, inside block 2, of one token, ending on a block's last token
STOPS = [(6, 9), (8, 11), (7, 13), (9, 10)]


@pytest.mark.parametrize(("start", "end"), STOPS)
def test_b02_stop_string_completed_inside_a_block(small, start, end):
    target, coverage = small(), Coverage(K)
    seen = 0
    for ids in prompts(6, seed=2):
        answer = hs.generate(target, ids, max_new_tokens=LENGTH).token_ids
        text = target.tokenizer.decode(answer)
        assert len(text) == LENGTH  # one character a token: the stop string consists of several tokens
        stop = text[start:end]
        if text.find(stop) != start:
            continue
        seen += 1
        for drafter in drafters(target):
            how = Sampling(stop=["\u00ff\u00fe", stop])
            out = both(target, ids, drafter=drafter, max_new_tokens=LENGTH, sampling=how)
            assert out.token_ids == answer[:end]
            assert (out.text, out.finish_reason) == (text[:start], "stop")
            coverage.see(out)
    assert seen >= 3
    coverage.demand()


def test_b02_stop_string_spanning_many_blocks(small):
    target, ids = small(), [13]
    answer = hs.generate(target, ids, max_new_tokens=LENGTH).token_ids
    text = target.tokenizer.decode(answer)
    for drafter in drafters(target):
        out = both(target, ids, drafter=drafter, max_new_tokens=LENGTH, sampling=Sampling(stop=text[1:19]))
        assert (out.token_ids, out.text, out.finish_reason) == (answer[:19], text[:1], "stop")


def test_b02_the_earliest_stop_string_wins(small):
    target, ids = small(), [13]
    answer = hs.generate(target, ids, max_new_tokens=LENGTH).token_ids
    text = target.tokenizer.decode(answer)
    for drafter in drafters(target):
        how = Sampling(stop=[text[10:12], text[7:9], text[8:15]])
        out = both(target, ids, drafter=drafter, max_new_tokens=LENGTH, sampling=how)
        assert (out.token_ids, out.text) == (answer[:9], text[:7])


def test_b02_a_stop_string_never_matches_the_prompt(small):
    target = small()
    tried = 0
    for ids in prompts(6, seed=5, low=4):
        answer = hs.generate(target, ids, max_new_tokens=LENGTH).token_ids
        prompt, text = target.tokenizer.decode(ids), target.tokenizer.decode(answer)
        border, inside = prompt[-2:] + text[:2], prompt[:3]
        if border in text or inside in text:
            continue
        tried += 1
        for drafter in drafters(target):
            how = Sampling(stop=[border, inside])
            out = both(target, ids, drafter=drafter, max_new_tokens=LENGTH, sampling=how)
            assert (out.token_ids, out.text, out.finish_reason) == (answer, text, "length")
    assert tried >= 3


def test_b02_an_unfinished_stop_string_is_handed_out_at_the_end(small):
    target, ids = small(), [13]
    answer = hs.generate(target, ids, max_new_tokens=12).token_ids
    text = target.tokenizer.decode(answer)
    for drafter in drafters(target):
        how = Sampling(stop=text[9:12] + "\u00ff")
        out = both(target, ids, drafter=drafter, max_new_tokens=12, sampling=how)
        assert (out.text, out.finish_reason) == (text, "length")


def test_text_of_bytes_is_the_decoded_tokens_however_it_is_cut(small):
    """Random bytes: characters of several tokens, broken ones, and ids without text."""
    target, coverage = small(vocab_size=300), Coverage(K)
    broken = 0
    for ids in prompts(8, seed=4, vocab=300):
        answer = hs.generate(target, ids, max_new_tokens=LENGTH).token_ids
        whole = target.tokenizer.decode(answer)
        broken += "\ufffd" in whole
        for drafter in drafters(target)[1:]:
            out = both(target, ids, drafter=drafter, max_new_tokens=LENGTH)
            assert (out.token_ids, out.text) == (answer, whole)
            coverage.see(out)
    assert broken
    coverage.demand()


@pytest.mark.parametrize("width", [1, 3])
def test_b03_never_more_than_max_new_tokens(small, width):
    target, coverage = small(), Coverage(K)
    for ids in prompts(2, seed=3):
        reference = stock(target, ids, 13)
        for count in range(1, 14):
            for drafter in (Oracle(target, K, width), Mixed(target, K, [3, 0, K, 1], width), Wrong(target, K, width)):
                out = both(target, ids, drafter=drafter, max_new_tokens=count)
                assert (out.token_ids, out.finish_reason) == (reference[:count], "length")
                coverage.see(out)
    coverage.demand()


def test_b03_the_last_token_is_a_plain_step(small):
    """K + 1 drafted tokens would fit, but one token is left: nothing may be drafted."""
    target = small()
    for count in range(1, 14):
        full, rest = divmod(count - 1, K + 1)
        stats = hs.generate(target, [3, 4], drafter=Oracle(target, K), max_new_tokens=count).stats
        assert stats.drafted == full * K + max(rest - 1, 0)
        assert stats.passes == full + (rest > 0)


@pytest.mark.parametrize("depth", [1, 3, 6])
def test_b04_min_new_tokens(small, depth):
    target, coverage = small(), Coverage()
    coverage.depths = {depth}
    banned = 0
    for ids in prompts(2, seed=8, low=3):
        answer = hs.generate(target, ids, max_new_tokens=LENGTH).token_ids
        eos = answer[3]
        for least in (0, 2, 3, 4, 5, 8):
            how = Sampling(eos=eos, min_new_tokens=least)
            reference = stock(target, ids, LENGTH, eos_token_id=eos, min_new_tokens=least or None)
            banned += reference[:4] != answer[:4]
            for drafter in (None, *(make(target, depth) for make in (Oracle, Wrong))):
                out = hs.generate(target, ids, drafter=drafter, max_new_tokens=LENGTH, sampling=how)
                assert out.token_ids == reference
                assert eos not in out.token_ids[: least or 0]
                coverage.see(out)
            mixed = Mixed(target, depth, [0, 1, depth], width=2)
            out = both(target, ids, drafter=mixed, max_new_tokens=LENGTH, sampling=how)
            assert out.token_ids == reference
            coverage.see(out)
    assert banned
    if depth > 1:
        coverage.demand()


def test_a_stop_inside_the_budget_wins(small):
    target = small()
    for at in (6, 7, 10):
        ids, answer = plain_with_new_token_at(target, at)[0]
        text = target.tokenizer.decode(answer)
        stop = text[at - 1 : at + 1]
        assert text.find(stop) == at - 1
        for drafter in drafters(target):
            for how in (Sampling(eos=answer[at]), Sampling(stop=stop)):
                reasons = [
                    both(target, ids, drafter=drafter, max_new_tokens=count, sampling=how).finish_reason
                    for count in (at, at + 1, at + 2)
                ]
                assert reasons == ["length", "stop", "stop"]
