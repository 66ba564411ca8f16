"""The doctor names the fault that was planted, and finds none in a sound pair."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headstart as hs
from headstart import doctor as module
from headstart.checkpoint import save
from headstart.core import Features, Taps
from headstart.doctor import Finding, examine
from headstart.drafting import HeadDrafter
from headstart.evaluate.texts import answered
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.objectives.base import CrossEntropy, Predicted, Wanted, reduce
from headstart.targets.base import prefill
from headstart.train.capture import Window
from headstart.train.template import Sample
from headstart.unroll import Batch, Independent, unroll
from headstart.vocab.base import DraftVocab
from headstart.vocab.full import Full
from headstart.vocab.trimmed import Trimmed
from test_distil import chat, chat_target

HEADS = 2
FULL = Full(96)
CHATS = [chat(str(i), f"Tell me of {word}.") for i, word in enumerate(("apples", "a dog", "the sea", "old shoes"))]


def taught(
    target: Any,
    samples: list[Sample],
    vocab: DraftVocab = FULL,
    feed: Callable[[Features], Features] = lambda f: Features(f.final, ()),
    steps: int = 60,
) -> Medusa:
    """A head that has seen these answers often; `feed` plants what it was trained on."""
    head = Medusa(MedusaConfig(heads=HEADS), target.width, vocab.size)
    readout, optimiser = target.readout(vocab.ids_U), torch.optim.Adam(head.parameters(), 0.02)
    batches = []
    for sample in samples:
        _, _, features = prefill(target, target.empty(1), [sample.ids], Taps(final=True, layers=(target.layers,)))
        fed = feed(features).map(torch.clone)
        ids = torch.tensor([sample.ids])
        batches.append(Batch(ids, torch.tensor([sample.supervised]), fed, [ids.shape[1]]))
    for _ in range(steps):
        optimiser.zero_grad()
        for batch in batches:
            said = unroll(head, Independent(), batch, HEADS)
            labels = [vocab.labels(s.label_S) for s in said]
            keep = [known for _, known in labels]
            losses = CrossEntropy()(
                [Predicted(s.depth, s.feature_SF[k], readout) for s, k in zip(said, keep, strict=True)],
                [Wanted(label[k]) for (label, _), k in zip(labels, keep, strict=True)],
            )
            reduce(losses, [1.0] * HEADS, [max(len(x), 1) for x in losses]).backward()
        optimiser.step()
    return head.eval()


def saved(target: Any, head: Medusa, path: Path, vocab: DraftVocab = FULL) -> Path:
    save(path, head, "medusa", target=target, target_name="tiny", vocab=vocab, paths=[(0,), (0, 0)], card={})
    return path


@pytest.fixture(scope="module")
def target() -> Any:
    return chat_target(eos=None)


@pytest.fixture(scope="module")
def answers(target: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    folder = tmp_path_factory.mktemp("answers")
    turns = answered(target, CHATS, folder, max_new_tokens=module.TOKENS, needs=Taps(), window=Window())
    return [Sample(t.text.ids, [i >= t.text.prompt for i in range(len(t.text.ids))]) for t in turns]


def faults(target: Any, path: Path, tmp_path: Path) -> list[str]:
    return [f.fault for f in examine(target, path, CHATS, tmp_path / "cache").faults]


def test_a_sound_pair(target: Any, answers: list[Sample], tmp_path: Path) -> None:
    found = examine(target, saved(target, taught(target, answers), tmp_path / "head"), CHATS, tmp_path / "cache")
    assert found.faults == []
    assert found.by_depth[0] > 0.5
    checks = [f.check.split(":")[0] for f in found.findings]
    assert {"width", "tokenizer", "weights", "norm", "alignment", "template"} <= set(checks)
    parity = next(f for f in found.findings if "training guesses" in f.check)
    assert parity.seen.startswith("100.0% of ") and int(parity.seen.split()[2]) > 300


def test_trained_before_the_norm(target: Any, answers: list[Sample], tmp_path: Path) -> None:
    head = taught(target, answers, feed=lambda f: Features(f.layers[-1], ()))
    assert "norm" in faults(target, saved(target, head, tmp_path / "head"), tmp_path)


@pytest.mark.parametrize("by", [-1, 1])
def test_trained_with_states_a_position_off(target: Any, answers: list[Sample], by: int, tmp_path: Path) -> None:
    head = taught(target, answers, feed=lambda f: Features(f.final.roll(by, 1), ()))
    assert "alignment" in faults(target, saved(target, head, tmp_path / "head"), tmp_path)


def test_trained_without_the_template(target: Any, tmp_path: Path) -> None:
    head = taught(target, module._bare(target, CHATS))
    assert "template" in faults(target, saved(target, head, tmp_path / "head"), tmp_path)


def test_a_map_of_ids_that_was_misread(target: Any, answers: list[Sample], tmp_path: Path) -> None:
    """Own rows of the even ids, saved with a map to ids half as large: d2t offsets taken for ids."""
    ids = list(range(0, 96, 2))
    right, wrong = Trimmed(ids, 96), Trimmed([i // 2 for i in ids], 96)
    head = Medusa(MedusaConfig(heads=HEADS, own_lm_heads=True, own_ids=True), target.width, right.size)
    blocks = taught(target, answers, right).state_dict()
    head.adopt(target.head.weight[torch.tensor(ids)].float(), wrong.ids_U)
    head.load_state_dict({**head.state_dict(), **blocks})
    found = faults(target, saved(target, head.eval(), tmp_path / "head", wrong), tmp_path)
    assert "vocabulary map" in found


def test_a_vocabulary_of_other_text(target: Any, answers: list[Sample], tmp_path: Path) -> None:
    said = {i for s in answers for i, x in zip(s.ids, s.supervised, strict=True) if x}
    never = Trimmed([i for i in range(96) if i not in said][:4] + sorted(said)[:4], 96)
    head = Medusa(MedusaConfig(heads=HEADS), target.width, never.size).eval()
    assert "vocabulary" in faults(target, saved(target, head, tmp_path / "head", never), tmp_path)


def test_drafting_that_feeds_the_head_otherwise(
    target: Any, answers: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(target, taught(target, answers), tmp_path / "head")
    honest = HeadDrafter.absorb

    def late(self: Any, state: Any, new: Any) -> Any:
        """Widths in another order."""
        return honest(self, state, new._replace(features=new.features.map(lambda x: x.roll(1, 2))))

    monkeypatch.setattr(HeadDrafter, "absorb", late)
    assert faults(target, path, tmp_path) == ["parity"]


def test_another_models_head_is_known_before_anything_runs(target: Any, answers: list[Sample], tmp_path: Path) -> None:
    path = saved(target, taught(target, answers, steps=1), tmp_path / "head")
    wider = chat_target(eos=None, hidden_size=96, head_dim=24)
    found = examine(wider, path, CHATS, tmp_path / "cache")
    assert [f.fault for f in found.faults] == ["width"] and found.by_depth == []


def test_symptoms_without_a_cause() -> None:
    def named(by_depth: list[float], thirds: tuple[float, float] = (0.5, 0.5)) -> list[str]:
        return [f.fault for f in module._symptoms(by_depth, thirds, False) if f.fault]

    assert named([0.5, 0.3]) == [] and named([0.5]) == []
    assert named([0.01, 0.0]) == ["near zero"]
    assert named([0.5, 0.05]) == ["collapse"]
    assert named([0.5, 0.3], (0.6, 0.2)) == ["falling"]
    assert isinstance(module._symptoms([0.0], (0.0, 0.0), True)[0], Finding)


def test_the_command(run: Any, target: Any, answers: list[Sample], tmp_path: Path) -> None:
    model = tmp_path / "target"
    target.model.save_pretrained(model)
    target.tokenizer.save_pretrained(model)
    head = saved(target, taught(target, answers), tmp_path / "head")
    asked = tmp_path / "prompts.jsonl"
    asked.write_text("\n".join(f'{{"messages": {str(c.messages)!s}}}'.replace("'", '"') for c in CHATS))
    common = ("--prompts", asked, "--dtype", "fp32", "--cache", tmp_path / "cache")
    done = run("doctor", model, head, *common)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "right at depth 1" in done.stdout
    bad = saved(target, taught(target, answers, feed=lambda f: Features(f.layers[-1], ())), tmp_path / "bad")
    done = run("doctor", model, bad, *common)
    assert done.returncode == 1 and "before the final norm" in done.stdout
    assert run("doctor", model, "default", *common).returncode == 1
    assert hs.__version__
