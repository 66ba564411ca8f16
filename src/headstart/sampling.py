"""From logits to a law to a token: one processor chain for plain and for speculative decoding.

Order (docs/design.md): logit bias, bad words, minimum length, repetition, presence and frequency penalty,
temperature, top-k, top-p, min-p. The context of a row is prompt + output + the draft nodes on its own path, so
every row that verification visits gets exactly the treatment it would get in plain decoding. Scores and laws
are fp32 (fp64 stays fp64: the exact tests need it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from headstart.errors import BadInput

NEVER = float("-inf")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen; a frozen value, one per request.

    temperature: 0 is greedy (first maximum). top_k: 0 is off. top_p in (0, 1], min_p in [0, 1).
    repetition_penalty counts prompt and output, presence and frequency penalties count output only.
    bad_words: strings or token-id sequences that are never completed. stop: strings, cut from the text.
    eos: token ids that end the answer; None takes the target's own, () means none. seed: None draws one.
    logprobs: the target's log-probability of each emitted token, before temperature and processors;
    top_logprobs: how many alternatives to add to each. n: samples per prompt.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[str | Sequence[int]] = ()
    min_new_tokens: int = 0
    stop: Sequence[str] = ()
    eos: int | Sequence[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    n: int = 1

    def __post_init__(self) -> None:
        """Freeze the containers and refuse what cannot be honoured; raises BadInput naming the setting."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        given = (self.bad_words,) if isinstance(self.bad_words, str) else self.bad_words
        words = tuple(w if isinstance(w, str) else tuple(w) for w in given)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "bad_words", words)
        object.__setattr__(self, "eos", None if self.eos is None else self.eos_ids)
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))
        _check(self)

    @property
    def greedy(self) -> bool:
        """True where the token is an argmax: temperature 0, whatever the truncation settings."""
        return self.temperature == 0

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids of `eos`; empty where it is None."""
        return () if self.eos is None else (self.eos,) if isinstance(self.eos, int) else tuple(self.eos)

    @property
    def moves_argmax(self) -> bool:
        """True if a processor can change which token has the largest score."""
        return bool(
            self.logit_bias
            or self.bad_words
            or self.min_new_tokens
            or self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
        )


def _check(s: Sampling) -> None:
    rules = [
        (0 <= s.temperature < float("inf"), "temperature", s.temperature, "a finite number >= 0"),
        (s.top_k >= 0, "top_k", s.top_k, "0 (off) or a positive count"),
        (0 < s.top_p <= 1, "top_p", s.top_p, "in (0, 1]"),
        (0 <= s.min_p < 1, "min_p", s.min_p, "in [0, 1)"),
        (0 < s.repetition_penalty < float("inf"), "repetition_penalty", s.repetition_penalty, "a number > 0"),
        (abs(s.presence_penalty) < float("inf"), "presence_penalty", s.presence_penalty, "a finite number"),
        (abs(s.frequency_penalty) < float("inf"), "frequency_penalty", s.frequency_penalty, "a finite number"),
        (s.min_new_tokens >= 0, "min_new_tokens", s.min_new_tokens, ">= 0"),
        (s.top_logprobs >= 0, "top_logprobs", s.top_logprobs, ">= 0"),
        (s.n >= 1, "n", s.n, ">= 1"),
        (s.seed is None or s.seed >= 0, "seed", s.seed, "None or a whole number >= 0"),
        (all(s.stop), "stop", list(s.stop), "strings of at least one character (an empty one matches at once)"),
        (all(s.bad_words), "bad_words", list(s.bad_words), "non-empty words"),
        (all(b < float("inf") for b in s.logit_bias.values()), "logit_bias", dict(s.logit_bias), "numbers or -inf"),
    ]
    for holds, name, seen, expected in rules:
        if not holds:
            raise BadInput(f"Sampling({name}={seen!r}) cannot be honoured: expected {expected}.")
    contradictions = [
        (s.top_logprobs and not s.logprobs, "top_logprobs without logprobs", "set logprobs=True"),
        (s.greedy and s.n > 1, f"n={s.n} samples at temperature 0 would all be equal", "raise temperature or use n=1"),
        (s.ignore_eos and s.eos, "both eos and ignore_eos", "drop one of them"),
    ]
    for clash, what, remedy in contradictions:
        if clash:
            raise BadInput(f"Contradictory sampling settings: {what}; {remedy}.")


class Coin:
    """The randomness of one request: one generator, advanced through accept tests and draws (bugs.md B09).

    The exact tests swap in a coin that walks every branch with its probability (`headstart.testing.exact`).
    """

    def __init__(self, seed: int | Sequence[int] | None) -> None:
        self._rng = np.random.default_rng(seed)

    def accept(self, numerator: float, denominator: float) -> bool:
        """True with probability min(1, numerator / denominator), without dividing (verification.md 5.1)."""
        return float(self._rng.random()) * denominator < numerator

    def draw(self, law_V: Tensor) -> int:
        """One token of the law by inverse transform, summed in fp64; never a token of probability 0."""
        cumulative = law_V.numpy().cumsum(dtype=np.float64)
        index = int(cumulative.searchsorted(self._rng.random() * cumulative[-1], side="right"))
        # The product can round up to the total; then the last token with mass is the one meant.
        return min(index, int(cumulative.searchsorted(cumulative[-1], side="left")))


class History:
    """The tokens that processors look back on: prompt, output so far, and a path of draft nodes."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.prompt = tuple(prompt)
        self.output: list[int] = []
        self._seen = set(self.prompt)
        self._counts: Counter[int] = Counter()

    def emit(self, token: int) -> None:
        """Add one emitted token."""
        self.output.append(token)
        self._seen.add(token)
        self._counts[token] += 1

    def seen(self, path: Sequence[int]) -> list[int]:
        """Distinct tokens of prompt, output and path."""
        return list(self._seen.union(path))

    def counts(self, path: Sequence[int]) -> Counter[int]:
        """How often each token occurs in output and path."""
        return self._counts + Counter(path)

    def ends_with(self, head: Sequence[int], path: Sequence[int]) -> bool:
        """True if prompt + output + path ends with `head`."""
        tail = [*self.prompt[-len(head) :], *self.output[-len(head) :], *path] if head else []
        return len(tail) >= len(head) and tuple(tail[len(tail) - len(head) :]) == tuple(head)


def at_least_fp32(logits: Tensor) -> Tensor:
    """Scores are computed in fp32; fp64 tables stay fp64."""
    return logits if logits.dtype == torch.float64 else logits.float()


def scores(logits_V: Tensor, sampling: Sampling, history: History, path: Sequence[int]) -> Tensor:
    """Logits after every processor that can move the argmax; `path` holds the draft tokens before this row.

    Expects `sampling.bad_words` and `sampling.eos` as token ids (`headstart.generation` resolves strings).
    """
    score_V = at_least_fp32(logits_V)
    if not sampling.moves_argmax:
        return score_V
    score_V = score_V.clone()
    if sampling.logit_bias:
        score_V[list(sampling.logit_bias)] += torch.tensor(list(sampling.logit_bias.values())).to(score_V)
    for word in sampling.bad_words:
        if history.ends_with(word[:-1], path):  # type: ignore[arg-type]
            score_V[word[-1]] = NEVER  # type: ignore[index]
    if sampling.eos and len(history.output) + len(path) < sampling.min_new_tokens:
        score_V[list(sampling.eos_ids)] = NEVER
    if sampling.repetition_penalty != 1:
        seen = history.seen(path)
        old = score_V[seen]
        penalty = sampling.repetition_penalty
        score_V[seen] = torch.where(old < 0, old * penalty, old / penalty)
    if (sampling.presence_penalty or sampling.frequency_penalty) and (counts := history.counts(path)):
        count = torch.tensor(list(counts.values())).to(score_V)
        score_V[list(counts)] -= sampling.presence_penalty + sampling.frequency_penalty * count
    return score_V


def law(logits_V: Tensor, sampling: Sampling, history: History, path: Sequence[int]) -> Tensor:
    """The next-token law `p_V` after the whole chain; greedy requests get a point mass on the first maximum.

    Raises BadInput if the processors leave no token at all.
    """
    score_V = scores(logits_V, sampling, history, path)
    if sampling.greedy:
        return torch.nn.functional.one_hot(torch.tensor(best(score_V)), len(score_V)).to(score_V)
    best(score_V)
    return tempered(score_V, sampling)


def best(score_V: Tensor) -> int:
    """The first maximum; raises BadInput if the processors have banned every token."""
    top, token = score_V.max(0)
    if not float(top) > NEVER:
        raise BadInput("The processors leave no token that may be said next; relax logit_bias or bad_words.")
    return int(token)


def tempered(score_V: Tensor, sampling: Sampling) -> Tensor:
    """The law at a temperature above 0: minus the maximum first, so that a tiny temperature does not overflow."""
    return truncated_softmax((score_V - score_V.max()) / sampling.temperature, sampling)


def truncated_softmax(score_V: Tensor, sampling: Sampling) -> Tensor:
    """Softmax after top-k, top-p and min-p. One sort at most, of the smallest prefix that can matter."""
    if sampling.top_k and sampling.top_k < len(score_V):
        floor = score_V.topk(sampling.top_k).values[-1]
        score_V = score_V.masked_fill(score_V < floor, NEVER)
    p_V = torch.softmax(score_V, 0)
    if sampling.top_p == 1 and sampling.min_p == 0:
        return p_V
    if sampling.top_p < 1:
        p_V = _top_p(p_V, sampling.top_p)
    if sampling.min_p > 0:
        p_V = p_V * (p_V >= sampling.min_p * p_V.max())
    return p_V / p_V.sum()


def _top_p(p_V: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of most likely tokens whose mass reaches top_p; the most likely one always stays."""
    for k in (64, 1024, len(p_V)):  # a peaked law needs no sort of the whole vocabulary
        top_p_K, top_K = p_V.topk(min(k, len(p_V)))
        before_K = top_p_K.cumsum(0) - top_p_K
        if k >= len(p_V) or float(before_K[-1]) >= top_p:
            break
    keep_K = before_K < top_p
    return torch.zeros_like(p_V).scatter_(0, top_K, top_p_K * keep_K)


def draws(q_V: Tensor, k: int, without_replacement: bool, coin: Coin) -> list[int]:
    """k tokens from q, in draw order. Without replacement, tokens out of mass are followed by untried ones.

    The filler keeps the tree's shape fixed; the verifier gives it the uniform law that it was, in effect, drawn
    from (verification.md 5.4: "if q has no mass left: q <- uniform over untried tokens").
    """
    if not without_replacement:
        return [coin.draw(q_V) for _ in range(k)]
    left_V = q_V.clone()
    out: list[int] = []
    for _ in range(k):
        if not bool(left_V.any()):
            left_V = torch.ones_like(q_V)
            left_V[out] = 0
        out.append(coin.draw(left_V))
        left_V[out[-1]] = 0
    return out
