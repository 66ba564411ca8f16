"""Training text and its mask (bugs.md B22): the masked tokens are the answers and their end-of-turn tokens, exactly."""

from __future__ import annotations

from functools import cache
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.errors import BadInput
from headstart.requests import encode
from headstart.testing import tiny_target
from headstart.train.template import Sample, fit, prompt_ids, sample

SPECIALS = ["<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>", "<tool>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<bos>{% for m in messages %}<|head|>{{ m.role }}<|/head|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
# One turn is `[INST] question [/INST] answer <eos>`: the space before the end belongs to the answer.
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }} <eos>"
    "{% else %}{{ raise_exception('no system role here') }}{% endif %}{% endfor %}"
)
# The text of a whole next turn's beginning is written with the answer.
EAGER = (
    "USER:{% for m in messages %}{{ m.content }}{% if m.role == 'user' %} ASSISTANT:"
    "{% else %}<eos>\n<|im_start|>USER:{% endif %}{% endfor %}"
)
BARE = (
    "{% for m in messages %}{{ m.role }}>\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant>\n{% endif %}"
)
MARKS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}HEAD{% generation %}{{ m.content }}<|im_end|>\n"
    "{% endgeneration %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
).replace("HEAD", "<|im_start|>assistant\n")
# As authors draw them: around the header too, or without the end-of-turn token.
WIDE = MARKS.replace("<|im_start|>assistant\n{% generation %}", "{%- generation -%}{{ '<|im_start|>assistant\n' }}")
NARROW = MARKS.replace("<|im_end|>\n{% endgeneration %}", "{% endgeneration %}<|im_end|>\n")
DOUBLE = MARKS.replace("<|im_end|>\n{% endgen", "<|im_end|><eos>\n{% endgen")
# Thinking is taken out of every answer but the last, as reasoning models do it.
THINKS = CHATML.replace("m.content", "(m.content if loop.last else m.content.split('</think>')[-1])")
THINKS_MARKED, THINKS_WIDE = (
    marked.replace("m.content", "(m.content if loop.last else m.content.split('</think>')[-1])")
    for marked in (MARKS, WIDE)
)
ENDS = {
    "chatml": (CHATML, "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot|>"),
    "llama2": (LLAMA2, " <eos>"),
    "eager": (EAGER, "<eos>"),
    "bare": (BARE, ""),
    "marks": (MARKS, "<|im_end|>"),
    "wide marks": (WIDE, "<|im_end|>"),
    "narrow marks": (NARROW, "<|im_end|>"),
    "double marks": (DOUBLE, "<|im_end|>"),
}
every_template = pytest.mark.parametrize("name", ENDS)


@cache
def tokenizer(template: str | None) -> Any:
    """Byte-level BPE with a few merges; it adds a <bos> that rendered text must not get twice."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r"\s*\n+|\s?\w+|\s?[^\s\w]+|\s+"), "isolated")  # line breaks stay together
    bpe.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(["assistant user system: hello there, what is the sky\n\n\n\nhello\n\nthere"] * 4, trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = template
    return fast


def chat(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """User and assistant in turn."""
    turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns] if system else turns


def answers(tok: Any, made: Sample) -> list[str]:
    """The text of every unbroken run of supervised tokens."""
    assert len(made.ids) == len(made.supervised)
    runs = groupby(zip(made.ids, made.supervised, strict=True), key=lambda pair: pair[1])
    return [tok.decode([token for token, _ in run]) for marked, run in runs if marked]


def rendered(tok: Any, messages: list[dict[str, str]]) -> list[int]:
    return tok.encode(tok.apply_chat_template(messages, tokenize=False), add_special_tokens=False)


# The mask


@every_template
def test_one_answer(name: str) -> None:
    template, end = ENDS[name]
    tok, messages = tokenizer(template), chat("what is the sky?", "hello there")
    made = sample(tok, messages)
    space = " " if name == "llama2" else ""
    assert answers(tok, made) == [f"{space}hello there{end}"]
    assert made.ids == rendered(tok, messages)


@every_template
def test_answers_that_repeat_what_the_user_said(name: str) -> None:
    template, end = ENDS[name]
    tok = tokenizer(template)
    texts = ["hello", "hello", "hello hello assistant", "hello", "assistant\nhello", "user\nhello"]
    made = sample(tok, chat(*texts))
    space = " " if name == "llama2" else ""
    assert answers(tok, made) == [f"{space}{text}{end}" for text in texts[1::2]]


@every_template
def test_a_last_question_without_an_answer_is_not_supervised(name: str) -> None:
    template, end = ENDS[name]
    tok, messages = tokenizer(template), chat("hello", "there", "what?")
    made = sample(tok, messages)
    assert [a.strip() for a in answers(tok, made)] == [f"there{end}"]
    assert made.ids == rendered(tok, messages) and not made.supervised[-1]


WORDS = st.sampled_from(
    ["hello", "assistant", "user", "\n", " ", "<|im_start|>", "<tool>", "🧑‍🚀", "日本", "a", "b", "x:"]
)
TEXT = st.lists(WORDS, min_size=1, max_size=6).map("".join).map(str.strip).filter(bool)


@given(
    name=st.sampled_from([n for n in ENDS if n not in ("llama2", "bare")]),
    texts=st.lists(TEXT, min_size=2, max_size=6),
    system=st.none() | TEXT,
)
@settings(max_examples=150, deadline=None)
def test_the_masked_text_is_the_answers_and_nothing_else(name: str, texts: list[str], system: str | None) -> None:
    template, end = ENDS[name]
    tok, messages = tokenizer(template), chat(*texts, system=None if name == "eager" else system)
    made = sample(tok, messages)
    assert answers(tok, made) == [text + end for text in texts[1::2]]
    assert made.ids == rendered(tok, messages)
    for at, message in enumerate(messages):  # the first token of every answer follows what serving would send
        if message["role"] == "assistant":
            start = len(prompt_ids(tok, messages[:at]))
            assert made.ids[:start] == prompt_ids(tok, messages[:at])
            assert made.supervised[start - 1 : start + 1] == [False, True]


@pytest.mark.parametrize("name", ["chatml", "llama3", "marks", "wide marks"])
@pytest.mark.parametrize("answer", ["<tool>hello<tool>", "hello<|im_end|>", "<eos> there", "<|eot|>a", "b<|eot|>"])
def test_special_tokens_inside_an_answer_do_not_end_it(name: str, answer: str) -> None:
    template, end = ENDS[name]
    tok = tokenizer(template)
    assert answers(tok, sample(tok, chat("hello", answer, "hello", answer))) == [answer + end] * 2


def test_blanks_at_the_end_of_an_answer_are_kept_unless_the_template_strips_them() -> None:
    for template, kept in ((CHATML, "a \n<|im_end|>"), (LLAMA3, "a<|eot|>"), (MARKS, "a \n<|im_end|>")):
        tok = tokenizer(template)
        assert answers(tok, sample(tok, chat("hello", "a \n", "hello"))) == [kept]


def test_marks_are_what_decides_where_they_are() -> None:
    """Thinking that the template takes out of history: by marks the rewritten turn is learned as it stands."""
    for template in (THINKS_MARKED, THINKS_WIDE):
        tok = tokenizer(template)
        made = sample(tok, chat("hello", "<think>a</think>there", "what?", "<think>b</think>hello"))
        assert answers(tok, made) == ["there<|im_end|>", "<think>b</think>hello<|im_end|>"]


def test_without_marks_a_rewritten_history_is_refused() -> None:
    tok = tokenizer(THINKS)
    one = sample(tok, chat("hello", "<think>a</think>there"))
    assert answers(tok, one) == ["<think>a</think>there<|im_end|>"]
    with pytest.raises(
        BadInput, match=r"The chat up to answer 2 becomes other tokens.*'<', 't.*, '>', 'b'.*became .*'there'"
    ):
        sample(tok, chat("hello", "hello", "a", "<think>b</think>there", "what?"))


def test_a_header_that_serving_does_not_send_is_refused() -> None:
    """The template puts a thinking block before answers, but not into the prompt that asks for one, or vice versa."""
    block = "<think>\n\n</think>\n\n"
    added = MARKS.replace("{% generation %}", block + "{% generation %}")
    with pytest.raises(
        BadInput, match=r"marks cover \['hello', '<\|im_end\|>'\]; expected.*serving ends: .*'assistant', '\\n'\]"
    ):
        sample(tokenizer(added), chat("hello", "hello"))
    for template in (CHATML, MARKS):
        asked = template.replace("assistant\n{% endif %}", f"assistant\n{block}{{% endif %}}")
        assert asked != template
        with pytest.raises(
            BadInput, match=r"The prompt that asks for answer 1 becomes other tokens.*'<', 't.*became.*'hello'"
        ):
            sample(tokenizer(asked), chat("hello", "hello"))


@pytest.mark.parametrize(("when", "number"), [("messages | length == 1", 1), ("messages | length > 1", 2)])
@pytest.mark.parametrize("template", [CHATML, MARKS])
def test_every_prompt_is_compared(template: str, when: str, number: int) -> None:
    """One of two prompts differs from what training would see."""
    asked = template.replace("assistant\n{% endif %}", f"assistant\n{{% if {when} %}}hello\n{{% endif %}}{{% endif %}}")
    assert asked != template
    with pytest.raises(BadInput, match=f"The prompt that asks for answer {number} becomes"):
        sample(tokenizer(asked), chat("what?", "there", "what?", "there"))


def test_a_token_across_the_start_of_the_answer_is_refused() -> None:
    """`assistant>` with a space, then `hello`: one token ` hello` in training, two when serving."""
    spaced = BARE.replace(">\n", "> ")
    with pytest.raises(BadInput, match=r"The prompt that asks for answer 1.*'>', ' '\] became .*'>', ' hello'"):
        sample(tokenizer(spaced), chat("what?", "hello"))


@pytest.mark.parametrize(
    ("template", "match"),
    [
        (MARKS.replace("{{ m.content }}<|im_end|>\n{% endgeneration %}", "{% endgeneration %}"), "marks no token"),
        ("{% generation %}" + CHATML + "{% endgeneration %}", r"marks cover \['<\|im_start\|>', 'user'"),
        (
            MARKS.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}"),
            r"marks cover \['what",
        ),
        ("{% for m in messages %}{% endfor %}<|im_start|>", "marks no token"),
        ("{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{% endif %}{% endfor %}", "every token"),
    ],
    ids=["empty marks", "all marked", "user marked", "messages dropped", "user dropped"],
)
def test_masks_of_nothing_or_of_everything(template: str, match: str) -> None:
    """No silent fall-back to a mask of ones or of zeros."""
    with pytest.raises(BadInput, match=match):
        sample(tokenizer(template), chat("what?", "hello"))


@pytest.mark.parametrize("template", [CHATML, MARKS])
@pytest.mark.parametrize("roles", [["system"], ["user"], ["assistant"], ["assistant", "user", "assistant"]])
def test_chats_without_an_answer_to_a_prompt(template: str, roles: list[str]) -> None:
    with pytest.raises(BadInput, match=rf"chat of roles {', '.join(roles)}; expected an assistant turn"):
        sample(tokenizer(template), [{"role": role, "content": "hello"} for role in roles])


def test_the_tiny_target_has_no_end_of_turn_token() -> None:
    tok = tiny_target().tokenizer
    made = sample(tok, chat("hi", "hello there", "hi", "hi"))
    assert answers(tok, made) == ["hello there |", "hi |"]


# Prompts


@pytest.mark.parametrize("template", [CHATML, LLAMA3, LLAMA2, MARKS, THINKS])
def test_prompts_are_those_of_serving(template: str) -> None:
    tok = tokenizer(template)
    target = SimpleNamespace(tokenizer=tok, can=SimpleNamespace(max_positions=10_000))
    for messages in (chat("hello"), chat("hello", "<think>a</think>there", "what?")):
        ids = prompt_ids(tok, messages)
        assert ids == encode(target, messages)  # type: ignore[arg-type]
        assert ids.count(0) == (template is LLAMA3)  # one <bos>, and only from the template


@pytest.mark.parametrize(
    ("messages", "template", "match"),
    [
        ([], CHATML, "chat is empty"),
        ([{"role": "user"}], CHATML, "role.*content"),
        ([{"role": "user", "content": None}], CHATML, "role.*content"),
        ([{"role": "user", "content": " \n"}], CHATML, "last message is empty"),
        (chat("hello"), None, "no chat template"),
        (chat("hello", system="be brief"), LLAMA2, "template refuses.*no system role here"),
    ],
)
def test_what_cannot_be_rendered(messages: list[Any], template: str | None, match: str) -> None:
    with pytest.raises(BadInput, match=match):
        prompt_ids(tokenizer(template), messages)
    if match != "last message is empty":
        with pytest.raises(BadInput, match=match):
            sample(tokenizer(template), messages)


# Length


def test_long_samples_are_refused_with_their_number() -> None:
    samples = [Sample([1] * n, [False] * (n - 1) + [True]) for n in (3, 9, 12, 5)]
    with pytest.raises(BadInput, match=r"2 of 4 samples have more than 5 tokens, the longest 12.*on_long"):
        fit(samples, 5)
    assert fit(samples, 12) == (samples, 0, 0)


def test_a_cut_that_leaves_nothing_drops_the_sample() -> None:
    fits = Sample([1, 2], [False, True])
    cut = Sample([1, 2, 3, 4], [False, True, False, True])
    dropped = Sample([1, 2, 3, 4], [False, False, False, True])
    kept = [fits, Sample([1, 2, 3], [False, True, False])]
    assert fit(iter([fits, dropped, cut, dropped]), 3, on_long="cut") == (kept, 1, 2)


@given(rows=st.lists(st.lists(st.booleans(), min_size=1, max_size=8)), limit=st.integers(1, 8))
def test_fit_keeps_the_beginnings(rows: list[list[bool]], limit: int) -> None:
    samples = [Sample(list(range(len(row))), row) for row in rows]
    kept, cut, dropped = fit(samples, limit, on_long="cut")
    assert len(kept) + dropped == len(samples)
    assert cut + dropped == sum(len(row) > limit for row in rows)
    expected = [row[:limit] for row in rows if len(row) <= limit or any(row[:limit])]
    assert [s.supervised for s in kept] == expected
    assert [s.ids for s in kept] == [list(range(len(row))) for row in expected]


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, None])
def test_limits_that_are_none(limit: Any) -> None:
    with pytest.raises(BadInput, match="limit"):
        fit([], limit)


def test_an_unknown_way_with_long_samples() -> None:
    with pytest.raises(BadInput, match=r"on_long='drop'.*refuse, cut"):
        fit([], 5, on_long="drop")  # type: ignore[arg-type]


@pytest.mark.real
def test_smollm2() -> None:
    """Its template writes a system message of its own; only the tokenizer is loaded."""
    from transformers import AutoTokenizer

    from headstart.targets.resolve import resolve

    tok = AutoTokenizer.from_pretrained(resolve("smollm2-135m"))
    texts = ["Why is the sky blue?", "Why is the sky blue? Because of scattering.", "2 + 2?", "4\n\n```py\n2 + 2\n```"]
    made = sample(tok, chat(*texts))
    assert answers(tok, made) == [text + "<|im_end|>" for text in texts[1::2]]
    assert made.ids[: len(prompt_ids(tok, chat(texts[0])))] == prompt_ids(tok, chat(texts[0]))
    assert tok.decode(made.ids).count("<|im_start|>system") == 1
