"""Chats that keep their caches: the same answers as from scratch, and only what is new is run."""

from __future__ import annotations

from typing import Any

import pytest

import headstart as hs
from headstart.core import Kind
from headstart.sampling import Sampling
from headstart.testing import Mixed, tiny_target
from helpers import Coverage, spied

TURNS = ["Tell me something new.", "Why?", "Tell me something new, once more: why, why, why?"]
SYSTEM = [{"role": "system", "content": "You are terse."}]
LENGTH = 20


def drafters() -> dict[str, Any]:
    """Each with models of its own, so that passes of the target can be counted."""
    return {
        "none": None,
        "lookup": hs.PromptLookup(min_ngram=1),
        "lookup tree": hs.PromptLookup(min_ngram=1, branches=3),
        "mixed": Mixed(tiny_target(), 4, [0, 4, 2, 1, 4]),
        "mixed tree": Mixed(tiny_target(), 4, [0, 4, 2, 1, 4], width=3),
        "model": hs.DraftModel(tiny_target(), hs.Chain(depth=3)),
        "stranger": hs.DraftModel(tiny_target("gpt2"), hs.StaticTree(paths=[(0,), (1,), (0, 0)])),
    }


@pytest.mark.parametrize(
    ("name", "messages"), [*((name, []) for name in drafters()), ("lookup", SYSTEM), ("mixed", SYSTEM)]
)
def test_each_turn_equals_a_fresh_run_and_runs_only_what_is_new(tiny, monkeypatch, name, messages):
    target, coverage = tiny(), Coverage(4)
    session = hs.Session(target, drafter=drafters()[name], max_new_tokens=LENGTH, messages=messages)
    history, cached = list(messages), 0
    for turn in TURNS:
        history.append({"role": "user", "content": turn})
        fresh = hs.generate(target, history, max_new_tokens=LENGTH)
        with monkeypatch.context() as patch:
            passes = spied(patch, target, "extend")
            out = session.send(turn)
        assert (out.text, out.token_ids, out.finish_reason) == (fresh.text, fresh.token_ids, fresh.finish_reason)
        assert out.stats.prompt_tokens == fresh.stats.prompt_tokens
        assert out.stats.reused_tokens == cached, "all that the cache held was a prefix of this conversation"
        new = [tokens.shape[1] for _, tokens, _, _ in passes]
        assert new[0] == out.stats.prompt_tokens - cached  # the prompt's pass runs the new tokens only
        assert len(new) == 1 + out.stats.passes and sum(new[1:]) == out.stats.passes + out.stats.drafted
        history.append({"role": "assistant", "content": out.text})
        assert session.messages == history
        cached = out.stats.prompt_tokens + len(out.token_ids) - 1  # the last token was never run
        coverage.see(out)
    assert cached > 0 and len(coverage.tokens) >= 20
    if "mixed" in name:
        coverage.demand()


@pytest.mark.parametrize("name", ["none", "lookup", "mixed tree", "model", "stranger"])
def test_a_template_that_rewrites_history(tiny, monkeypatch, name):
    """It counts the messages and drops earlier answers up to a letter: little is shared, the answers are right."""
    target = tiny()
    template = (
        "{{ 'system: be brief | ' }}{% for m in messages %}{{ m.role + '=' }}"
        "{{ m.content if m.role == 'user' else m.content[:loop.index] }}{{ ' | ' + messages | length | string }}"
        "{% endfor %}{% if add_generation_prompt %}{{ ' assistant: ' }}{% endif %}"
    )
    monkeypatch.setattr(target.tokenizer, "chat_template", template)
    session = hs.Session(target, drafter=drafters()[name], max_new_tokens=LENGTH)
    reused, prompt = [], []
    for turn in TURNS:
        messages = [*session.messages, {"role": "user", "content": turn}]
        fresh = hs.generate(target, messages, max_new_tokens=LENGTH)
        drafted = hs.generate(target, messages, drafter=drafters()[name], max_new_tokens=LENGTH)
        out = session.send(turn)
        assert (out.text, out.token_ids) == (fresh.text, fresh.token_ids)
        if "mixed" not in name:  # what a drafter kept from earlier turns is as good as if it were new
            assert out.stats.accepted == drafted.stats.accepted
        reused.append(out.stats.reused_tokens)
        prompt.append(out.stats.prompt_tokens)
    assert reused[0] == 0 and 0 < reused[1] < prompt[0] and 0 < reused[2] < prompt[1]


def test_history_rewritten_to_something_shorter(tiny):
    """The new conversation is a prefix of the cached one: at least one token is run, to have logits."""
    target = tiny()
    for drafter in drafters().values():
        session = hs.Session(target, drafter=drafter, max_new_tokens=LENGTH)
        first = session.send("hello")
        session.messages.clear()
        again = session.send("hello")
        assert again.token_ids == first.token_ids
        assert again.stats.reused_tokens == again.stats.prompt_tokens - 1
        session.messages.clear()
        other = session.send("help")
        assert other.token_ids == hs.generate(target, session.messages[:1], max_new_tokens=LENGTH).token_ids
        assert 0 < other.stats.reused_tokens < other.stats.prompt_tokens - 1


@pytest.mark.parametrize("family", ["gemma3", "gpt2"])
def test_other_families(family):
    """Sliding windows: the cache must give back what lies behind the window."""
    target, coverage = tiny_target(family), Coverage(4)
    session = hs.Session(target, drafter=Mixed(target, 4, [0, 4, 2, 1, 4]), max_new_tokens=40)
    for turn in TURNS:
        fresh = hs.generate(target, [*session.messages, {"role": "user", "content": turn}], max_new_tokens=40)
        out = session.send(turn)
        assert out.token_ids == fresh.token_ids
        coverage.see(out)
    coverage.demand()


@pytest.mark.parametrize("kind", [Kind.POINT, Kind.IID])
def test_sampled_turns_equal_fresh_runs_with_the_same_seed(tiny, kind):
    target = tiny()
    drafter = hs.DraftModel(tiny_target(seed=0), hs.Chain(depth=3, kind=kind))
    how = Sampling(temperature=0.8, seed=11)
    session = hs.Session(target, drafter=drafter, max_new_tokens=LENGTH, sampling=how)
    texts = set()
    for turn in TURNS:
        history = [*session.messages, {"role": "user", "content": turn}]
        fresh = hs.generate(target, history, drafter=drafter, max_new_tokens=LENGTH, sampling=how)
        out = session.send(turn)
        assert out.token_ids == fresh.token_ids
        texts.add(out.text)
    assert len(texts) == 3


def test_a_turn_that_ends_by_eos_or_a_stop_string(tiny):
    target = tiny()
    for drafter in (drafters()[name] for name in ("lookup", "mixed tree", "model")):
        answer = hs.generate(target, [{"role": "user", "content": TURNS[0]}], max_new_tokens=LENGTH)
        for how in (Sampling(eos=answer.token_ids[7]), Sampling(stop=answer.text[6:8])):
            session = hs.Session(target, drafter=drafter, max_new_tokens=LENGTH, sampling=how)
            for turn in TURNS:
                history = [*session.messages, {"role": "user", "content": turn}]
                fresh = hs.generate(target, history, max_new_tokens=LENGTH, sampling=how)
                out = session.send(turn)
                assert (out.text, out.token_ids, out.finish_reason) == (
                    fresh.text,
                    fresh.token_ids,
                    fresh.finish_reason,
                )
            assert session.messages[1]["content"] == answer.text[: len(session.messages[1]["content"])] != answer.text


def test_streamed_and_sent_turns_are_the_same(tiny):
    sent, streamed = (hs.Session(tiny(), drafter=hs.PromptLookup(), max_new_tokens=LENGTH) for _ in range(2))
    for turn in TURNS:
        pieces = list(streamed.stream(turn))
        assert "".join(p.text for p in pieces) == sent.send(turn).text
    assert streamed.messages == sent.messages


def test_a_chat_that_outgrows_the_context_is_refused_and_stays_usable(tiny):
    target = tiny(max_positions=128)
    session = hs.Session(target, drafter=hs.PromptLookup(min_ngram=1), max_new_tokens=LENGTH)
    session.send("short")
    before = list(session.messages)
    with pytest.raises(hs.HeadstartError, match="128"):
        session.send("long " * 40)
    assert session.messages == before
    fresh = hs.generate(target, [*before, {"role": "user", "content": "ok"}], max_new_tokens=LENGTH)
    assert session.send("ok").token_ids == fresh.token_ids
