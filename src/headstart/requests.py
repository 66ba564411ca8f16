"""From what a user passes to requests that the loop can run; everything that cannot be honoured is refused here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

from jinja2 import TemplateError

from headstart.core import Kind, Shape
from headstart.decode import Request
from headstart.drafters.base import Drafter, Plain
from headstart.errors import BadInput
from headstart.sampling import Coin, History, Sampling
from headstart.stopping import Stop
from headstart.targets.base import Target
from headstart.verify.base import Verifier, demand_valid
from headstart.verify.lossless import Lossless
from headstart.verify.target_only import TargetOnly

Message = dict[str, str]
Prompt = str | list[Message] | list[int]
Batch = list[str] | list[list[Message]] | list[list[int]]


def pair(target: Target, drafter: Drafter | None, verifier: Verifier | None) -> tuple[Drafter, Verifier]:
    """Check that the pieces fit before any work is done; pick an exact verifier if none is given."""
    target.can.demand("rollback", "Decoding with headstart")
    if isinstance(drafter, str):
        raise BadInput(
            f"drafter={drafter!r} is a string; expected a drafter such as headstart.PromptLookup(), or None."
        )
    drafter = drafter or Plain()
    if drafter.shape is Shape.TREE:
        target.can.demand("tree", "Verifying a tree")
    drafter.check(target)
    verifier = verifier or drafter.verifier or (TargetOnly() if drafter.kind is Kind.POINT else Lossless())
    demand_valid(verifier, drafter.kind, drafter.shape)
    return drafter, verifier


def new_request(target: Target, ids: list[int], how: Sampling, max_new_tokens: int, sample: int) -> Request:
    """One sequence; further samples of a prompt get generators of their own, derived from the seed."""
    limit = min(max_new_tokens, target.can.max_positions - len(ids))
    seed = how.seed if sample == 0 or how.seed is None else [how.seed, sample]
    stop = Stop(how.eos_ids, how.stop, limit, target.tokenizer)
    return Request(how, History(ids), Coin(seed), stop)


def encode(target: Target, prompt: Prompt) -> list[int]:
    """Token ids of a prompt. Raises BadInput if it is empty, fills the context, or has messages without a template."""
    if not prompt:
        raise BadInput("The prompt is empty; give at least one character, message or token id.")
    if isinstance(prompt, str):
        ids = list(_tokenizer(target, "A prompt of text").encode(prompt))
    elif _all_are(dict, prompt):
        text = _rendered(target, prompt)
        ids = list(target.tokenizer.encode(text, add_special_tokens=False))
    elif _all_are(Integral, prompt):
        ids = [int(i) for i in prompt]  # type: ignore[arg-type]
        _demand_ids(target, ids)
    else:
        raise BadInput(f"A prompt is a string, a list of chat messages or a list of token ids; got {prompt!r}.")
    if not ids:
        raise BadInput(f"The prompt {prompt!r} has no tokens; give at least one.")
    if len(ids) >= target.can.max_positions:
        raise BadInput(
            f"The prompt has {len(ids)} tokens; the target's context holds {target.can.max_positions} and at least "
            "one must be left for the answer. Shorten the prompt."
        )
    return ids


def _all_are(kind: type, items: object) -> bool:
    return isinstance(items, Sequence) and all(isinstance(i, kind) and not isinstance(i, bool) for i in items)


def _tokenizer(target: Target, purpose: str) -> Any:
    if target.tokenizer is None:
        raise BadInput(f"{purpose} needs a tokenizer, and this target has none; give token ids.")
    return target.tokenizer


def _demand_ids(target: Target, ids: Iterable[int]) -> None:
    wrong = [i for i in ids if not 0 <= i < target.vocabulary.size]
    if wrong:
        last = target.vocabulary.size - 1
        raise BadInput(f"Token ids {wrong[:5]} are outside the target's vocabulary, which is 0..{last}.")


def _rendered(target: Target, messages: Any) -> str:
    for message in messages:
        if not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise BadInput(f"A chat message needs `role` and `content`, both strings; got {message!r}.")
    tokenizer = _tokenizer(target, "A chat")
    if not messages[-1]["content"].strip():
        raise BadInput("The last message is empty; give at least one character.")
    if not getattr(tokenizer, "chat_template", None):
        raise BadInput("This target has no chat template (a base model?); give the prompt as a string.")
    try:
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    except TemplateError as error:
        raise BadInput(f"The target's chat template refuses these messages: {error}") from error


def split(prompt: Prompt | Batch) -> tuple[bool, list[Any]]:
    """(is it one prompt, list of prompts)."""
    if isinstance(prompt, str):
        return True, [prompt]
    if not isinstance(prompt, Sequence) or not prompt:
        raise BadInput(f"Expected a prompt or a non-empty batch of prompts, got {prompt!r}.")
    first = type(prompt[0])
    if any(type(p) is not first for p in prompt):
        raise BadInput("A batch must hold prompts of one type: all strings, or all lists of messages or token ids.")
    return (True, [prompt]) if first in (dict, int) else (False, list(prompt))


def per_prompt(sampling: Sampling | Sequence[Sampling] | None, count: int, single: bool) -> list[Sampling]:
    """One setting per prompt; raises BadInput if their numbers differ."""
    if sampling is None or isinstance(sampling, Sampling):
        return [sampling or Sampling()] * count
    if len(sampling) != count or single:
        raise BadInput(f"{len(sampling)} sampling settings for {count} prompts; give one for all or one per prompt.")
    return list(sampling)


def resolved(target: Target, how: Sampling, max_new_tokens: int) -> Sampling:
    """Strings to ids, defaults to the target's; raises BadInput for what cannot be honoured."""
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise BadInput(f"max_new_tokens={max_new_tokens!r}: expected a whole number of at least 1.")
    if how.min_new_tokens > max_new_tokens:
        raise BadInput(f"min_new_tokens={how.min_new_tokens} exceeds max_new_tokens={max_new_tokens}.")
    eos = tuple(() if how.ignore_eos else target.eos if how.eos is None else how.eos_ids)
    if how.stop:
        _tokenizer(target, "A stop string")
    words = [ids for word in how.bad_words for ids in _word_ids(target, word)]
    used = {*how.logit_bias, *eos, *(i for word in words for i in word)}
    _demand_ids(target, used)
    # ignore_eos is settled by the empty list; keeping it would clash with an explicit one
    return replace(how, eos=eos, ignore_eos=False, bad_words=words)


def _word_ids(target: Target, word: str | Sequence[int]) -> list[Sequence[int]]:
    """A bad word is banned at the start of a text and after a space: two token sequences in most vocabularies."""
    if not isinstance(word, str):
        return [word]
    tokenizer = _tokenizer(target, "A bad word of text")
    forms = [tokenizer.encode(form, add_special_tokens=False) for form in (word, f" {word}")]
    return [list(form) for form in dict.fromkeys(map(tuple, forms)) if form]
