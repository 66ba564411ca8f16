"""What `headstart eval` measures, in order: answers, replay, wall clock, cost of a target pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headstart.core import Report
from headstart.drafters.base import Drafter
from headstart.drafters.lookup import PromptLookup
from headstart.drafting import HeadDrafter
from headstart.errors import BadInput
from headstart.evaluate.cost import target_cost
from headstart.evaluate.nodes import sizes
from headstart.evaluate.report import HEAD, LOOKUP, PLAIN, replayed, timed
from headstart.evaluate.speed import answer, race
from headstart.evaluate.texts import ROWS, Turn, answered
from headstart.learn import versions, window_of
from headstart.targets.base import Target
from headstart.train.capture import Window
from headstart.train.readers import Chat


class Trees(NamedTuple):
    """The same head with trees of other sizes: how to make one, and the largest."""

    make: Callable[[int], Drafter]
    largest: int


WARM, PROBE = 16, [17] * 64  # tokens of a probe, and its prompt


def evaluate(
    target: Target,
    drafter: Drafter,
    chats: Sequence[Chat],
    cache: Path,
    *,
    max_new_tokens: int = 128,
    n_timed: int = 26,
    costs: bool = True,
    trees: Trees | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """Figures by name, as docs/evaluation.md defines them. With `n_timed` 0 nothing is timed but, if asked for, passes.
    With `trees` the drafter is the one whose tree pays best here, by a model of the step (`sizes` in the figures).

    Raises BadInput if no prompt can be answered.
    """
    lookup = PromptLookup()
    turns = answered(
        target, chats, cache, max_new_tokens=max_new_tokens, needs=drafter.needs, window=_window(drafter), report=report
    )
    tuned: dict[str, Any] = {}
    if trees is not None:
        found = sizes(target, trees.make, [turn.text for turn in turns], trees.largest, report)
        tuned = {"nodes": found[0].nodes, "sizes": [size._asdict() for size in sorted(found)]}
        drafter = trees.make(found[0].nodes)
    record: dict[str, Any] = {
        "dtype": str(target.can.dtype).removeprefix("torch."),
        "max_new_tokens": max_new_tokens,
        "threads": torch.get_num_threads(),
        "versions": versions(),
        **tuned,
        **replayed(drafter, lookup, turns),
    }
    if n_timed:
        arms = {PLAIN: None, HEAD: drafter, LOOKUP: lookup}
        record |= timed(race(target, [turn.prompt for turn in spread(turns, n_timed)], arms, max_new_tokens, report))
    if costs:
        record["target_cost_ms"] = {
            str(context): {str(n): round(ms, 3) for n, ms in row.items()}
            for context, row in target_cost(target, report=report).items()
        }
    return record


def forecast(target: Target, drafter: Drafter, prompts: int, max_new_tokens: int, n_timed: int) -> str:
    """What it will take, from a short probe of plain decoding and of a drafted step."""
    answer(target, PROBE, None, WARM)  # a first pass costs more than the others
    found = [answer(target, PROBE, one, WARM) for one in (None, drafter)]
    step = max(arm.seconds / max(arm.steps, 1) for arm in found)
    side_by_side = 3 * step * max_new_tokens * prompts / ROWS  # a step of a batch costs a few single ones
    seconds = side_by_side + 2.5 * n_timed * max_new_tokens * step + 200 * step
    return f"{prompts} prompts answered and replayed, {n_timed} answers timed three ways: about {seconds / 60:.0f} min"


def spread(turns: Sequence[Turn], count: int) -> list[Turn]:
    """So many turns, of all categories alike."""
    groups = defaultdict(list)
    for turn in turns:
        groups[turn.category].append(turn)

    def alternating() -> Iterator[Turn]:
        for row in zip_longest(*groups.values()):
            yield from (turn for turn in row if turn is not None)

    return list(alternating())[:count]


def some(chats: Sequence[Chat], per_category: int | None) -> list[Chat]:
    """The first so many of each category. Raises BadInput if there is no user turn at all."""
    taken: dict[str, int] = defaultdict(int)
    out = []
    for chat in chats:
        taken[chat.category] += 1
        if per_category is None or taken[chat.category] <= per_category:
            out.append(chat)
    if not any(message["role"] == "user" for chat in out for message in chat.messages):
        raise BadInput("The prompts hold no user turn; there is nothing to answer.")
    return out


def _window(drafter: Drafter) -> Window:
    """All positions, unless a head sees its anchor alone."""
    if isinstance(drafter, HeadDrafter):
        return window_of(drafter.head, drafter.policy.depth)
    return Window()
