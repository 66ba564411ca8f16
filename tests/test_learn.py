"""From prompts to a head that drafts: the whole of `headstart distill` and `headstart train`, on tiny targets."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import headstart as hs
from headstart.checkpoint import load
from headstart.cli import main
from headstart.errors import BadInput, TrainingStopped
from headstart.forecast import extrapolated, forecast
from headstart.learn import Data, Recipe, _head_rows, fitted, gather, held_out_answers, of_row
from headstart.prompts import packaged
from headstart.testing import tiny_target
from headstart.train.answers import read_answers
from headstart.train.distil import Given, distil
from headstart.train.loop import Training
from headstart.train.readers import Chat
from headstart.train.rollout import How
from test_bugs_identity import quantised

TRAINING = Training(
    tokens=3000, step_tokens=200, micro_tokens=600, weights=(0.8, 0.64, 0.5), evaluate_every=1000, learning_rate=1e-2
)
RECIPE = Recipe(training=TRAINING, head={"heads": 3}, draft_vocab=None, tree_nodes=8)


def answered(target: Any, out: Path, count: int = 24) -> Path:
    """Answers to short random prompts."""
    rng = random.Random(5)
    chats = [Chat(str(i), [{"role": "user", "content": _words(rng)}], "") for i in range(count)]
    distil(target, Given(chats, unit=8), out, How(max_new_tokens=24))
    return out


def _words(rng: random.Random) -> str:
    return " ".join("".join(rng.choices("abcdefgh", k=3)) for _ in range(3))


def split(target: Any, folder: Path) -> Data:
    samples = [of_row(row) for row in read_answers(folder)]
    return Data(samples[3:], samples[:3], {"supervised": 0})


@pytest.fixture
def data(tiny: Any, tmp_path: Path) -> Data:
    return split(tiny(), answered(tiny(), tmp_path / "answers"))


def test_a_trained_head_drafts_and_changes_nothing(tiny: Any, data: Data, tmp_path: Path) -> None:
    target = tiny()
    done = fitted(target, "tiny", data, RECIPE, tmp_path / "run", tmp_path / "cache")
    assert done.progress.tokens >= TRAINING.tokens and len(done.progress.history) >= 3
    best = max(row["tokens_per_step"] for row in done.progress.history)
    assert done.held_out.tokens_per_step == pytest.approx(best)
    for name in ("run.json", "provenance.json", "metrics.jsonl", "curves.png", "head/model.safetensors"):
        assert (tmp_path / "run" / name).stat().st_size > 0
    head = hs.load_head(tmp_path / "run" / "head", target)
    for prompt in ("abc", [{"role": "user", "content": "fed cab"}]):
        plain = hs.generate(target, prompt, max_new_tokens=30)
        fast = hs.generate(target, prompt, drafter=head, max_new_tokens=30)
        assert fast.token_ids == plain.token_ids
        assert fast.stats.drafted > fast.stats.passes
    record = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert {"argv", "versions", "data", "target", "family"} <= record.keys()


def test_a_run_goes_on_and_another_recipe_is_refused(tiny: Any, data: Data, tmp_path: Path) -> None:
    target, cache = tiny(), tmp_path / "cache"
    straight = fitted(target, "tiny", data, RECIPE, tmp_path / "straight", cache)
    with pytest.raises(TrainingStopped, match="goes on"):
        fitted(target, "tiny", data, RECIPE, tmp_path / "run", cache, until=0.0)
    again = fitted(target, "tiny", data, RECIPE, tmp_path / "run", cache)
    for name, tensor in straight.head.state_dict().items():
        assert torch.equal(again.head.state_dict()[name], tensor)
    changed = replace(RECIPE, training=replace(TRAINING, learning_rate=3e-3))
    with pytest.raises(BadInput, match=r"(?s)learning_rate.*0\.01.*0\.003"):
        fitted(target, "tiny", data, changed, tmp_path / "run", cache)


def test_from_a_head_there_is_a_before_and_an_after(tiny: Any, data: Data, tmp_path: Path) -> None:
    target, cache = tiny(), tmp_path / "cache"
    first = fitted(target, "tiny", data, RECIPE, tmp_path / "first", cache)
    start = load(tmp_path / "first" / "head")
    more = fitted(target, "tiny", data, RECIPE, tmp_path / "more", cache, start=start)
    before = json.loads((tmp_path / "more" / "before.json").read_text())
    assert before["tokens_per_step"] == pytest.approx(first.held_out.tokens_per_step)
    assert more.progress.tokens >= TRAINING.tokens
    moved = [not torch.equal(a, b) for a, b in zip(first.head.parameters(), more.head.parameters(), strict=True)]
    assert all(moved)


def test_on_the_fly_gives_the_weights_of_cached_features(tiny: Any, data: Data, tmp_path: Path) -> None:
    cached = fitted(tiny(), "tiny", data, RECIPE, tmp_path / "cached", tmp_path / "cache")
    recipe = replace(RECIPE, on_the_fly=True)
    live = fitted(tiny(), "tiny", data, recipe, tmp_path / "live", tmp_path / "none")
    assert not (tmp_path / "none" / "features").exists()
    for a, b in zip(cached.head.parameters(), live.head.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)  # order of texts differs: captured ones are sorted


def test_b20_a_head_for_a_packed_target(tmp_path: Path) -> None:
    target = quantised("llama", torch.bfloat16)
    data = split(target, answered(target, tmp_path / "answers", 12))
    short = replace(RECIPE, training=replace(TRAINING, tokens=400))
    fitted(target, "packed", data, short, tmp_path / "run", tmp_path / "cache")
    head = hs.load_head(tmp_path / "run" / "head", target, policy=hs.Chain(depth=3))
    out = hs.generate(target, "abc", drafter=head, max_new_tokens=12)
    assert len(out.token_ids) == 12
    with pytest.raises(hs.HeadstartError, match="gather_head_rows"):
        fitted(target, "packed", data, replace(short, draft_vocab=95), tmp_path / "trimmed", tmp_path / "cache")


def test_own_lm_heads_start_as_the_targets_and_are_trained(tiny: Any, data: Data, tmp_path: Path) -> None:
    recipe = replace(RECIPE, head={"heads": 3, "own_lm_heads": True}, training=replace(TRAINING, tokens=400))
    done = fitted(tiny(), "tiny", data, recipe, tmp_path / "run", tmp_path / "cache")
    own = done.head.lm_heads
    target_rows = tiny().model.get_output_embeddings().weight
    assert own.shape == (3, *target_rows.shape)
    fresh = done.head.__class__(done.head.config, tiny().width, 96)
    fresh.adopt(_head_rows(tiny(), done.vocab), None)
    torch.testing.assert_close(fresh.lm_heads[1], target_rows)
    with pytest.raises(BadInput, match="own_ids"):
        fresh.adopt(_head_rows(tiny(), done.vocab), torch.arange(96))
    assert bool(torch.isfinite(own).all()) and not torch.equal(own[0], target_rows)
    assert float((own - target_rows).abs().max().detach()) < 1.0
    hs.load_head(tmp_path / "run" / "head", tiny())


def test_gather_answers_the_held_out_prompts_and_reads_chats(tmp_path: Path) -> None:
    target = tiny_target(max_positions=4096)
    chats = tmp_path / "chats.jsonl"
    said = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "def"}]
    kept_back = [dict(packaged()[0].messages[0]), said[1]]
    rows = [said, said, kept_back]
    chats.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows) + '{"messages": []}\n')
    with pytest.raises(BadInput, match="line 4"):
        gather(target, [chats], tmp_path / "cache")
    found = gather(target, [answered(target, tmp_path / "answers", 6), chats], tmp_path / "cache", on_bad="skip")
    assert len(found.samples) == 8
    assert found.report["files"]["chats.jsonl"] == {"chats": 2, "skipped": 1}
    assert found.report["too_like_held_out"] == 1
    turns = sum(sum(m["role"] == "user" for m in p.messages) for p in packaged())
    assert len(found.held_out) == turns
    again = held_out_answers(target, tmp_path / "cache")
    assert again == found.held_out


def test_without_a_template_some_answers_are_held_out(tmp_path: Path) -> None:
    target = tiny_target()
    folder = answered(target, tmp_path / "answers")
    target.tokenizer.chat_template = None
    found = gather(target, [folder], tmp_path / "cache")
    assert len(found.held_out) >= 1 and not set(map(str, found.held_out)) & set(map(str, found.samples))
    with pytest.raises(BadInput, match="distill"):
        gather(target, [tmp_path], tmp_path / "cache")


def test_a_forecast_measures_and_leaves_nothing(tiny: Any, data: Data, tmp_path: Path) -> None:
    found = forecast(tiny(), data, replace(RECIPE, training=replace(TRAINING, tokens=200_000)), seconds=1.5)
    assert found.capture_tokens == sum(len(s.ids) for s in data.samples)
    assert found.train_seconds > 0 and found.disk_bytes > 0 and found.memory_bytes > 0
    assert found.seen and all(value >= 1 for _, value in found.seen)
    assert [tokens for tokens, _ in found.curve] in ([], [100_000, 200_000])


def test_a_probe_of_a_head_with_lm_heads_of_its_own_starts_from_the_targets_rows(tiny: Any, data: Data) -> None:
    """Weights that nothing has filled yet are NaN; the first loss would refuse them."""
    recipe = replace(RECIPE, head={"heads": 3, "own_lm_heads": True}, training=replace(TRAINING, tokens=200_000))
    assert forecast(tiny(), data, recipe, seconds=1.0).seen


def test_the_curve_is_a_line_in_log_tokens() -> None:
    curve = extrapolated([(100, 1.0), (1000, 1.5)], [10_000, 100_000])
    assert curve == [(10_000, pytest.approx(2.0)), (100_000, pytest.approx(2.5))]
    assert extrapolated([(100, 1.0)], [1000]) == []


def test_the_commands_from_nothing_to_a_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    target = tiny_target("gemma3", max_positions=4096, eos=7)
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")

    def run(*words: object) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["headstart", *map(str, words)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capfd.readouterr()
        return int(end.value.code or 0), out + err

    model, answers, out = tmp_path / "target", tmp_path / "answers", tmp_path / "run"
    common = ("--dtype", "fp32")
    code, text = run("distill", model, "--self-prompt", 6, "-o", answers, "--batch", 8, "-m", 16, *common)
    assert code == 0, text
    assert "tokens/s" in text and "distinct 8-grams" in text
    code, text = run("distill", model, "--self-prompt", 6, "-o", answers, "--batch", 8, "-m", 17, *common)
    assert code == 1 and "max_new_tokens: was 16, now 17" in text
    code, text = run("distill", model, "-o", answers, *common)
    assert code == 1 and "--self-prompt" in text
    training = ("train", model, answers, "-o", out, "--tokens", 300, "--heads", 2, "--draft-vocab", 0, *common)
    code, text = run(*training)
    assert code == 0, text
    assert "tokens per step" in text and "held-out" in text and "covers" in text
    code, text = run("inspect", out / "head")
    assert code == 0 and "medusa" in text and "tree.nodes" in text
    code, text = run("generate", model, "hello", "--drafter", out / "head", "-m", 8, *common)
    assert code == 0 and "tokens per step" in text
    code, text = run("train", model, answers, "-o", out, "--tokens", "many", *common)
    assert code == 1 and "many" in text
