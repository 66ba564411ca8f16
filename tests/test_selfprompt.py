"""Prompts that a target invents: what it is asked to go on from, what is made of it, and what is let in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from headstart.errors import BadInput
from headstart.targets.hf import HFTarget
from headstart.testing import tiny_target
from headstart.train import selfprompt
from headstart.train.grams import WORD, Seen
from headstart.train.rollout import Answer, How, rollout
from headstart.train.selfprompt import Invented, Inventing, invent, keep, open_turn, openers

SYSTEM = "<|system\nYou help.|>\n"
CHATML = (
    "{% if messages[0].role != 'system' %}{{ '" + SYSTEM + "' }}{% endif %}"
    "{% for m in messages %}{{ '<|' + m.role + '\n' + m.content + '|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant\n' }}{% endif %}"
)
FREE = Inventing(seeded=0.0)
OPENERS = dict.fromkeys(openers())


def chat_target(template: str | None = CHATML, **config: Any) -> HFTarget:
    target = tiny_target(**config)
    target.tokenizer.chat_template = template
    return target


class Scripted:
    """In the place of `rollout`: says the texts in turn, and remembers what it was asked."""

    def __init__(self, target: HFTarget, *said: tuple[str, str]) -> None:
        self.target, self.said = target, said
        self.prompts: list[str] = []
        self.ids: list[list[int]] = []
        self.how = How()
        self.stops: Sequence[int] = ()

    def __call__(
        self, target: Any, prompts: list[list[int]], how: How, stops: Sequence[int], tick: object
    ) -> list[Answer]:
        self.how, self.stops, self.ids = how, stops, prompts
        self.prompts = [target.tokenizer.decode(ids) for ids in prompts]
        answers = []
        for number in range(len(prompts)):
            text, ended = self.said[number % len(self.said)]
            answers.append(Answer(target.tokenizer.encode(text, add_special_tokens=False), ended))
        return answers


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scripted]:
    def made(target: HFTarget, *said: tuple[str, str]) -> Scripted:
        scripted = Scripted(target, *said)
        monkeypatch.setattr(selfprompt, "rollout", scripted)
        return scripted

    return made


# --- what is gone on from


def test_the_open_turn_is_the_templates_text_before_a_first_message() -> None:
    assert open_turn(chat_target()) == SYSTEM + "<|user\n"
    plain = "{% for m in messages %}[{{ m.role }}] {{ m.content }} [end]{% endfor %}"
    assert open_turn(chat_target(plain)) == "[user] "


@pytest.mark.parametrize("template", ["hello", "{{ messages[0].content }}!", "{% for m in messages %}{% endfor %}"])
def test_a_template_that_opens_no_turn_is_refused(template: str) -> None:
    with pytest.raises(BadInput, match=r"does not show the user's message, or writes nothing before it"):
        invent(chat_target(template), FREE, 1, 0)


def test_prompts_grow_from_the_open_turn_and_an_opener(script: Callable[..., Scripted]) -> None:
    target = chat_target()
    asked = script(target, (" of blue whales? ~", "stop"))
    found = invent(target, Inventing(seeded=1.0), 40, 0)
    assert len({p.category for p in found}) >= 8
    for prompt, start, ids in zip(found, asked.prompts, asked.ids, strict=True):
        opener = start.removeprefix(SYSTEM + "<|user\n")
        assert (prompt.category, opener) in OPENERS
        assert ids == target.tokenizer.encode(SYSTEM + "<|user\n" + opener)
        assert prompt == Invented((opener + " of blue whales? ").strip(), [], prompt.category)
    invent(target, FREE, 3, 0)
    assert asked.prompts == [SYSTEM + "<|user\n"] * 3
    some = invent(target, Inventing(seeded=1.0, categories=("qa", "code")), 40, 0)
    assert {p.category for p in some} == {"qa", "code"}
    with pytest.raises(BadInput, match="No openers of category x"):
        invent(target, Inventing(categories=("x",)), 1, 0)


def test_settings_reach_the_rollout(script: Callable[..., Scripted]) -> None:
    target = chat_target(eos=[3, 9])
    asked = script(target, ("a b c", "stop"))
    invent(target, Inventing(temperature=0.7, top_p=0.9, max_tokens=17), 2, 0)
    how = asked.how
    assert (how.temperature, how.top_p, how.max_new_tokens) == (0.7, 0.9, 17) and set(asked.stops) == {3, 9}
    seeds = set()
    for seed in (0, 1):
        for unit in (0, 1):
            invent(target, Inventing(seed=seed), 2, unit)
            seeds.add(asked.how.seed)
    assert len(seeds) == 4


def test_the_share_of_openers(script: Callable[..., Scripted]) -> None:
    target = chat_target()
    script(target, ("a b c", "stop"))
    for share in (0.0, 0.25, 0.6, 1.0):
        found = [p for unit in range(4) for p in invent(target, Inventing(seeded=share), 250, unit)]
        seeded = sum(bool(p.category) for p in found) / len(found)
        assert abs(seeded - share) <= 4 * (share * (1 - share) / len(found)) ** 0.5
    counts = Counter(p.category for p in found)
    assert set(counts) == {name for name, _ in OPENERS}, "every category is used"


def test_same_unit_same_prompts_other_unit_others() -> None:
    how = Inventing(max_tokens=40, seeded=0.5)
    one, other = (chat_target(eos=range(64, 74)) for _ in range(2))
    first = invent(one, how, 8, 3)
    texts = {p.text for p in first if p.text}
    assert len(texts) >= 6 and invent(other, how, 8, 3) == first
    for changed, unit in ((how, 4), (Inventing(max_tokens=40, seeded=0.5, seed=1), 3)):
        assert not texts & {p.text for p in invent(one, changed, 8, unit)}


# --- what is made of it


@pytest.mark.parametrize(
    ("said", "ended", "text"),
    [
        ("Why is it? And then wh", "length", "Why is it?"),
        ("Why is it? And then wh", "loop", "Why is it?"),
        ("Why is it? And then wh.", "stop", "Why is it? And then wh"),  # the stop id is the last one
        ("Use 3.5 litres. Do it! Now:\nx y", "length", "Use 3.5 litres. Do it! Now:"),
        ("One. Two.", "length", "One. Two."),
        ("no end at all", "length", ""),
        ("e.g.x is no end", "length", ""),
        ("  Blank.  ~", "stop", "Blank."),
        ("~", "stop", ""),
        ("Who are you?|>\n<|assistant\nI am. And", "length", "Who are you?"),  # the template's own mark closes the turn
        ("no sentence |>\nmore. Yes", "length", "no sentence"),
        ("Who? |>~", "stop", "Who?"),
        ("|>hello. Yes.", "length", ""),
    ],
)
def test_unfinished_prompts_are_cut_to_whole_sentences(
    script: Callable[..., Scripted], said: str, ended: str, text: str
) -> None:
    target = chat_target()
    script(target, (said, ended))
    assert invent(target, FREE, 1, 0) == [Invented(text, [], "")]


@pytest.mark.parametrize(
    ("said", "ended"), [("~", "stop"), (" \n~", "stop"), ("and so on", "length"), ("|>\n", "length")]
)
def test_an_opener_alone_is_no_prompt(script: Callable[..., Scripted], said: str, ended: str) -> None:
    target = chat_target()
    script(target, (said, ended))
    found = invent(target, Inventing(seeded=1.0, categories=("extraction",)), 20, 0)
    assert {p.text for p in found} == {""}
    assert keep(found, FREE, Seen()) == ([], Counter({"length": 20}))


def test_chinese_sentences_end_without_a_blank(script: Callable[..., Scripted]) -> None:
    target = chat_target(vocab_size=256)
    script(target, ("请解释一下。我想知道更多关于", "length"))
    found = invent(target, FREE, 1, 0)
    assert found[0].text == "请解释一下。"
    assert keep(found, FREE, Seen()) == (found, Counter())  # six characters are words enough


def test_a_turn_may_be_closed_by_the_header_of_the_answer_alone(script: Callable[..., Scripted]) -> None:
    alpaca = (
        "{% for m in messages %}{{ '### ' + m.role + ':\n' + m.content + '\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
    )
    target = chat_target(alpaca)
    script(target, ("Name a bird\n\n### assistant:\nA wren. An", "length"))
    assert invent(target, FREE, 1, 0) == [Invented("Name a bird", [], "")]


def test_special_tokens_end_a_turn_and_are_no_text(script: Callable[..., Scripted]) -> None:
    target = chat_target(vocab_size=260, eos=7)
    target.tokenizer.add_special_tokens({"additional_special_tokens": ["<a>", "<b>"]})
    asked = script(target, ("Who are you?<a>", "stop"), ("Who <b>is. this", "length"))
    found = invent(target, FREE, 2, 0)
    assert set(asked.stops) == {7, 256, 257}
    assert [p.text for p in found] == ["Who are you?", "Who is."]


def test_a_tokenizer_that_drops_the_first_blank(script: Callable[..., Scripted]) -> None:
    """As those of Llama 2 and Mistral do: decoded alone, "_blue" is "blue"."""
    from tokenizers import decoders

    target = chat_target(vocab_size=97)
    target.tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    assert target.tokenizer.decode(target.tokenizer.encode(" blue")) == "blue"
    script(target, (" blue whales.~", "stop"))
    for prompt in invent(target, Inventing(seeded=1.0, categories=("qa",)), 8, 0):
        assert (prompt.category, prompt.text.removesuffix(" blue whales.")) in OPENERS


def test_a_prompt_of_the_real_rollout() -> None:
    target = chat_target(eos=range(64, 74))
    ticks: list[int] = []
    cold = invent(target, Inventing(temperature=0.0, max_tokens=60, seeded=0.0), 2, 5, ticks.append)
    start = target.tokenizer.encode(open_turn(target))
    greedy = rollout(target, [start], How(max_new_tokens=60), target.eos)[0]
    assert greedy.ended == "stop" and len(greedy.ids) > 3 and sum(ticks) == 2 * len(greedy.ids)
    assert cold == [Invented(target.tokenizer.decode(greedy.ids[:-1]).strip(), [], "")] * 2


# --- base models


def test_a_base_model_goes_on_from_the_token_that_begins_a_text(script: Callable[..., Scripted]) -> None:
    target = chat_target(None, eos=12)
    target.tokenizer.eos_token = "~"
    for bos in (None, "\n"):
        target.tokenizer.bos_token = bos
        start = target.tokenizer.encode(bos or "~")
        asked = script(target, ("a small text. And mor", "length"), ("another one.,", "stop"))
        for how in (FREE, Inventing(seeded=1.0, categories=("qa",))):
            found = invent(target, how, 4, 0)
            assert asked.stops[0] == 12
            for number, (prompt, ids) in enumerate(zip(found, asked.ids, strict=True)):
                opener = target.tokenizer.decode(ids)[1:]
                said = ("a small text. And mor", "another one.")[number % 2]
                assert ids[:1] == start and (opener == "") == (how is FREE)
                assert (prompt.category, opener) in {**OPENERS, ("", ""): None}
                assert prompt.ids == ids + target.tokenizer.encode(said)  # not cut: a text has no turns; no stop id
                assert prompt.text == (opener + said).strip()


def test_the_first_token_of_a_base_model_may_be_special() -> None:
    target = chat_target(None, vocab_size=260)
    target.tokenizer.add_special_tokens({"bos_token": "<s>"})
    found = invent(target, Inventing(seeded=0.5, max_tokens=8), 6, 0)
    assert {p.ids[0] for p in found} == {256} and {p.ids.count(256) for p in found} == {1}
    assert all("<s>" not in p.text for p in found)


def test_a_base_model_without_such_a_token_is_refused() -> None:
    with pytest.raises(BadInput, match="no chat template and no token that begins a text; give prompts"):
        invent(chat_target(None), FREE, 1, 0)


# --- what is let in


def prompt(text: str) -> Invented:
    return Invented(text, [], "c")


def numbered(count: int, start: int = 0) -> str:
    return " ".join(f"w{i}" for i in range(start, start + count))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "length"),
        ("two words", "length"),
        ("now three words", ""),
        (numbered(120), ""),
        (numbered(121), "length"),
        ("?! ... --", "length"),
        ("go go go", "repetition"),  # 1 of 3
        ("a b b b b", ""),  # 2 of 5 are just enough
        ("a b b b b b", "repetition"),
        ("A a B b c C", ""),
        ("this is \ufffd broken", "broken characters"),
        ("a bell \a rings here", "broken characters"),
        ("private \ue000 use area", "broken characters"),
        ("tab\tand\nnewline\r\nare fine", ""),
        ("une question\u00a0? Oui, c\u2019est \u00ab\u202fbon\u202f\u00bb", ""),  # blanks of French print
        ("family emoji 👩\u200d👩\u200d👧 and 日\u3000本", ""),
    ],
)
def test_filters(text: str, why: str) -> None:
    kept, dropped = keep([prompt(text)], Inventing(), Seen())
    assert (kept, dropped) == (([], Counter({why: 1})) if why else ([prompt(text)], Counter()))


def test_filters_follow_their_settings() -> None:
    short = Inventing(words=(1, 2), distinct_words=0.9)
    assert keep([prompt("one two"), prompt("three little words"), prompt("so so")], short, Seen()) == (
        [prompt("one two")],
        Counter({"length": 1, "repetition": 1}),
    )


def test_near_duplicates_are_dropped_and_counted() -> None:
    seen = Seen([numbered(10, 100)])
    fine = [numbered(10), numbered(8, 3), numbered(12, 95), f"x {numbered(20, 30)}"]  # seven words shared at most
    near = [numbered(8, 2), numbered(13, 95), numbered(9, 40), fine[3]]
    kept, dropped = keep([prompt(t) for t in [*fine, *near, ""]], Inventing(), seen)
    assert [p.text for p in kept] == fine
    assert dropped == Counter({"near-duplicate": 4, "length": 1})
    assert keep(kept, Inventing(), seen) == ([], Counter({"near-duplicate": 4}))


def test_what_is_dropped_is_not_remembered() -> None:
    seen = Seen()
    bad = numbered(9) + " \ufffd"
    assert keep([prompt(bad), prompt(numbered(9))], Inventing(), seen)[1] == Counter({"broken characters": 1})
    assert WORD.findall(bad) == WORD.findall(numbered(9))
