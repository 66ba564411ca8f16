"""Training text, built the way that serving builds its prompts, and which of its tokens an answer supervises.

The answer's tokens are what lies between the prompt that serving would send and the end of the turn, compared token
by token; nothing is found by searching for text, and whatever does not fit is refused (bugs.md B22).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

from jinja2 import TemplateError

from headstart.errors import BadInput

Message = dict[str, str]
OnLong = Literal["refuse", "cut"]
MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
CURE = (
    "If the template rewrites earlier turns, cut chats after their first answer or give it generation marks; if one "
    "token spans the start of an answer, strip the answer's blanks or let the template's header end in a line break."
)


class Sample(NamedTuple):
    """The token ids of a chat; `supervised[t]`: token t belongs to an answer, its end-of-turn token included."""

    ids: list[int]
    supervised: list[bool]


def prompt_ids(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """What serving sends for these messages. Raises BadInput without a template or if it refuses them."""
    text = _rendered(tokenizer, messages, prompt=True)
    if not messages[-1]["content"].strip():
        raise BadInput("The last message is empty; give at least one character.")
    return _ids(tokenizer, text)


def sample(tokenizer: Any, messages: Sequence[Message]) -> Sample:
    """A chat as training tokens, from the template's generation marks if it has them, else by prefix difference.

    Raises BadInput if there is no answer, if the template writes a different prompt than serving would see, or if
    nothing or everything would be supervised.
    """
    text = _rendered(tokenizer, messages, prompt=False)
    answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers or answers[0] == 0:
        saw = ", ".join(message["role"] for message in messages)
        raise BadInput(f"Nothing to learn from a chat of roles {saw}; expected an assistant turn after a user turn.")
    if getattr(tokenizer, "is_fast", False) and MARK.search(tokenizer.get_chat_template()):
        made = _by_marks(tokenizer, messages, answers)
    else:
        made = _by_prefix(tokenizer, messages, answers, _ids(tokenizer, text))
    if len(set(made.supervised)) != 2:
        share = "every" if any(made.supervised) else "no"
        raise BadInput(
            f"The chat template marks {share} token of this chat as an answer: {_excerpt(tokenizer, made.ids, 0)}. "
            "Expected the assistant turns alone; mend the template, or its generation marks if it has any."
        )
    return made


def fit(samples: Iterable[Sample], limit: int, *, on_long: OnLong = "refuse") -> tuple[list[Sample], int, int]:
    """Samples of at most `limit` tokens, how many were cut to that, and how many more were dropped.

    A sample is dropped if the cut leaves it no supervised token. Raises BadInput for long samples unless `on_long`
    is "cut".
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise BadInput(f"limit={limit!r}: expected a whole number of at least 1.")
    if on_long not in get_args(OnLong):
        raise BadInput(f"on_long={on_long!r}: expected one of {', '.join(get_args(OnLong))}.")
    every = list(samples)
    long = [len(s.ids) for s in every if len(s.ids) > limit]
    if long and on_long == "refuse":
        raise BadInput(
            f"{len(long)} of {len(every)} samples have more than {limit} tokens, the longest {max(long)}. "
            'Raise the limit, leave them out, or cut their ends with on_long="cut".'
        )
    short = [Sample(s.ids[:limit], s.supervised[:limit]) if len(s.ids) > limit else s for s in every]
    kept = [(s, was) for s, was in zip(short, every, strict=True) if s is was or any(s.supervised)]
    return [s for s, _ in kept], sum(s is not was for s, was in kept), len(every) - len(kept)


# Rendering


def _rendered(tokenizer: Any, messages: Sequence[Message], *, prompt: bool, **options: Any) -> Any:
    """What the template makes of the messages: text, or with further options whatever they ask for."""
    if not messages:
        raise BadInput("The chat is empty; give at least one message.")
    for message in messages:
        if not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise BadInput(f"A chat message needs `role` and `content`, both strings; got {message!r}.")
    if not getattr(tokenizer, "chat_template", None):
        raise BadInput("This target has no chat template (a base model?); train on plain text instead of chats.")
    options = {"tokenize": False} | options
    try:
        return tokenizer.apply_chat_template(list(messages), add_generation_prompt=prompt, **options)
    except TemplateError as error:
        raise BadInput(f"The target's chat template refuses these messages: {error}") from error


def _ids(tokenizer: Any, text: str) -> list[int]:
    """Special tokens are in the template's text; the tokenizer must not add its own."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def _excerpt(tokenizer: Any, ids: list[int], at: int) -> str:
    """The tokens around one, for messages; as a list, because the same text may be other tokens."""
    return repr([tokenizer.decode([token]) for token in ids[max(0, at - 6) : at + 8]])


# Which tokens


def _by_prefix(tokenizer: Any, messages: Sequence[Message], answers: list[int], ids: list[int]) -> Sample:
    """Per answer: from the end of the prompt that asks for it to its end of turn."""
    supervised = [False] * len(ids)
    for number, at in enumerate(answers, start=1):
        prompt = prompt_ids(tokenizer, messages[:at])
        upto = _ids(tokenizer, _rendered(tokenizer, messages[: at + 1], prompt=False))
        _demand_prefix(tokenizer, prompt, upto, f"The prompt that asks for answer {number}")
        end = _end(tokenizer, upto, _closing(tokenizer, messages[: at + 1]))
        _demand_prefix(tokenizer, upto[:end], ids, f"The chat up to answer {number}")
        supervised[len(prompt) : end] = [True] * (end - len(prompt))
    return Sample(ids, supervised)


def _by_marks(tokenizer: Any, messages: Sequence[Message], answers: list[int]) -> Sample:
    """The template's own marks, made to start and end where an answer does.

    Authors draw them differently: some include the header of the turn, or the line break after it, and some leave
    out the end-of-turn token. Earlier turns may be rewritten later (thinking that is taken out), prompts may not.
    """
    marks = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    out = _rendered(tokenizer, messages, prompt=False, **marks)
    ids, marked = list(out["input_ids"]), list(map(bool, out["assistant_masks"]))
    first, last = (prompt_ids(tokenizer, messages[:at]) for at in (answers[0], answers[-1]))
    _demand_prefix(tokenizer, first, ids, "The prompt that asks for answer 1")
    _demand_prefix(tokenizer, last, ids, f"The prompt that asks for answer {len(answers)}")
    header = first[len(_ids(tokenizer, _rendered(tokenizer, messages[: answers[0]], prompt=False))) :]
    closing = _closing(tokenizer, messages[: answers[-1] + 1])
    supervised = [False] * len(ids)
    for start, end in _runs(marked):
        start += len(header) if ids[start : start + len(header)] == header else 0
        if closing and ids[end : end + 1] == closing[:1]:
            end += 1
        elif [t for t in ids[start:end] if t in _specials(tokenizer)][-len(closing) :] == closing:
            end = _end(tokenizer, ids[:end], closing)
        supervised[start:end] = [True] * (end - start)
    if any(supervised) and (supervised.index(True), supervised[len(last) : len(last) + 1]) != (len(first), [True]):
        said = [token for token, yes in zip(ids, supervised, strict=True) if yes]
        raise BadInput(
            f"The chat template's generation marks cover {_excerpt(tokenizer, said, 0)}; expected them to begin where "
            f"the prompt of serving ends: {_excerpt(tokenizer, last, len(last))}. Mend the marks in the template."
        )
    return Sample(ids, supervised)


def _runs(marked: list[bool]) -> list[tuple[int, int]]:
    """Start and end of each unbroken run of marks."""
    framed = [False, *marked, False]
    edges = [at for at in range(len(marked) + 1) if framed[at] != framed[at + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _closing(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """The special tokens that the template writes after the last message, its end-of-turn token first.

    That part of the text is what stays when the message gets one more letter, so special tokens inside an answer are
    never taken for its end.
    """
    longer = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + "a"}]
    text, other = (_rendered(tokenizer, chat, prompt=False) for chat in (messages, longer))
    tail = text[len(text) - _shared(text[::-1], other[::-1]) :]
    specials = _specials(tokenizer)
    return [token for token in _ids(tokenizer, tail) if token in specials]


def _end(tokenizer: Any, ids: list[int], closing: list[int]) -> int:
    """Behind the end-of-turn token, or if the template writes none, behind the last token that is not blank."""
    if closing:
        specials = _specials(tokenizer)
        return [at for at, token in enumerate(ids) if token in specials][-len(closing)] + 1
    return next((end for end in range(len(ids), 0, -1) if tokenizer.decode([ids[end - 1]]).strip()), 0)


def _specials(tokenizer: Any) -> set[int]:
    added = tokenizer.added_tokens_decoder.items()
    return {token for token, entry in added if entry.special} | set(tokenizer.all_special_ids)


def _shared(one: Sequence[object], other: Sequence[object]) -> int:
    """How many items two sequences have in common at their starts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _demand_prefix(tokenizer: Any, prefix: list[int], ids: list[int], what: str) -> None:
    """Raise BadInput unless the ids start with the prefix: training would see another text than serving."""
    if ids[: len(prefix)] == prefix:
        return
    at = _shared(prefix, ids)
    raise BadInput(
        f"{what} becomes other tokens once more follows, so training would differ from serving: "
        f"{_excerpt(tokenizer, prefix, at)} became {_excerpt(tokenizer, ids, at)}. {CURE}"
    )
