"""Chats that keep their caches between turns."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

from headstart.decode import Request, State
from headstart.drafters.base import Drafter
from headstart.errors import BadInput
from headstart.generation import Job, Output, Piece, run
from headstart.requests import Message, encode, new_request, pair, resolved
from headstart.sampling import Sampling
from headstart.targets.base import Target
from headstart.verify.base import Verifier


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
        self._drafter, self._verifier = pair(target, drafter, verifier)
        self._sampling = sampling or Sampling()
        self._max_new_tokens = max_new_tokens
        self._state: State | None = None
        self._tokens: list[int] = []  # ids whose caches `_state` holds, in order
        self._open: Generator[Piece] | None = None  # the turn that is being streamed
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
        """As `send`, piece by piece. If it is left early, what was said so far stays in the conversation.

        A new turn ends one that is still open: they would write to the same caches.
        """
        if self._open is not None:
            self._open.close()
        messages = [*self.messages, {"role": "user", "content": content}]
        ids = encode(self.target, messages)
        how = resolved(self.target, self._sampling, self._max_new_tokens)
        request = new_request(self.target, ids, how, self._max_new_tokens, 0)
        self._open = self._turn(request, ids, messages)
        return self._open

    def _turn(self, request: Request, ids: list[int], messages: list[Message]) -> Generator[Piece]:
        self.messages = messages
        job = Job(self.target, self._drafter, self._verifier, [request], [[0]], True)

        def keep(state: State) -> None:
            self._state = state
            self._tokens = [*ids, *request.history.output][: state.cache.lengths[0]]

        try:
            yield from run(job, self._rewound(ids), keep)
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
