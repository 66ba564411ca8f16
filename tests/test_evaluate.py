"""Evaluation: replay and wall clock agree, the identities between figures hold exactly, nothing is counted twice."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import headstart as hs
from headstart.checkpoint import save
from headstart.core import Features, Taps
from headstart.drafters.lookup import PromptLookup
from headstart.drafting import HeadDrafter
from headstart.errors import BadInput
from headstart.evaluate import speed as module
from headstart.evaluate.cost import target_cost
from headstart.evaluate.nodes import sizes
from headstart.evaluate.report import HEAD, LOOKUP, PLAIN, _without, markdown, picture, replayed
from headstart.evaluate.run import Trees, evaluate, forecast, some, spread
from headstart.evaluate.speed import REST, VERBS, Answer, Arm, answer, race, speedup
from headstart.evaluate.texts import LOOP, Turn, answered, looping
from headstart.replay import Replayed, Spoken, replay
from headstart.train.capture import Window
from headstart.train.readers import Chat
from headstart.tree import chain
from helpers import prompts
from test_distil import CHATS, chat, chat_target, many
from test_medusa import VOCABS, taught

NEW = 24
TREE = [(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]


def drafted(target: Any, paths: Any = TREE) -> HeadDrafter:
    """A head that is right now and then."""
    return HeadDrafter(taught("llama", VOCABS["full"]), target, hs.StaticTree(paths=paths), VOCABS["full"])


def turns_of(target: Any, tmp_path: Path, drafter: Any, chats: list[Chat]) -> list[Turn]:
    return answered(target, chats, tmp_path, max_new_tokens=NEW, needs=drafter.needs, window=Window(before=1))


def test_replay_is_what_decoding_does(tmp_path: Path) -> None:
    target = chat_target()
    for drafter in (drafted(target), PromptLookup()):
        turns = turns_of(target, tmp_path, drafter, CHATS)
        assert len(turns) >= 6 and {t.turn for t in turns} == {0, 1, 2}
        found = replay(drafter, [t.text for t in turns])
        arms = race(target, [t.prompt for t in turns], {PLAIN: None, HEAD: drafter}, NEW)
        for turn, plain, fast, steps in zip(turns, arms[PLAIN].answers, arms[HEAD].answers, found.trace, strict=True):
            assert plain.ids == fast.ids == turn.text.ids[turn.text.prompt :]
            assert fast.steps == len(steps) and fast.accepted == Counter(steps)
        assert arms[HEAD].tokens_per_step == found.tokens_per_step > 1.0
        assert arms[PLAIN].tokens_per_step == 1.0
        assert arms[HEAD].accepted == Counter(found.accepted)


def test_the_figures_fit_each_other(tmp_path: Path) -> None:
    target = chat_target()
    head = drafted(target)
    turns = turns_of(target, tmp_path, head, [*CHATS, *many(8)])
    record = replayed(head, PromptLookup(), turns)
    depths = record["acceptance_by_depth"]
    assert record["tokens_per_step"] == pytest.approx(1 + sum(depths["unconditional"]), abs=1e-3)
    for d, share in enumerate(depths["conditional"]):
        above = depths["unconditional"][d - 1] if d else 1.0
        assert share * above == pytest.approx(depths["unconditional"][d], abs=1e-3)
    counts = {int(k): n for k, n in record["steps_by_accepted_length"].items()}
    emitted = sum((k + 1) * n for k, n in counts.items())
    assert emitted == sum(len(t.text.ids) - t.text.prompt - 1 for t in turns)
    assert record["tokens_per_step"] == pytest.approx(emitted / sum(counts.values()), abs=1e-4)
    groups = record["by_category"]
    assert sum(row["answers"] for row in groups.values()) == record["answers"] == len(turns)
    assert set(groups) == {"qa", "chat", "free"}
    for name, row in groups.items():
        own = [t.text for t in turns if (t.category or "free") == name]
        assert row["tokens_per_step"] == round(replay(head, own).tokens_per_step, 4)
        assert row["lookup_tokens_per_step"] == round(replay(PromptLookup(), own).tokens_per_step, 4)


def test_features_belong_to_their_own_text(tmp_path: Path) -> None:
    """Two prompts whose windows hold the same ids and other states."""
    target = chat_target(eos=None)
    chats = [chat("a", "x" * 40), chat("b", "y" * 90), chat("c", "z")]
    turns = answered(target, chats, tmp_path, max_new_tokens=6, needs=Taps(final=True), window=Window(before=2))
    assert [t.chat for t in turns] == ["c", "a", "b"]
    for turn in turns:
        ids = torch.tensor([turn.text.ids])
        _, features = target.extend(target.empty(1), ids, chain(*ids.shape), Taps(final=True))
        expected = features.final[0, turn.text.start :]
        assert turn.text.start == len(turn.prompt) - 2
        assert torch.allclose(turn.text.features.final, expected, atol=1e-5)
    none = answered(target, chats, tmp_path, max_new_tokens=6, needs=Taps(), window=Window())
    assert [t.text.ids for t in none] == [t.text.ids for t in turns]
    assert all(t.text.features == Features(None, ()) and t.text.start == 0 for t in none)


def test_loops_by_definition() -> None:
    said = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9]
    flags = looping(Spoken([0, 0, *said], 2, Features(None, ())))
    assert LOOP == 8 and len(flags) == len(said)
    assert [i for i, x in enumerate(flags) if x] == [16, 17]  # the second 1..8 and the second 2..9
    assert not any(looping(Spoken([5] * 9, 2, Features(None, ()))))
    assert looping(Spoken([5] * 9, 0, Features(None, ()))) == [False] * 8 + [True]


def test_tokens_per_step_without_loops() -> None:
    """First token, a step of 3, one of 1, one of 2; the last two tokens loop."""
    found = Replayed([[2, 0, 1]])
    assert _without(found, [[False] * 7]) == found.tokens_per_step == 2.0
    assert _without(found, [[False] * 5 + [True] * 2]) == 2.0  # 4 tokens of 2 steps
    assert _without(found, [[False] * 6 + [True]]) == pytest.approx(5 / 2.5)
    assert _without(found, [[False, True, True, True, False, False, False]]) == pytest.approx(3 / 2)
    assert _without(found, [[True] * 7]) == 0.0


def test_the_parts_of_a_step_sum_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that ticks once a look: nothing is counted twice, and projections count with the target."""
    target = chat_target(eos=None)
    ticks = itertools.count()
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(ticks)))
    found = answer(target, [5, 6, 7], drafted(target), NEW)
    assert found.steps > 3 and set(found.parts) == set(VERBS)
    arm = Arm([found])
    parts = arm.step_ms()
    assert sum(parts[name] for name in (*VERBS, REST)) == pytest.approx(parts["step"])
    per_step = {verb: found.parts[verb] / found.steps for verb in VERBS}
    assert per_step["draft"] == per_step["commit"] == per_step["absorb"] == 1.0
    assert per_step["target"] == 1.0 + 1.0 and per_step["verify"] == 3.0 - 1.0  # one look before and one after it


def test_rates_and_intervals() -> None:
    def of(tokens: int, seconds: float) -> Answer:
        return Answer([0] * tokens, tokens, tokens, seconds, 0.1, Counter(), dict.fromkeys(VERBS, 0.0))

    plain, fast = Arm([of(10, 1.0), of(30, 2.0)]), Arm([of(10, 0.5), of(30, 1.0)])
    assert plain.tokens_per_s == pytest.approx(40 / 3)
    ratio, interval = speedup(plain, fast)
    assert (ratio, interval) == (pytest.approx(2.0), pytest.approx([2.0, 2.0]))
    uneven = Arm([of(10, 1.0), of(30, 0.5)])
    ratio, (low, high) = speedup(plain, uneven)
    assert ratio == pytest.approx((40 / 1.5) / (40 / 3))
    assert low == pytest.approx(1.0) and high == pytest.approx(4.0)  # draws of one prompt only


def test_arms_run_in_turn_and_see_the_same_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    target = chat_target()
    seen: list[tuple[list[int], Any]] = []
    honest = module.answer

    def spy(target: Any, prompt: list[int], drafter: Any, count: int) -> Any:
        seen.append((prompt, drafter))
        return honest(target, prompt, drafter, count)

    monkeypatch.setattr(module, "answer", spy)
    asked, lookup = prompts(3), PromptLookup()
    arms = race(target, asked, {PLAIN: None, LOOKUP: lookup}, 6)
    assert seen[:2] == [(asked[0], None), (asked[0], lookup)], "both are warmed up"
    assert seen[2:] == [(p, d) for i, p in enumerate(asked) for d in ([None, lookup] if i % 2 == 0 else [lookup, None])]
    assert [len(arm.answers) for arm in arms.values()] == [3, 3]


def test_the_cost_of_a_pass_leaves_no_trace(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny(max_positions=128)
    found = target_cost(target, (16, 100, 120), (1, 2, 8, 16), rounds=2)
    assert {context: list(row) for context, row in found.items()} == {16: [1, 2, 8, 16], 100: [1, 2, 8, 16]}
    assert all(ms > 0 for row in found.values() for ms in row.values())


def test_prompts_are_picked_alike_from_all_categories() -> None:
    turns = [Turn(str(i), 0, "ab"[i > 3], [i], Spoken([i], 1, Features(None, ()))) for i in range(6)]
    assert [t.chat for t in spread(turns, 5)] == ["0", "4", "1", "5", "2"]
    assert len(spread(turns, 99)) == 6
    chats = [chat(str(i), "q", category="ab"[i % 2]) for i in range(7)]
    assert [c.id for c in some(chats, 2)] == ["0", "1", "2", "3"] and some(chats, None) == chats
    with pytest.raises(BadInput, match="no user turn"):
        some([Chat("x", [], "", "a text")], None)


def test_one_token_answers_cannot_be_measured(tmp_path: Path) -> None:
    target = chat_target(eos=tuple(range(96)))
    with pytest.raises(BadInput, match="more than one token"):
        answered(target, CHATS, tmp_path, max_new_tokens=4, needs=Taps(), window=Window())


def test_a_whole_evaluation(tmp_path: Path) -> None:
    target = chat_target(max_positions=4096)
    head = drafted(target)
    made = []

    def make(nodes: int) -> Any:
        made.append(nodes)
        return drafted(target, TREE[: nodes - 1])

    record = evaluate(
        target, head, [*CHATS, *many(4)], tmp_path, max_new_tokens=12, n_timed=4, trees=Trees(make, len(TREE) + 1)
    )
    assert sorted(set(made)) == [2, 3, 4, 6] and record["nodes"] == made[-1]
    assert [size["nodes"] for size in record["sizes"]] == [2, 3, 4, 6]
    assert record["timed_prompts"] == record["identical"] == 4
    assert set(record["target_cost_ms"]) == {"256", "2048"}
    whole = {"target": "t", "drafter": "d", "prompts": "p", **record}
    text = markdown(whole)
    assert f"**{record['tokens_per_step']:.2f} tokens per step**" in text and "pay best" in text
    assert picture(whole, tmp_path / "x.png") and (tmp_path / "x.png").stat().st_size > 1000
    short = evaluate(target, head, CHATS, tmp_path, max_new_tokens=12, n_timed=0, costs=False)
    assert "speedup" not in short and "target_cost_ms" not in short
    assert "times as fast" not in markdown({"target": "t", "drafter": "d", "prompts": "p", **short})
    assert "about" in forecast(target, head, 5, 12, 2)


def test_sizes_are_best_first(tmp_path: Path) -> None:
    target = chat_target(max_positions=512)
    head = drafted(target)
    texts = [t.text for t in turns_of(target, tmp_path, head, CHATS)]
    found = sizes(target, lambda n: drafted(target, TREE[: n - 1]), texts, 5)
    assert sorted(s.nodes for s in found) == [2, 3, 4, 5]
    assert [s.speedup for s in found] == sorted((s.speedup for s in found), reverse=True)
    for size in found:
        assert size.tokens_per_step == replay(drafted(target, TREE[: size.nodes - 1]), texts).tokens_per_step


# --- the command


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, Path]:
    """A target and a head of its own, as directories."""
    target = chat_target(max_positions=4096)
    model = tmp_path / "target"
    target.model.save_pretrained(model)
    target.tokenizer.save_pretrained(model)
    head = drafted(target).head
    save(
        tmp_path / "head", head, "medusa",
        target=target, target_name=str(model), vocab=VOCABS["full"], paths=TREE, card={},
    )  # fmt: skip
    return model, tmp_path / "head"


def test_the_command_writes_what_the_issue_of_speed_hangs_on(
    run: Any, trained: tuple[Path, Path], tmp_path: Path
) -> None:
    model, head = trained
    asked = tmp_path / "prompts.jsonl"
    rows = [{"question_id": i, "category": "qa", "turns": [f"Who is {i}?", "Why?"]} for i in range(4)]
    asked.write_text("\n".join(map(json.dumps, rows)))
    common = ("--prompts", asked, "--per-category", 3, "-m", 8, "--dtype", "fp32", "--cache", tmp_path / "cache")
    done = run("eval", model, head, *common, "--timed", 2, "--nodes", "best", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "answered and replayed" in done.stderr
    record = json.loads((tmp_path / "out/eval.json").read_text())
    for key in ("tokens_per_step", "speedup", "speedup_interval", "acceptance_by_depth", "target_cost_ms"):
        assert key in record
    assert record["plain"]["tokens_per_s"] > 0 and record["speculative"]["tokens_per_s"] > 0
    assert record["overhead_ms_per_step"] > 0 and record["by_category"]["qa"]["answers"] == record["answers"] <= 6
    assert record["nodes"] in [size["nodes"] for size in record["sizes"]]
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"eval.json", "eval.md", "eval.png"}
    done = run("eval", model, "lookup", *common, "--timed", 0, "--no-costs")
    assert done.returncode == 0 and "prompt lookup" in done.stdout
    for words, fault in {
        ("lookup", "--nodes", "best"): "no saved tree",
        (head, "--nodes", "many"): "expected saved, best",
        (head, "--nodes", "99"): "nodes can be 2 to 6",
        ("none",): "gains nothing over itself",
    }.items():
        done = run("eval", model, *words, *common)
        assert done.returncode == 1 and fault in done.stderr
