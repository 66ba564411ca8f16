"""Bad input (issue 2): a clear message before any work is done, and nothing lost afterwards."""

from __future__ import annotations

from typing import Any

import pytest

import headstart as hs
from headstart.errors import BadInput, Unsupported
from headstart.sampling import Sampling
from headstart.targets.hf import HFTarget
from headstart.testing import Mixed, tiny_target
from helpers import prompts, spied

CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture
def idle(tiny, monkeypatch):
    """A target that must not be run."""
    target = tiny()
    passes = spied(monkeypatch, target, "extend")
    yield target
    assert not passes, "work was done before the input was refused"


def refused(target: Any, prompt: Any, match: str, **settings: Any) -> None:
    """By generate, and by stream at once: not at the first piece."""
    for call in (hs.generate, hs.stream):
        with pytest.raises(BadInput, match=match):
            call(target, prompt, **settings)


@pytest.mark.parametrize("prompt", ["", [], [""], ["text", ""], [[]], [[3], []], (), [CHAT, []]], ids=repr)
def test_empty_prompts_and_batches(idle, prompt):
    refused(idle, prompt, "empty")


@pytest.mark.parametrize("content", ["", " \n"])
def test_an_empty_message(idle, content):
    refused(idle, [{"role": "user", "content": content}], "empty")
    with pytest.raises(BadInput, match="empty"):
        hs.Session(idle).send(content)


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        5,
        {},
        {"role": "user"},
        [1.5],
        [None],
        [[None]],
        [["a"]],
        [True],
        [[[1]]],
        ["a", [1]],
        [3, "a"],
        [[3, "a"]],
    ],
    ids=repr,
)
def test_what_is_no_prompt(idle, prompt):
    refused(idle, prompt, "prompt")


@pytest.mark.parametrize("ids", [[-1], [96], [3, 4, 1000], [[3], [96]]])
def test_ids_outside_the_vocabulary(idle, ids):
    refused(idle, ids, r"outside.*0\.\.95")


@pytest.mark.parametrize(
    "message", [{}, {"role": "user"}, {"content": "x"}, {"role": "user", "content": None}], ids=repr
)
def test_messages_without_role_or_content(idle, message):
    refused(idle, [message], "role.*content")
    refused(idle, [CHAT, [message]], "role.*content")


@pytest.mark.parametrize("length", [512, 513, 2000])
def test_a_prompt_longer_than_the_context(idle, length):
    refused(idle, [3] * length, rf"{length} tokens.*512")
    refused(idle, "a" * length, rf"{length} tokens.*512")
    refused(idle, [[3], [3] * length], rf"{length} tokens.*512")


@pytest.mark.parametrize("budget", [0, -1, True, 1.5, None, "12"])
def test_budgets_that_are_none(idle, budget):
    refused(idle, [3], "max_new_tokens", max_new_tokens=budget)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": 1.0}, "min_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"seed": -1}, "seed"),
        ({"n": 0}, "n=0"),
        ({"stop": ""}, "stop"),
        ({"stop": ["end", ""]}, "stop"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ""}, "bad_words"),
        ({"bad_words": [[]]}, "bad_words"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "Contradictory.*logprobs"),
        ({"n": 2}, "Contradictory.*temperature"),
        ({"eos": 3, "ignore_eos": True}, "Contradictory.*eos"),
    ],
    ids=repr,
)
def test_sampling_settings_that_cannot_be_honoured(settings, match):
    with pytest.raises(BadInput, match=match):
        Sampling(**settings)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"min_new_tokens": 9}, "min_new_tokens=9.*max_new_tokens=8"),
        ({"eos": 96}, "outside"),
        ({"eos": [3, -1]}, "outside"),
        ({"logit_bias": {96: 1.0}}, "outside"),
        ({"bad_words": [[3, 96]]}, "outside"),
    ],
    ids=repr,
)
def test_sampling_settings_that_clash_with_the_target_or_the_budget(idle, settings, match):
    refused(idle, [3], match, max_new_tokens=8, sampling=Sampling(**settings))


@pytest.mark.parametrize("settings", [[], [Sampling()], [Sampling()] * 3])
def test_a_wrong_number_of_sampling_settings(idle, settings):
    refused(idle, [[3], [4]], rf"{len(settings)} sampling settings for 2", sampling=settings)
    refused(idle, [3], rf"{len(settings)} sampling settings for 1", sampling=settings)


def test_a_session_holds_one_conversation(idle):
    with pytest.raises(BadInput, match="n=2"):
        hs.Session(idle, sampling=Sampling(temperature=1.0, n=2))
    session = hs.Session(idle, max_new_tokens=0)
    with pytest.raises(BadInput, match="max_new_tokens"):
        session.send("hello")
    assert session.messages == []


def test_a_drafter_for_another_vocabulary(idle):
    other = tiny_target(vocab_size=80)
    refused(idle, [3], "vocabulary", drafter=hs.DraftModel(other))
    refused(idle, [3], "vocabulary", drafter=Mixed(other, 2, [1]))


def test_a_model_that_cannot_roll_back():
    target = tiny_target("mamba")
    assert not target.can.rollback
    for start in (hs.generate, hs.stream, lambda model, _: hs.Session(model)):
        with pytest.raises(Unsupported, match=r"rollback.*recurrent"):
            start(target, [3])
    with pytest.raises(Unsupported, match=r"draft model.*rollback.*recurrent"):
        hs.generate(tiny_target(), [3], drafter=hs.DraftModel(target))


def test_a_verifier_that_is_not_exact_for_the_draft(idle):
    class Picky(hs.Lossless):
        pass

    picky = Picky(name="picky", exact_for=frozenset())
    with pytest.raises(Unsupported, match=r"picky.*not exact.*Lossless"):
        hs.generate(idle, [3], drafter=hs.PromptLookup(), verifier=picky)


def test_a_target_without_a_tokenizer(tiny):
    target = HFTarget(tiny().model, None)
    for prompt in ("text", CHAT):
        refused(target, prompt, "tokenizer")
    refused(target, [3], "tokenizer", sampling=Sampling(stop="a"))
    refused(target, [3], "tokenizer", sampling=Sampling(bad_words=["a"]))
    out = hs.generate(target, [3], max_new_tokens=4, sampling=Sampling(bad_words=[[4]]))
    assert len(out.token_ids) == 4 and out.text == ""


def test_a_chat_without_a_template_or_refused_by_it(monkeypatch, idle):
    monkeypatch.setattr(idle.tokenizer, "chat_template", "{{ raise_exception('users only') }}")
    refused(idle, CHAT, "users only")
    monkeypatch.setattr(idle.tokenizer, "chat_template", None)
    refused(idle, CHAT, "no chat template")


# --- leaving early ----------------------------------------------------------------------------------------------------


def drafters(target: Any) -> dict[str, Any]:
    return {
        "none": None,
        "lookup": hs.PromptLookup(min_ngram=1),
        "mixed": Mixed(tiny_target(), 4, [0, 4, 2, 1]),
        "model": hs.DraftModel(tiny_target(seed=0), hs.Chain(depth=3)),
    }


def demand_next_turn_is_right(session: Any, target: Any) -> None:
    out = session.send("and then?")
    fresh = hs.generate(target, session.messages[:-1], max_new_tokens=16)
    assert (out.text, out.token_ids, out.finish_reason) == (fresh.text, fresh.token_ids, fresh.finish_reason)


@pytest.mark.parametrize("name", drafters(None))
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_stream_left_early_leaves_the_session_usable(tiny, name, pieces):
    target = tiny()
    session = hs.Session(target, drafter=drafters(target)[name], max_new_tokens=16)
    session.send("first")
    stream = session.stream("second")
    said = "".join(next(stream).text for _ in range(pieces))
    stream.close()
    role, content = session.messages[-1].values()
    assert role == "assistant" and content.startswith(said) and said
    demand_next_turn_is_right(session, target)
    assert len(session.messages) == 6


@pytest.mark.parametrize("name", drafters(None))
def test_a_new_turn_ends_one_that_is_still_open(tiny, name):
    target = tiny()
    session = hs.Session(target, drafter=drafters(target)[name], max_new_tokens=16)
    session.stream("never begun")
    stream = session.stream("first")
    said = next(stream).text
    demand_next_turn_is_right(session, target)
    assert list(stream) == []
    assert [m["content"] for m in session.messages[:3]] == ["first", said, "and then?"]


def interrupted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, after: bool) -> None:
    """Ctrl-C during the given call of a method: before its work, or when it is done but not yet returned."""
    method, calls = getattr(owner, name), 0

    def run(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and not after:
            raise KeyboardInterrupt
        out = method(*args)
        if calls == call:
            raise KeyboardInterrupt
        return out

    monkeypatch.setattr(owner, name, run)


@pytest.mark.parametrize("name", drafters(None))
@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize(("method", "after"), [("extend", False), ("extend", True), ("commit", True)])
def test_ctrl_c_in_a_pass_leaves_the_session_usable(tiny, monkeypatch, name, method, call, after):
    target = tiny()
    session = hs.Session(target, drafter=drafters(target)[name], max_new_tokens=16)
    session.send("first")
    with monkeypatch.context() as patch:
        interrupted(patch, target, method, call, after)
        pieces = []
        with pytest.raises(KeyboardInterrupt):
            pieces += session.stream("second")
    assert [m["role"] for m in session.messages] == ["user", "assistant"] * 2
    assert session.messages[-1]["content"].startswith("".join(p.text for p in pieces))
    demand_next_turn_is_right(session, target)


@pytest.mark.parametrize("method", ["absorb", "draft"])
@pytest.mark.parametrize("name", ["lookup", "mixed", "model"])
def test_ctrl_c_in_a_drafter_leaves_the_session_usable(tiny, name, method):
    target = tiny()

    class Interrupted:
        """The drafter, with Ctrl-C in the third call after it was armed."""

        def __init__(self, inner: Any) -> None:
            self.inner, self.left = inner, -1

        def __getattr__(self, attribute: str) -> Any:
            if attribute == method:
                self.left -= 1
                if self.left == 0:
                    raise KeyboardInterrupt
            return getattr(self.inner, attribute)

    drafter = Interrupted(drafters(target)[name])
    session = hs.Session(target, drafter=drafter, max_new_tokens=16)
    session.send("first")
    drafter.left = 3
    with pytest.raises(KeyboardInterrupt):
        session.send("second")
    demand_next_turn_is_right(session, target)


@pytest.mark.parametrize("name", drafters(None))
def test_a_stream_can_be_left_and_the_target_used_again(tiny, monkeypatch, name):
    """Nothing of an abandoned stream stays in the target or in the drafter."""
    target, drafter = tiny(), drafters(tiny())[name]
    text = prompts(2, seed=31)
    expected = [out.token_ids for out in hs.generate(target, text, max_new_tokens=16)]
    stream = hs.stream(target, text, drafter=drafter, max_new_tokens=16)
    next(stream)
    with monkeypatch.context() as patch:
        interrupted(patch, target, "extend", 2, after=True)
        with pytest.raises(KeyboardInterrupt):
            hs.generate(target, text, drafter=drafter, max_new_tokens=16)
    assert [out.token_ids for out in hs.generate(target, text, drafter=drafter, max_new_tokens=16)] == expected
    next(stream)  # two streams may also take turns
    stream.close()


def test_a_drafter_named_by_a_string() -> None:
    with pytest.raises(BadInput, match="PromptLookup"):
        hs.generate(tiny_target(), "hello", drafter="lookup")
