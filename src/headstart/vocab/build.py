"""Choosing a draft vocabulary: count what the target says, never lose the ids that a text cannot do without."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from headstart.errors import BadInput
from headstart.vocab.base import DraftVocab
from headstart.vocab.trimmed import Trimmed

PENDING = 1 << 20  # tokens gathered between two histograms: a histogram costs V, however short the rows are


def count_tokens(rows: Iterable[Sequence[int]], size: int) -> Tensor:
    """How often each of the `size` target ids occurs in the rows, `[V]` int64. Raises BadInput for an id outside."""
    count_V = torch.zeros(size, dtype=torch.long)
    pending: list[int] = []
    for row in rows:
        pending.extend(row)
        if len(pending) >= PENDING:
            count_V += _histogram(pending, size)
            pending = []
    return count_V + _histogram(pending, size)


def _histogram(tokens: list[int], size: int) -> Tensor:
    if tokens and not 0 <= min(tokens) <= max(tokens) < size:
        raise BadInput(
            f"Ids {min(tokens)} to {max(tokens)} stand in the counted text, but the target's are 0..{size - 1}. "
            "Count text that was encoded with the target's tokenizer."
        )
    return torch.bincount(torch.tensor(tokens, dtype=torch.long), minlength=size)


def forced_ids(tokenizer: Any, eos: Iterable[int]) -> list[int]:
    """Ids that a draft vocabulary must hold, ascending: without them a head cannot end a turn, or spell a rare word.

    These are the target's stop ids; the tokenizer's special tokens; added tokens that a chat template writes, special
    or not (`<think>`); and the tokens of single bytes. No tokenizer (None): the stop ids are all there is to know.
    """
    forced = set(eos)
    if tokenizer is not None:
        vocab = tokenizer.get_vocab()
        forced |= set(tokenizer.all_special_ids)
        forced |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        templates = _templates(tokenizer)
        forced |= {i for text, i in tokenizer.get_added_vocab().items() if any(text in t for t in templates)}
        forced |= {vocab[text] for text in single_bytes() if text in vocab}
    return sorted(forced)


def _templates(tokenizer: Any) -> list[str]:
    """A tokenizer has no chat template, one, or one per name."""
    template = tokenizer.chat_template
    if template is None:
        return []
    return [template] if isinstance(template, str) else list(template.values())


def single_bytes() -> list[str]:
    """The token texts of all bytes in both spellings: GPT-2's byte alphabet, and SentencePiece's `<0x00>` fallback.

    GPT-2 writes a byte as the Latin-1 character of that number if it can be seen, the others as characters from 256 on.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = [*visible, *range(0x100, 0x100 + 256 - len(visible))]
    return [*map(chr, alphabet), *(f"<0x{byte:02X}>" for byte in range(256))]


def build(count_V: Tensor, size: int, forced: Sequence[int], real_ids: int | None) -> Trimmed:
    """The forced ids and the most frequent others, `size` in all, in ascending order; the smaller id wins a tie.

    Where the counts end, ids that never occurred fill up, smallest first. Ids from `real_ids` on are padding rows of
    the LM head that the tokenizer lacks, and never enter (None: there are none). Raises BadInput if the numbers cannot
    be met.
    """
    target_size = len(count_V)
    real = target_size if real_ids is None else real_ids
    if not 0 < real <= target_size:
        raise BadInput(f"real_ids is {real}, but there are counts of {target_size} ids; pass 1 to {target_size}.")
    distinct = sorted(set(forced))
    outside = [i for i in distinct if not 0 <= i < real]
    if outside:
        raise BadInput(f"Forced id {outside[0]} is not among the {real} ids of the tokenizer. Leave it out.")
    if not max(len(distinct), 1) <= size <= real:
        raise BadInput(
            f"A draft vocabulary of {size} ids cannot hold the {len(distinct)} forced ids and come from the {real} ids "
            f"of the tokenizer; choose {max(len(distinct), 1)} to {real}."
        )
    rank_V = count_V[:real].clone()
    rank_V[distinct] = rank_V.max() + 1
    return Trimmed(rank_V.argsort(descending=True, stable=True)[:size].sort().values.tolist(), target_size)


def coverage(count_V: Tensor, vocab: DraftVocab) -> float:
    """The share of the counted tokens that can be drafted; drafts in place of the others are refused for certain.

    Raises BadInput if no token was counted.
    """
    total = int(count_V.sum())
    if total < 1:
        raise BadInput("No token was counted, so nothing can be covered. Count some text of the target first.")
    _, known_V = vocab.labels(torch.arange(len(count_V), device=count_V.device))
    return int(count_V[known_V].sum()) / total
