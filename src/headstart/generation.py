"""What users call: generate and stream, and what they get back."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, overload

from headstart.decode import Emission, Lap, Request, State, TopLogprobs, decode, untimed
from headstart.drafters.base import Drafter
from headstart.errors import BadInput
from headstart.requests import Batch, Prompt, encode, new_request, pair, per_prompt, resolved, split
from headstart.sampling import Sampling
from headstart.stopping import Reason
from headstart.targets.base import Target
from headstart.verify.base import Verifier


@dataclass(frozen=True)
class Stats:
    """Counts of one answer; rates are left to whoever divides.

    passes: target passes after the prompt's. accepted: histogram, `accepted[k]` steps took k drafted tokens.
    seconds: wall time of the whole call, shared by the batch. prompt_tokens: tokens of the prompt;
    reused_tokens: how many of them stood in a cache already. verifier: its name; a lossy one says so in it.
    """

    passes: int
    drafted: int
    accepted: dict[int, int]
    tokens: int
    prompt_tokens: int
    reused_tokens: int
    seconds: float
    verifier: str

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
    job = prepare(target, prompt, drafter, max_new_tokens, sampling, verifier)
    done = {piece.request: piece.output for piece in run(job) if piece.output is not None}
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
    return run(prepare(target, prompt, drafter, max_new_tokens, sampling, verifier))


@dataclass
class Job:
    """A checked batch, ready to run."""

    target: Target
    drafter: Drafter
    verifier: Verifier
    requests: list[Request]
    samples: list[list[int]]  # request numbers of each prompt
    single: bool


def prepare(
    target: Target,
    prompt: Prompt | Batch,
    drafter: Drafter | None,
    max_new_tokens: int,
    sampling: Sampling | Sequence[Sampling] | None,
    verifier: Verifier | None,
) -> Job:
    """Everything checked, nothing done. Raises as `generate` does."""
    single, prompts = split(prompt)
    settings = per_prompt(sampling, len(prompts), single)
    drafter, verifier = pair(target, drafter, verifier)
    requests: list[Request] = []
    samples = []
    for text, how in zip(prompts, settings, strict=True):
        ids = encode(target, text)
        how = resolved(target, how, max_new_tokens)
        numbers = list(range(len(requests), len(requests) + how.n))
        requests += [new_request(target, ids, how, max_new_tokens, sample) for sample in range(how.n)]
        samples.append(numbers)
    if len(requests) > target.can.max_batch:
        raise BadInput(f"{len(requests)} sequences in one batch; this target takes at most {target.can.max_batch}.")
    return Job(target, drafter, verifier, requests, samples, single)


def run(
    job: Job, state: State | None = None, keep: Callable[[State], None] | None = None, lap: Lap = untimed
) -> Iterator[Piece]:
    """Decode the batch, piece by piece; `keep` is handed every state so that a session can go on from it, `lap` every
    verb that ends."""
    started = time.perf_counter()
    reused = [0] * len(job.requests) if state is None else state.cache.lengths
    tallies = [_Tally(cached) for cached in reused]
    for step in decode(job.target, job.requests, job.drafter, job.verifier, state, lap):
        if keep is not None:
            keep(step.state)
        for emission in step.emissions:
            tally, request = tallies[emission.request], job.requests[emission.request]
            tally.add(emission, step.drafted)
            text = request.stop.piece()
            output = None
            if request.stop.reason is not None:
                output = tally.output(request, time.perf_counter() - started, job.verifier.name)
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

    def output(self, request: Request, seconds: float, verifier: str) -> Output:
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
            verifier=verifier,
        )
        logprobs = self.logprobs if request.sampling.logprobs else None
        return Output(request.stop.text, list(ids), request.stop.reason, stats, logprobs)
