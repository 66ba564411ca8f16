"""What users call: generate, stream, and sessions that keep their caches between turns."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, overload

from headstart.core import Kind, Shape
from headstart.decode import Emission, Request, State, TopLogprobs, decode
from headstart.drafters.base import Drafter, Plain
from headstart.errors import BadInput
from headstart.sampling import Coin, History, Sampling
from headstart.stopping import Reason, Stop
from headstart.targets.base import Target
from headstart.verify.base import Verifier, demand_valid
from headstart.verify.lossless import Lossless
from headstart.verify.target_only import TargetOnly

Message = dict[str, str]
Prompt = str | list[Message] | list[int]
Batch = list[str] | list[list[Message]] | list[list[int]]


@dataclass(frozen=True)
class Stats:
    """Counts of one answer; rates are left to whoever divides.

    passes: target passes after the prompt's. accepted: histogram, `accepted[k]` steps took k drafted tokens.
    seconds: wall time of the whole call, shared by the batch. prompt_tokens: tokens of the prompt;
    reused_tokens: how many of them stood in a cache already.
    """

    passes: int
    drafted: int
    accepted: dict[int, int]
    tokens: int
    prompt_tokens: int
    reused_tokens: int
    seconds: float

    @property
    def tokens_per_step(self) -> float:
        """Tokens emitted after the prompt's pass, per target pass; 1.0 is plain decoding, 0.0 if there was none."""
        return (self.tokens - 1) / self.passes if self.passes else 0.0


@dataclass(frozen=True)
class TokenLogprob:
    """The target's log-probability of one emitted token before temperature and processors, and the best others."""

    token_id: int
    logprob: float
    top: TopLogprobs


@dataclass(frozen=True)
class Output:
    """One answer. `token_ids` includes an ending EOS and the token that completed a stop string; `text` neither.

    With `Sampling.n` > 1 this is the first sample and `samples` are all of them.
    """

    text: str
    token_ids: list[int]
    finish_reason: Reason
    stats: Stats
    logprobs: list[TokenLogprob] | None = None
    others: tuple[Output, ...] = ()

    @property
    def samples(self) -> list[Output]:
        """All n samples of this prompt."""
        return [self, *self.others]


class Piece(NamedTuple):
    """What one request emitted in one step. `text` is what can be shown for good: an incomplete character or a
    possible stop string is held back, so it can be empty. `output` is set on the request's last piece."""

    text: str
    request: int
    token_ids: list[int]
    accepted: int  # how many of the tokens, from the first on, were drafted
    logprobs: list[TokenLogprob]
    output: Output | None


@overload
def generate(
    target: Target,
    prompt: Prompt,
    *,
    drafter: Drafter | None = None,
    max_new_tokens: int = 128,
    sampling: Sampling | None = None,
    verifier: Verifier | None = None,
) -> Output: ...
@overload
def generate(
    target: Target,
    prompt: Batch,
    *,
    drafter: Drafter | None = None,
    max_new_tokens: int = 128,
    sampling: Sampling | Sequence[Sampling] | None = None,
    verifier: Verifier | None = None,
) -> list[Output]: ...
def generate(
    target: Target,
    prompt: Prompt | Batch,
    *,
    drafter: Drafter | None = None,
    max_new_tokens: int = 128,
    sampling: Sampling | Sequence[Sampling] | None = None,
    verifier: Verifier | None = None,
) -> Output | list[Output]:
    """Answer one prompt, or each prompt of a batch (one target pass a step serves them all).

    A prompt is a string taken as it is, a list of chat messages, or a list of token ids. `drafter` None is plain
    decoding. `max_new_tokens` bounds the answer, which also ends, with reason "length", at the target's context
    limit. `sampling` may be one per prompt. `verifier` None takes one that is exact for the drafter's proposals.
    Raises BadInput or Unsupported before any work is done.
    """
    job = _prepare(target, prompt, drafter, max_new_tokens, sampling, verifier)
    done = {piece.request: piece.output for piece in _run(job) if piece.output is not None}
    answers = []
    for samples in job.samples:
        first, *others = (done[request] for request in samples)
        answers.append(replace(first, others=tuple(others)))
    return answers[0] if job.single else answers


def stream(
    target: Target,
    prompt: Prompt | Batch,
    *,
    drafter: Drafter | None = None,
    max_new_tokens: int = 128,
    sampling: Sampling | Sequence[Sampling] | None = None,
    verifier: Verifier | None = None,
) -> Iterator[Piece]:
    """As `generate`, piece by piece as steps complete. The concatenated texts are the text of the output.

    Arguments are checked at once, not at the first `next`. It may be left at any time.
    """
    return _run(_prepare(target, prompt, drafter, max_new_tokens, sampling, verifier))


@dataclass
class _Job:
    target: Target
    drafter: Drafter
    verifier: Verifier
    requests: list[Request]
    samples: list[list[int]]  # request numbers of each prompt
    single: bool


def _prepare(
    target: Target,
    prompt: Prompt | Batch,
    drafter: Drafter | None,
    max_new_tokens: int,
    sampling: Sampling | Sequence[Sampling] | None,
    verifier: Verifier | None,
) -> _Job:
    single, prompts = _split(prompt)
    settings = _per_prompt(sampling, len(prompts), single)
    drafter, verifier = _pair(target, drafter, verifier)
    requests: list[Request] = []
    samples = []
    for text, how in zip(prompts, settings, strict=True):
        ids = encode(target, text)
        resolved = _resolved(target, how, max_new_tokens)
        numbers = list(range(len(requests), len(requests) + how.n))
        requests += [_request(target, ids, resolved, max_new_tokens, sample) for sample in range(how.n)]
        samples.append(numbers)
    if len(requests) > target.can.max_batch:
        raise BadInput(f"{len(requests)} sequences in one batch; this target takes at most {target.can.max_batch}.")
    return _Job(target, drafter, verifier, requests, samples, single)


def _pair(target: Target, drafter: Drafter | None, verifier: Verifier | None) -> tuple[Drafter, Verifier]:
    """Check that the pieces fit before any work is done; pick an exact verifier if none is given."""
    target.can.demand("rollback", "Decoding with headstart")
    drafter = drafter or Plain()
    if drafter.shape is Shape.TREE:
        target.can.demand("tree", "Verifying a tree")
    drafter.check(target)
    verifier = verifier or (TargetOnly() if drafter.kind is Kind.POINT else Lossless())
    demand_valid(verifier, drafter.kind, drafter.shape)
    return drafter, verifier


def _request(target: Target, ids: list[int], how: Sampling, max_new_tokens: int, sample: int) -> Request:
    limit = min(max_new_tokens, target.can.max_positions - len(ids))
    seed = how.seed if sample == 0 or how.seed is None else [how.seed, sample]
    stop = Stop(how.eos_ids, how.stop, limit, target.tokenizer)
    return Request(how, History(ids), Coin(seed), stop)


def _run(job: _Job, state: State | None = None, keep: Callable[[State], None] | None = None) -> Iterator[Piece]:
    started = time.perf_counter()
    reused = [0] * len(job.requests) if state is None else state.cache.lengths
    tallies = [_Tally(cached) for cached in reused]
    for step in decode(job.target, job.requests, job.drafter, job.verifier, state):
        if keep is not None:
            keep(step.state)
        for emission in step.emissions:
            tally, request = tallies[emission.request], job.requests[emission.request]
            tally.add(emission, step.drafted)
            text = request.stop.piece()
            output = tally.output(request, time.perf_counter() - started) if request.stop.reason else None
            accepted = len(emission.kept) - 1 if step.drafted else 0
            logprobs = tally.logprobs[-len(emission.tokens) :] if request.sampling.logprobs else []
            yield Piece(text, emission.request, emission.tokens, accepted, logprobs, output)


class _Tally:
    """Counts of one request while it runs."""

    def __init__(self, reused: int) -> None:
        self.reused = reused
        self.passes = 0
        self.drafted = 0
        self.accepted: Counter[int] = Counter()
        self.logprobs: list[TokenLogprob] = []

    def add(self, emission: Emission, drafted: bool) -> None:
        if drafted:
            self.passes += 1
            self.drafted += sum(map(len, emission.tree.trials))
            self.accepted[len(emission.kept) - 1] += 1
        for token, (logprob, top) in zip(emission.tokens, emission.logprobs, strict=False):
            self.logprobs.append(TokenLogprob(token, logprob, top))

    def output(self, request: Request, seconds: float) -> Output:
        assert request.stop.reason is not None
        ids = request.history.output
        stats = Stats(
            passes=self.passes,
            drafted=self.drafted,
            accepted=dict(sorted(self.accepted.items())),
            tokens=len(ids),
            prompt_tokens=len(request.history.prompt),
            reused_tokens=self.reused,
            seconds=seconds,
        )
        logprobs = self.logprobs if request.sampling.logprobs else None
        return Output(request.stop.text, list(ids), request.stop.reason, stats, logprobs)


def encode(target: Target, prompt: Prompt) -> list[int]:
    """Token ids of a prompt. Raises BadInput if it is empty, fills the context, or has messages without a template."""
    if not prompt:
        raise BadInput("The prompt is empty; give at least one character, message or token id.")
    if isinstance(prompt, str):
        ids = list(target.tokenizer.encode(prompt))
    elif isinstance(prompt[0], dict):
        ids = list(target.tokenizer.encode(_rendered(target, prompt), add_special_tokens=False))
    else:
        ids = [int(i) for i in prompt]
        _demand_ids(target, ids)
    if not ids:
        raise BadInput(f"The prompt {prompt!r} has no tokens; give at least one.")
    if len(ids) >= target.can.max_positions:
        raise BadInput(
            f"The prompt has {len(ids)} tokens; the target's context holds {target.can.max_positions} and at least "
            "one must be left for the answer. Shorten the prompt."
        )
    return ids


def _demand_ids(target: Target, ids: Iterable[int]) -> None:
    wrong = [i for i in ids if not 0 <= i < target.vocabulary.size]
    if wrong:
        last = target.vocabulary.size - 1
        raise BadInput(f"Token ids {wrong[:5]} are outside the target's vocabulary, which is 0..{last}.")


def _rendered(target: Target, messages: Any) -> str:
    for message in messages:
        if not isinstance(message, dict) or set(message) < {"role", "content"}:
            raise BadInput(f"A chat message needs `role` and `content`; got {message!r}.")
    if not getattr(target.tokenizer, "chat_template", None):
        raise BadInput("This target has no chat template (a base model?); give the prompt as a string.")
    return str(target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def _split(prompt: Prompt | Batch) -> tuple[bool, list[Any]]:
    """(is it one prompt, list of prompts)."""
    if isinstance(prompt, str):
        return True, [prompt]
    if not isinstance(prompt, Sequence) or not prompt:
        raise BadInput(f"Expected a prompt or a non-empty batch of prompts, got {prompt!r}.")
    first = type(prompt[0])
    if any(type(p) is not first for p in prompt):
        raise BadInput("A batch must hold prompts of one type: all strings, or all lists of messages or token ids.")
    return (True, [prompt]) if first in (dict, int) else (False, list(prompt))


def _per_prompt(sampling: Sampling | Sequence[Sampling] | None, count: int, single: bool) -> list[Sampling]:
    if sampling is None or isinstance(sampling, Sampling):
        return [sampling or Sampling()] * count
    if len(sampling) != count or single:
        raise BadInput(f"{len(sampling)} sampling settings for {count} prompts; give one for all or one per prompt.")
    return list(sampling)


def _resolved(target: Target, how: Sampling, max_new_tokens: int) -> Sampling:
    """Strings to ids, defaults to the target's; raises BadInput for what cannot be honoured."""
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise BadInput(f"max_new_tokens={max_new_tokens!r}: expected a whole number of at least 1.")
    if how.min_new_tokens > max_new_tokens:
        raise BadInput(f"min_new_tokens={how.min_new_tokens} exceeds max_new_tokens={max_new_tokens}.")
    eos = tuple(() if how.ignore_eos else target.eos if how.eos is None else how.eos_ids)
    words = [ids for word in how.bad_words for ids in _word_ids(target, word)]
    used = {*how.logit_bias, *eos, *(i for word in words for i in word)}
    _demand_ids(target, used)
    # ignore_eos is settled by the empty list; keeping it would clash with an explicit one
    return replace(how, eos=eos, ignore_eos=False, bad_words=words)


def _word_ids(target: Target, word: str | Sequence[int]) -> list[Sequence[int]]:
    """A bad word is banned at the start of a text and after a space: two token sequences in most vocabularies."""
    if not isinstance(word, str):
        return [word]
    forms = [target.tokenizer.encode(form, add_special_tokens=False) for form in (word, f" {word}")]
    return [list(form) for form in dict.fromkeys(map(tuple, forms)) if form]


class Session:
    """A chat that keeps its caches between turns: only what is new in the conversation is run.

    The shared prefix is found by comparing token ids, so templates that rewrite history cost time, not truth.
    """

    def __init__(
        self,
        target: Target,
        *,
        drafter: Drafter | None = None,
        max_new_tokens: int = 512,
        sampling: Sampling | None = None,
        verifier: Verifier | None = None,
        messages: Sequence[Message] = (),
    ) -> None:
        """`messages` is what was said before, a system prompt for example. Raises as `generate` does."""
        self.target = target
        self.messages: list[Message] = [dict(m) for m in messages]
        self._drafter, self._verifier = _pair(target, drafter, verifier)
        self._sampling = sampling or Sampling()
        self._max_new_tokens = max_new_tokens
        self._state: State | None = None
        self._tokens: list[int] = []  # ids whose caches `_state` holds, in order
        if self._sampling.n > 1:
            raise BadInput(f"A session holds one conversation; n={self._sampling.n} samples do not fit.")

    def send(self, content: str) -> Output:
        """The answer to one more user message."""
        output = None
        for piece in self.stream(content):
            output = piece.output or output
        assert output is not None
        return output

    def stream(self, content: str) -> Iterator[Piece]:
        """As `send`, piece by piece. If it is left early, what was said so far stays in the conversation."""
        if not content.strip():
            raise BadInput("The message is empty; say something.")
        messages = [*self.messages, {"role": "user", "content": content}]
        ids = encode(self.target, messages)
        how = _resolved(self.target, self._sampling, self._max_new_tokens)
        request = _request(self.target, ids, how, self._max_new_tokens, 0)
        self.messages = messages
        return self._turn(request, ids)

    def _turn(self, request: Request, ids: list[int]) -> Iterator[Piece]:
        job = _Job(self.target, self._drafter, self._verifier, [request], [[0]], True)

        def keep(state: State) -> None:
            self._state = state
            self._tokens = [*ids, *request.history.output][: state.cache.lengths[0]]

        try:
            yield from _run(job, self._rewound(ids), keep)
        finally:
            self.messages.append({"role": "assistant", "content": request.stop.text})

    def _rewound(self, ids: list[int]) -> State | None:
        """Caches cut back to the longest prefix that they share with the new conversation."""
        shared = 0
        while shared < min(len(ids) - 1, len(self._tokens)) and ids[shared] == self._tokens[shared]:
            shared += 1
        state, self._state, self._tokens = self._state, None, []
        if state is None or shared == 0:
            return None
        cache = self.target.rewind(state.cache, [shared])
        return State(cache, self._drafter.rewind(state.drafter_state, [shared]), state.roots)
