"""Prompts that the target invents itself: no data is needed to train a head for any model.

A chat model continues an open user turn, from nothing or from a few words that steer it to a kind of task (an opener).
A base model has no turns: a short text sampled from nothing takes a prompt's place.
"""

from __future__ import annotations

import json
import random
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

from headstart.errors import BadInput
from headstart.targets.base import Target
from headstart.train.grams import WORD, Seen
from headstart.train.rollout import How, Tick, rollout

OF_SCRIPT = 0.8
MARK = "user-turn-starts-here"
SENTENCE_END = re.compile("[.!?:](?=\\s|$)|[\u3002\uff01\uff1f]")  # Chinese and Japanese put no blank behind
BROKEN = ("Cc", "Cs", "Co", "Cn")  # control, surrogate, private, unassigned


class Invented(NamedTuple):
    """A prompt as text (chat models) or ids (base models), and the kind of opener it grew from ("" for none)."""

    text: str
    ids: list[int]
    category: str


@dataclass(frozen=True, kw_only=True)
class Inventing:
    """How prompts are made up, `rows` side by side. `seeded` is the share that starts from an opener of `categories`
    (empty: of all).

    Kept are prompts of `words` words, a share of `distinct_words` different, with most (`OF_SCRIPT`) letters from
    `script` if one is named ("LATIN", "CYRILLIC", "CJK", ... as Unicode names letters).
    """

    rows: int = 128
    temperature: float = 1.0
    top_p: float = 0.95
    max_tokens: int = 96
    seeded: float = 0.6
    categories: tuple[str, ...] = ()
    words: tuple[int, int] = (3, 120)
    distinct_words: float = 0.4
    script: str = ""
    seed: int = 0


def openers(categories: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """(category, first words) of the packaged openers; raises BadInput for a category that there is not."""
    table = json.loads(files("headstart").joinpath("data/openers.json").read_text(encoding="utf-8"))
    unknown = sorted(set(categories) - set(table))
    if unknown:
        raise BadInput(f"No openers of category {', '.join(unknown)}; there are {', '.join(table)}.")
    return [(name, words) for name in categories or table for words in table[name]]


def invent(target: Target, how: Inventing, count: int, unit: int, tick: Tick | None = None) -> list[Invented]:
    """`count` raw prompts, sampled; the same unit gives the same prompts."""
    rng = random.Random(f"{how.seed}/{unit}")
    pool = openers(how.categories)
    seeds = [rng.choice(pool) if rng.random() < how.seeded else ("", "") for _ in range(count)]
    chat = bool(getattr(target.tokenizer, "chat_template", None))
    before, after = _frame(target) if chat else (_nothing(target), "")
    prompts = [target.tokenizer.encode(before + opener, add_special_tokens=False) for _, opener in seeds]
    seed = rng.getrandbits(48)
    sampling = How(
        rows=how.rows, max_new_tokens=how.max_tokens, temperature=how.temperature, top_p=how.top_p, seed=seed
    )
    specials = [token for token, entry in target.tokenizer.added_tokens_decoder.items() if entry.special]
    answers = rollout(target, prompts, sampling, [*target.eos, *specials], tick)
    out = []
    for (category, opener), ids, answer in zip(seeds, prompts, answers, strict=True):
        said = answer.ids[:-1] if answer.ended == "stop" else answer.ids
        text = _continuation(target.tokenizer, ids, said)
        if chat:
            text = _turn(text, after, answer.ended == "stop")
        text = (opener + text).strip() if text.strip() else ""  # an opener alone asks for nothing
        out.append(Invented(text, [] if chat else [*ids, *said], category))
    return out


def open_turn(target: Target) -> str:
    """The template's text up to where a first user message would stand."""
    return _frame(target)[0]


def _frame(target: Target) -> tuple[str, str]:
    """The template's text before a first user message, and the mark behind it that closes the turn."""
    asked = [{"role": "user", "content": MARK}]
    shown = target.tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    before, found, after = str(shown).partition(MARK)
    if not found or not before:
        raise BadInput(
            "The chat template does not show the user's message, or writes nothing before it; prompts cannot be "
            "invented from it. Give prompts instead."
        )
    return before, after.strip().partition("\n")[0]


def _turn(text: str, after: str, ended: bool) -> str:
    """What the user says: up to the closing mark (not every template has a special token for it), or the sentences
    that are whole."""
    said, closed, _ = text.partition(after) if after else (text, "", "")
    return said if closed or ended else _whole_sentences(said)


def _continuation(tokenizer: Any, before: list[int], ids: list[int]) -> str:
    """What the ids say behind others: alone, some tokenizers drop their first blank."""
    start, whole = (
        tokenizer.decode(x, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for x in (before, before + ids)
    )
    return str(whole)[len(start) :]


def _nothing(target: Target) -> str:
    """What a base model's documents start with."""
    tokenizer = target.tokenizer
    start = tokenizer.bos_token or tokenizer.eos_token
    if not start:
        raise BadInput("The target has no chat template and no token that begins a text; give prompts instead.")
    return str(start)


def _whole_sentences(text: str) -> str:
    ends = [m.end() for m in SENTENCE_END.finditer(text)]
    return text[: ends[-1]] if ends else ""


def keep(invented: list[Invented], how: Inventing, seen: Seen) -> tuple[list[Invented], Counter[str]]:
    """Those worth answering, let into `seen`; and how many were dropped for which reason."""
    kept, dropped = [], Counter[str]()
    for prompt in invented:
        why = _fault(prompt.text, how) or ("near-duplicate" if seen.overlaps(prompt.text) else "")
        if why:
            dropped[why] += 1
        else:
            seen.add(prompt.text)
            kept.append(prompt)
    return kept, dropped


def _fault(text: str, how: Inventing) -> str:
    words = WORD.findall(text.lower())
    if not how.words[0] <= len(words) <= how.words[1]:
        return "length"
    if len(set(words)) < how.distinct_words * len(words):
        return "repetition"
    if "\ufffd" in text or any(unicodedata.category(c) in BROKEN and c not in "\n\r\t" for c in text):
        return "broken characters"
    letters = [c for c in text if c.isalpha()]
    if how.script and sum(how.script in unicodedata.name(c, "") for c in letters) < OF_SCRIPT * len(letters):
        return "language"
    return ""
