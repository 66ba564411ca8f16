"""Many answers at once: greedy ones are those of `generate` token by token, sampled ones follow the exact law."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import headstart as hs
from headstart.errors import BadInput, Unsupported
from headstart.targets.base import Target
from headstart.testing import table_target, tiny_target
from headstart.testing.exact import random_table
from headstart.train import rollout as module
from headstart.train.rollout import LOOP_RUN, LOOP_TIMES, Answer, How, rollout
from helpers import prompts, spied
from test_chisquare import chi_square, processed

NEW = 24
FREE = How(max_new_tokens=NEW, cut_loops=False)
RAGGED = prompts(12, seed=5, low=1, high=30)
PREFIX = [7, 3, 3, 90, 41, 5, 0, 66, 12, 8, 8]
LEVEL = 1e-3


def plain(target: Target, asked: list[list[int]], count: int = NEW, eos: tuple[int, ...] = ()) -> list[list[int]]:
    """What `generate` says."""
    outputs = hs.generate(target, asked, max_new_tokens=count, sampling=hs.Sampling(eos=eos))
    return [output.token_ids for output in outputs]


def cut(ids: list[int]) -> int:
    """By definition: the length at which some run of 8 stands in the answer for the third time."""
    for end in range(LOOP_RUN, len(ids) + 1):
        windows = [tuple(ids[i : i + LOOP_RUN]) for i in range(end - LOOP_RUN + 1)]
        if max(Counter(windows).values()) >= LOOP_TIMES:
            return end
    return len(ids) + 1


# --- greedy


@pytest.mark.parametrize(
    ("family", "shared"), [("llama", 0), ("llama", 1), ("llama", 11), ("gemma3", 11), ("gpt2", 11)]
)
def test_greedy_is_generate_for_ragged_prompts(tiny: Any, family: str, shared: int) -> None:
    target = tiny(family)
    asked = [PREFIX[:shared] + p for p in RAGGED]
    expected = plain(target, asked)
    assert len({token for ids in expected for token in ids}) >= 20 and len({tuple(ids) for ids in expected}) >= 10
    assert rollout(target, asked, FREE, ()) == [Answer(ids, "length") for ids in expected]


@pytest.mark.parametrize("same", [False, True], ids=["no prefix", "prefix"])
def test_nothing_hangs_on_the_company_or_its_order(tiny: Any, same: bool) -> None:
    target = tiny()
    asked = [(PREFIX if same else []) + p for p in RAGGED]
    alone = [rollout(target, [p], FREE, ())[0] for p in asked]
    assert [a.ids for a in alone] == [plain(target, [p])[0] for p in asked]
    rng = random.Random(0)
    for count in (2, 7, 12):
        chosen = rng.sample(range(len(asked)), count)
        assert rollout(target, [asked[i] for i in chosen], FREE, ()) == [alone[i] for i in chosen]
    twice = [asked[3], asked[3], asked[3] + [5], asked[3]]  # equal prompts, and one that begins with the others
    longer = plain(target, [twice[2]])[0]
    assert [a.ids for a in rollout(target, twice, FREE, ())] == [alone[3].ids, alone[3].ids, longer, alone[3].ids]
    assert [a.ids for a in rollout(target, twice[:2], FREE, ())] == [alone[3].ids] * 2
    assert [a.ids for a in rollout(target, twice[2:], FREE, ())] == [longer, alone[3].ids]


def test_prompts_are_run_in_pieces(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny()
    monkeypatch.setattr(module, "PREFILL_TOKENS", 1)  # 8 tokens a pass, prompts of 1 to 30
    calls = spied(monkeypatch, target, "extend")
    answers = rollout(target, RAGGED, FREE, ())
    assert [tuple(call[1].shape) for call in calls[:5]] == [(12, 8)] * 3 + [(12, max(map(len, RAGGED)) - 24), (12, 1)]
    monkeypatch.undo()
    assert [a.ids for a in answers] == plain(target, RAGGED)


def test_what_all_prompts_begin_with_is_run_once(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny()
    calls = spied(monkeypatch, target, "extend")
    rollout(target, [[*PREFIX, 1, 2], [*PREFIX, 3], [*PREFIX, 1]], How(max_new_tokens=2), ())
    assert [call[1].tolist() for call in calls[:2]] == [[PREFIX], [[3, 0], [1, 0], [1, 2]]]
    assert [tuple(call[1].shape) for call in calls[2:]] == [(3, 1)]


def stops_of(expected: list[list[int]]) -> tuple[int, ...]:
    """Ids that end answers at many different lengths, some at once and some not at all."""
    rare = Counter(token for ids in expected for token in set(ids))
    return (expected[0][0], *[token for token, seen in rare.items() if seen <= 4][:3])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rows_stop_at_their_own_time_and_leave(tiny: Any, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny(family)
    stops = stops_of(plain(target, RAGGED))
    expected = plain(target, RAGGED, NEW, stops)
    lengths = [len(ids) for ids in expected]
    assert min(lengths) == 1 and max(lengths) == NEW and len(set(lengths)) >= 5
    calls, passes = spied(monkeypatch, target, "select"), spied(monkeypatch, target, "extend")
    answers = rollout(target, RAGGED, FREE, stops)
    monkeypatch.undo()
    assert answers == [Answer(ids, "stop" if ids[-1] in stops else "length") for ids in expected]
    assert {a.ended for a in answers} == {"stop", "length"}
    before = len(RAGGED)
    assert len(calls) >= 3, "rows left the batch at several times"
    for _, going in calls:
        assert len(going) <= (1 - module.DROP) * before
        before = len(going)
    assert len(passes[-1][1]) == before
    assert all(
        len(p[1]) <= sum(n > step for n in lengths) / (1 - module.DROP) + 1 for step, p in enumerate(passes[1:], 1)
    )


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("rows", [1, 2, 5, 9])
def test_new_prompts_take_the_places_of_answers_that_ended(
    tiny: Any, family: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny(family)
    asked = [*RAGGED, *([*PREFIX, *p] for p in RAGGED)]
    stops = stops_of(plain(target, asked))
    expected = plain(target, asked, NEW, stops)
    assert len({len(ids) for ids in expected}) >= 5
    monkeypatch.setattr(module, "GROUP", 3)
    passes, ticks = spied(monkeypatch, target, "extend"), []
    answers = rollout(target, asked, How(rows=rows, max_new_tokens=NEW, cut_loops=False), stops, ticks.append)
    assert [a.ids for a in answers] == expected
    assert sum(ticks) == sum(map(len, expected))
    widths = [len(call[1]) for call in passes if call[1].shape[1] == 1]
    assert max(map(len, (call[1] for call in passes))) == rows
    full = sum(width == rows for width in widths)
    assert full >= (sum(map(len, expected)) - len(asked)) / rows - NEW, "the batch is full until no prompt waits"


def followed(target: Target, how: How, asked: list[list[int]], turns: list[int], stops: tuple[int, ...] = ()) -> Any:
    """Conversations in which a turn is everything so far and one token more; answers by prompt and turn."""
    numbered = [(i, 0, list(p)) for i, p in enumerate(asked)]
    found: dict[tuple[int, int], tuple[list[int], list[int]]] = {}

    def follow(number: int, answer: Answer) -> list[int] | None:
        i, turn, ids = numbered[number]
        found[i, turn] = (ids, answer.ids)
        if turn + 1 == turns[i]:
            return None
        numbered.append((i, turn + 1, [*ids, *answer.ids, 5 + i]))
        return numbered[-1][2]

    answers = rollout(target, asked, how, stops, None, follow, turns)
    assert [a.ids for a in answers] == [found[i, turn][1] for i, turn, _ in numbered]
    return found


@pytest.mark.parametrize("rows", [1, 2, 5, 12])
def test_a_conversation_goes_on_in_the_running_batch(tiny: Any, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny()
    stops = stops_of(plain(target, RAGGED))
    turns = [1, 3, 1, 2, 1, 1, 4, 1, 1, 1, 2, 1]
    passes = spied(monkeypatch, target, "extend")
    found = followed(target, How(rows=rows, max_new_tokens=NEW, cut_loops=False), RAGGED, turns, stops)
    assert sorted(found) == [(i, turn) for i, count in enumerate(turns) for turn in range(count)]
    alone = sum(call[1].shape[1] == 1 and len(call[1]) == 1 for call in passes)
    monkeypatch.undo()
    for ids, answer in found.values():
        assert answer == plain(target, [ids], NEW, stops)[0]
    total = sum(len(answer) for _, answer in found.values())
    assert rows == 1 or alone <= total / 3, "turns run beside others"


def test_conversations_of_many_turns_start_first(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny()
    calls = spied(monkeypatch, module, "_prefill")
    turns = [1, 2, 1, 3, 1, 1]
    found = followed(target, How(rows=2, max_new_tokens=3), RAGGED[:6], turns)
    assert calls[0][1] == [RAGGED[3], RAGGED[1]]
    assert all(len(call[1]) <= 2 for call in calls)
    order = [call for *_, prompts in calls for call in prompts]
    assert order[2:4] == [found[1, 1][0], found[3, 1][0]], "a turn that is ready comes before prompts that wait"


def test_a_turn_without_room_is_refused(tiny: Any) -> None:
    target = tiny(max_positions=32)
    with pytest.raises(BadInput, match="room for 12 more"):
        rollout(target, [[1] * 9], How(max_new_tokens=12), (), None, lambda i, answer: [1] * 21)


def test_prompts_of_other_lengths_are_run_apart(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny()
    monkeypatch.setattr(module, "SPREAD", 10)
    calls = spied(monkeypatch, module, "_prefill")
    answers = rollout(target, RAGGED, FREE, ())
    assert [a.ids for a in answers] == plain(target, RAGGED)
    spans = [(min(map(len, call[1])), max(map(len, call[1]))) for call in calls]
    assert len(spans) >= 3 and all(high - low <= 10 for low, high in spans)
    assert [low for low, _ in spans] == sorted(low for low, _ in spans)


def test_with_places_to_fill_long_prompts_run_beside_long_ones(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny()
    monkeypatch.setattr(module, "GROUP", 4)
    calls = spied(monkeypatch, module, "_prefill")
    rollout(target, RAGGED, How(rows=8, max_new_tokens=3), ())
    groups = [[len(p) for p in call[1]] for call in calls]
    assert [n for group in groups for n in group] == sorted(map(len, RAGGED)) and max(map(len, groups)) == 4


def test_a_batch_whose_rows_all_end_at_once_runs_no_further_pass(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny()
    first = [ids[0] for ids in plain(target, RAGGED, 1)]
    calls = spied(monkeypatch, target, "extend")
    assert rollout(target, RAGGED, FREE, first) == [Answer([token], "stop") for token in first]
    assert rollout(target, RAGGED, How(max_new_tokens=1), ()) == [Answer([token], "length") for token in first]
    assert len(calls) == 2  # the prompts


def test_up_to_the_last_position() -> None:
    target = tiny_target(max_positions=32)
    asked = [list(range(20)), [5], [9] * 11]
    answers = rollout(target, asked, How(max_new_tokens=12, cut_loops=False), ())
    assert [a.ids for a in answers] == plain(target, asked, 12)


def test_ticks_count_every_token_once(tiny: Any) -> None:
    target = tiny()
    stops = stops_of(plain(target, RAGGED))
    for how in (How(max_new_tokens=NEW), How(max_new_tokens=NEW, temperature=1.0)):
        ticks: list[int] = []
        answers = rollout(target, RAGGED, how, stops, ticks.append)
        lengths = [len(a.ids) for a in answers]
        assert len(set(lengths)) >= 4
        assert ticks == [sum(n > step for n in lengths) for step in range(max(lengths))]
        assert sum(ticks) == sum(lengths)


# --- where an answer ends


def ring(following: list[int]) -> Target:
    """A target of one certain successor per token."""
    return table_target(torch.eye(len(following), dtype=torch.float64)[following])


@pytest.mark.parametrize(("lead", "period"), [(0, 1), (0, 2), (0, 5), (3, 1), (4, 7), (0, 8), (2, 9), (0, 13)])
def test_a_loop_is_cut_when_a_run_of_eight_stands_there_for_the_third_time(lead: int, period: int) -> None:
    count = lead + period + 1  # 0 leads to 1, 2, ..., and back to the start of the ring
    target = ring([*range(1, count), lead + 1])
    walk = [1 + i if i < lead else 1 + lead + (i - lead) % period for i in range(100)]
    expected = lead + 2 * period + LOOP_RUN
    assert cut(walk) == expected
    how = How(max_new_tokens=100)
    assert rollout(target, [[0]], how, ()) == [Answer(walk[:expected], "loop")]
    assert rollout(target, [[0]], How(max_new_tokens=100, cut_loops=False), ()) == [Answer(walk, "length")]
    assert rollout(target, [[0]], How(max_new_tokens=expected), ()) == [Answer(walk[:expected], "loop")]
    assert rollout(target, [[0]], How(max_new_tokens=expected - 1), ()) == [Answer(walk[: expected - 1], "length")]
    stop = walk[expected - 1]
    first = walk.index(stop) + 1
    assert rollout(target, [[0]], how, [stop]) == [Answer(walk[:first], "stop")]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 11), min_size=12, max_size=12), st.lists(st.integers(0, 11), min_size=1, max_size=5))
def test_loops_in_a_batch(following: list[int], starts: list[int]) -> None:
    walks = []
    for start in starts:
        walk = [following[start]]
        while len(walk) < 40:
            walk.append(following[walk[-1]])
        walks.append(walk)
    answers = rollout(ring(following), [[start] for start in starts], How(max_new_tokens=40), ())
    assert answers == [Answer(w[: cut(w)], "loop") for w in walks]  # at most 11 + 2 * 12 + 8 tokens


def test_the_third_time_need_not_follow_the_second() -> None:
    """Sampled, one prompt: the draws are the same whether loops are cut or not."""
    target = table_target([0.75, 0.25])
    kinds: Counter[str] = Counter()
    apart = 0
    for seed in range(24):
        whole = rollout(target, [[0]], How(max_new_tokens=60, temperature=1.0, seed=seed, cut_loops=False), ())[0].ids
        answer = rollout(target, [[0]], How(max_new_tokens=60, temperature=1.0, seed=seed), ())[0]
        end = cut(whole)
        assert answer == Answer(whole[:end], "loop" if end <= 60 else "length")
        kinds[answer.ended] += 1
        run = answer.ids[-LOOP_RUN:]
        places = [i for i in range(len(answer.ids) - LOOP_RUN + 1) if answer.ids[i : i + LOOP_RUN] == run]
        apart += answer.ended == "loop" and len({b - a for a, b in pairwise(places)}) > 1
    assert min(kinds["loop"], kinds["length"], apart) >= 3


def test_stop_comes_before_loop_and_length() -> None:
    rows = [module._Row(frozenset([1]), How(max_new_tokens=10)) for _ in range(3)]
    for token in [0] * 9:
        rows[0].take(token)
    rows[0].take(1)
    assert (rows[0].ids, rows[0].ended) == ([0] * 9 + [1], "stop")
    for token in [0] * 10:  # the third run of 8 ends at token 10, which is also the last one allowed
        assert not rows[1].ended
        rows[1].take(token)
    assert (rows[1].ids, rows[1].ended) == ([0] * 10, "loop")
    for token in [0, 2] * 5:
        rows[2].take(token)
    assert (rows[2].ids, rows[2].ended) == ([0, 2] * 5, "length")


# --- sampled

P = random_table(8, 1, seed=11, zeros=0.1)


def p_value(count: torch.Tensor, law: torch.Tensor) -> float:
    visited = count.sum(1) > 0
    return chi_square(count[visited], law[visited])


def counted(target: Target, how: How, rows: int = 150) -> torch.Tensor:
    """Pairs (token, next token) of a batch of equal prompts."""
    count = torch.zeros(8, 8, dtype=torch.float64)
    for answer in rollout(target, [[0]] * rows, how, ()):
        ids = torch.tensor([0, *answer.ids])
        count += torch.bincount(ids[:-1] * 8 + ids[1:], minlength=64).view(8, 8)
    return count


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.7, 1.0), (1.0, 0.8), (0.7, 0.7)])
def test_samples_follow_temperature_and_top_p(temperature: float, top_p: float) -> None:
    how = How(max_new_tokens=200, temperature=temperature, top_p=top_p, seed=3, cut_loops=False)
    count = counted(P, how)
    assert count.sum() == 30_000
    assert p_value(count, processed(P.table, temperature, top_p)) > LEVEL
    assert p_value(count, processed(P.table, temperature * 1.1, top_p)) < LEVEL, "a bug of this size is found"


def test_only_the_likeliest_tokens_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SORTED", 3)
    best = P.table.topk(3).indices
    law = torch.zeros_like(P.table).scatter(1, best, P.table.gather(1, best))
    count = counted(P, How(max_new_tokens=200, temperature=1.0, seed=3, cut_loops=False))
    assert p_value(count, law / law.sum(1, keepdim=True)) > LEVEL


def test_greedy_takes_the_first_of_equal_maxima() -> None:
    target = table_target([0.1, 0.3, 0.3, 0.3])
    assert rollout(target, [[0]], How(max_new_tokens=3), ())[0].ids == [1, 1, 1]


@pytest.mark.parametrize("temperature", [1e-3, 1e-6])
def test_cold_is_greedy(tiny: Any, temperature: float) -> None:
    cold = rollout(tiny(), RAGGED, How(max_new_tokens=20, temperature=temperature), ())
    assert cold == rollout(tiny(), RAGGED, How(max_new_tokens=20), ())


def test_a_small_nucleus_is_greedy(tiny: Any) -> None:
    small = rollout(tiny(), RAGGED, How(max_new_tokens=20, temperature=1.0, top_p=1e-6), ())
    assert small == rollout(tiny(), RAGGED, How(max_new_tokens=20), ())


def test_same_seed_same_answers(tiny: Any) -> None:
    target = tiny()
    stops = stops_of(plain(target, RAGGED))
    before = torch.get_rng_state()
    one, again, other = (
        rollout(target, RAGGED, How(max_new_tokens=NEW, temperature=1.0, seed=seed), stops) for seed in (1, 1, 2)
    )
    assert one == again
    assert sum(a != b for a, b in zip(one, other, strict=True)) >= len(RAGGED) - 4
    assert torch.equal(torch.get_rng_state(), before)
    alike = rollout(target, [[4, 4]] * 6, How(max_new_tokens=NEW, temperature=1.0), ())
    assert len({tuple(a.ids) for a in alike}) == 6, "equal prompts of a batch are answered independently"


# --- what cannot be honoured


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0}, {"rows": 0}, {"temperature": -0.1}, {"temperature": float("nan")},
        {"temperature": float("inf")}, {"top_p": 0.0}, {"top_p": 1.01}, {"top_p": float("nan")},
    ],
)  # fmt: skip
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=next(iter(wrong))):
        How(**wrong)


def test_prompts_are_checked() -> None:
    target = tiny_target(max_positions=32)
    assert rollout(target, [], FREE, ()) == []
    for asked in ([[]], [[1], []]):
        with pytest.raises(BadInput, match="Prompts of 0 to"):
            rollout(target, asked, How(max_new_tokens=4), ())
    with pytest.raises(BadInput, match=r"Prompts of 1 to 21 tokens: .* room for 12 more in a context of 32"):
        rollout(target, [[1], [1] * 21], How(max_new_tokens=12), ())
    with pytest.raises(BadInput, match="257 answers side by side; this target takes at most 256"):
        rollout(target, [[1]] * 257, How(rows=257, max_new_tokens=1), ())
    assert len(rollout(target, [[1]] * 257, How(rows=256, max_new_tokens=1), ())) == 257


def test_a_target_that_cannot_roll_back_is_refused(tiny: Any) -> None:
    with pytest.raises(Unsupported, match="rollback"):
        rollout(tiny("mamba"), [[1, 2]], How(max_new_tokens=2), ())


# --- injected bugs


def test_a_row_that_is_kept_in_the_wrong_place_would_be_seen(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny()
    stops = stops_of(plain(target, RAGGED))
    right = rollout(target, RAGGED, FREE, stops)
    select = target.select
    monkeypatch.setattr(target, "select", lambda cache, going: select(cache, going[::-1]))
    assert rollout(target, RAGGED, FREE, stops) != right


def test_a_prefix_that_is_not_copied_would_be_seen(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny()
    asked = [PREFIX + p for p in RAGGED]
    right = rollout(target, asked, FREE, ())
    monkeypatch.setattr(target, "select", lambda cache, going: target.empty(len(going)))
    assert rollout(target, asked, FREE, ()) != right


@pytest.mark.parametrize("going", [[0], [5], [0, 1, 2], [3, 4, 5], [0, 2, 5, 7], [1, 3, 4, 6, 9]])
def test_seats_close_up_with_few_moves(going: list[int]) -> None:
    order = module._closed_up(going)
    assert sorted(order) == going
    assert all(order[place] == place for place in going if place < len(going))
    assert all(seat >= len(going) for place, seat in enumerate(order) if seat != place)
