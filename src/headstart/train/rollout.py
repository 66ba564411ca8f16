"""Many answers at once from a stock target: one pass a step over a large batch, chosen on tensors.

`generate` serves requests and keeps every promise of `Sampling`; here only greedy and plain nucleus sampling are
offered, and in return a step of 128 rows costs little more than its pass. The batch stays full: new prompts take the
places of answers that ended, and so does the next turn of a conversation.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.core import Taps
from headstart.errors import BadInput
from headstart.targets.base import Target, first_max, prefill
from headstart.tree import chain

SORTED = 256  # nucleus sampling looks at this many of the most likely tokens; the rest is never drawn
LOOP_RUN, LOOP_TIMES = 8, 3  # an answer ends when a run of 8 tokens stands in it for the third time
DROP = 0.125  # finished rows are replaced, or leave, when they are this share of the batch: either copies caches
GROUP = 32  # prompts that are run at once: alike in length, as they come sorted, so little is spent on padding
SPREAD = 64  # tokens: a prompt longer or shorter than the first of a pass is run apart; its padding would cost more
PREFILL_TOKENS = 2048  # per pass: more only makes the scratch tensors leave the caches


@dataclass(frozen=True, kw_only=True)
class How:
    """temperature 0 is greedy. `seed` fixes the draws as long as the prompts are the same. `cut_loops` ends an answer
    that repeats itself: what follows teaches nothing new. `rows` answers grow side by side."""

    rows: int = 128
    max_new_tokens: int = 192
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    cut_loops: bool = True

    def __post_init__(self) -> None:
        counts = min(self.rows, self.max_new_tokens) >= 1
        if not counts or not 0 <= self.temperature < float("inf") or not 0 < self.top_p <= 1:
            raise BadInput(
                f"{self}: expected rows and max_new_tokens of at least 1, a finite temperature of at least 0, "
                "top_p in (0, 1]."
            )


class Answer(NamedTuple):
    """`ids` include the stop id. `ended`: "stop", "length", or "loop" (cut because it repeats itself)."""

    ids: list[int]
    ended: str


Tick = Callable[[int], None]  # told of tokens as they come
Follow = Callable[[int, Answer], Sequence[int] | None]  # an answer, by its number, to the prompt that goes on from it


@torch.inference_mode()
def rollout(
    target: Target,
    prompts: Sequence[Sequence[int]],
    how: How,
    stops: Sequence[int],
    tick: Tick | None = None,
    follow: Follow | None = None,
    turns: Sequence[int] = (),
) -> list[Answer]:
    """Answer all prompts, in their order. Greedy answers are those of `generate` in fp32, cut where they loop.

    Prompts that `follow` returns are numbered on, and their answers come last; they take a place as soon as there is
    one. `turns`: how many turns each prompt begins; those of most start first, as they take longest.

    Raises BadInput for a prompt that is empty or leaves no room in the context, or for too many rows.
    """
    if not prompts:
        return []
    width = min(how.rows, len(prompts))
    _demand_room(target, prompts, width, how)
    asked = list(prompts)
    rows = [_Row(frozenset(stops), how) for _ in prompts]
    generator = torch.Generator(device="cpu").manual_seed(how.seed)
    first = turns or [1] * len(prompts)
    waiting = deque(sorted(range(len(prompts)), key=lambda i: (-first[i], len(prompts[i]))))
    seats: list[int | None] = [None] * width  # the number of the answer that grows there
    cache, token_B = target.empty(width), torch.zeros(width, dtype=torch.long)

    def chosen(logits_BV: Tensor, numbers: Sequence[int | None]) -> Tensor:
        """What a row of nobody computes is thrown away."""
        token_B = _choose(logits_BV, how, generator)
        taken = [(i, token) for i, token in zip(numbers, token_B.tolist(), strict=True) if i is not None]
        for i, token in taken:
            rows[i].take(token)
        if tick is not None:
            tick(len(taken))
        return token_B

    def leave() -> None:
        """Answers that have ended free their seats, and their conversations go on."""
        for seat, i in enumerate(seats):
            if i is None or not rows[i].ended:
                continue
            seats[seat] = None
            more = follow(i, rows[i].answer) if follow is not None else None
            if more is not None:
                _demand_room(target, [more], 1, how)
                waiting.appendleft(len(asked))
                asked.append(more)
                rows.append(_Row(frozenset(stops), how))

    while True:
        leave()
        while waiting and len(free := [s for s, i in enumerate(seats) if i is None]) >= min(
            len(waiting), max(1, int(DROP * width))
        ):
            group = _alike(waiting, asked, min(GROUP, len(free)))
            fresh, logits_BV = _prefill(target, [asked[i] for i in group])
            places = free[: len(group)]
            cache = target.replace(cache, places, fresh)
            token_B[places] = chosen(logits_BV, group)
            for seat, i in zip(places, group, strict=True):
                seats[seat] = i
            leave()
        going = [s for s, i in enumerate(seats) if i is not None]
        if not going:
            return [row.answer for row in rows]
        if not waiting and len(going) <= (1 - DROP) * len(seats):
            going = _closed_up(going)
            seats, token_B, cache = [seats[s] for s in going], token_B[going], target.select(cache, going)
        out, _ = target.extend(cache, token_B[:, None].to(target.device), chain(len(seats), 1, target.device), Taps())
        cache = target.commit(cache, [[] if i is None else [0] for i in seats])
        token_B = chosen(out.project(out.hidden_BND[:, 0]), seats)


def _closed_up(going: list[int]) -> list[int]:
    """The same seats, each in its place if that is left, and the last ones in the gaps: few rows have to move."""
    count = len(going)
    behind = iter([seat for seat in going if seat >= count])
    staying = set(going)
    return [place if place in staying else next(behind) for place in range(count)]


def _alike(waiting: deque[int], asked: Sequence[Sequence[int]], most: int) -> list[int]:
    """The next of those that wait, and those behind it that are not much longer or shorter: they share a pass."""
    group = [waiting.popleft()]
    length = len(asked[group[0]])
    while waiting and len(group) < most and abs(len(asked[waiting[0]]) - length) <= SPREAD:
        group.append(waiting.popleft())
    return group


class _Row:
    """One answer while it grows."""

    def __init__(self, stops: frozenset[int], how: How) -> None:
        self.stops, self.how = stops, how
        self.ids: list[int] = []
        self.ended = ""
        self._runs: Counter[tuple[int, ...]] = Counter()

    @property
    def answer(self) -> Answer:
        """As it stands."""
        return Answer(self.ids, self.ended)

    def take(self, token: int) -> None:
        """The next token."""
        self.ids.append(token)
        run = tuple(self.ids[-LOOP_RUN:])
        self._runs[run] += 1  # a shorter one, at the start, stands there once
        if token in self.stops:
            self.ended = "stop"
        elif self.how.cut_loops and self._runs[run] >= LOOP_TIMES:
            self.ended = "loop"
        elif len(self.ids) == self.how.max_new_tokens:
            self.ended = "length"


def _demand_room(target: Target, prompts: Sequence[Sequence[int]], width: int, how: How) -> None:
    target.can.demand("rollback", "Answering in batches")
    if width > target.can.max_batch:
        raise BadInput(f"{width} answers side by side; this target takes at most {target.can.max_batch}. Lower `rows`.")
    shortest, longest = (f(map(len, prompts)) for f in (min, max))
    if not shortest or longest + how.max_new_tokens > target.can.max_positions:
        raise BadInput(
            f"Prompts of {shortest} to {longest} tokens: expected at least one, and room for {how.max_new_tokens} more "
            f"in a context of {target.can.max_positions}. Lower the number of new tokens or leave long prompts out."
        )


def _prefill(target: Target, prompts: Sequence[Sequence[int]]) -> tuple[Any, Tensor]:
    """Run the prompts; what they all begin with (a system prompt) is run once and its cache copied to every row."""
    shared = next((i for i, column in enumerate(zip(*prompts, strict=False)) if len(set(column)) > 1), 0)
    cache = target.empty(len(prompts))
    if shared:
        cache, _, _ = prefill(target, target.empty(1), [prompts[0][:shared]], Taps())
        cache = target.select(cache, [0] * len(prompts))
    chunk = max(8, PREFILL_TOKENS // len(prompts))
    cache, rows, _ = prefill(target, cache, [p[shared:] for p in prompts], Taps(), chunk)
    return cache, rows.project(rows.hidden_BND[:, 0])


def _choose(logits_BV: Tensor, how: How, generator: torch.Generator) -> Tensor:
    """The next token of every row; randomness is spent on all rows alike, so it depends on the batch only."""
    if how.temperature == 0:
        return first_max(logits_BV).cpu()
    score_BK, token_BK = logits_BV.float().topk(min(SORTED, logits_BV.shape[1]))
    p_BK = torch.softmax(score_BK / how.temperature, -1)
    before_BK = p_BK.cumsum(-1) - p_BK
    p_BK = (p_BK * (before_BK < how.top_p)).cpu()
    pick_B1 = torch.multinomial(p_BK, 1, generator=generator)
    return token_BK.cpu().gather(1, pick_B1)[:, 0]
