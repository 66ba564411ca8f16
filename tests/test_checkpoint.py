from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import headstart as hs
from headstart import catalogue
from headstart.catalogue import family
from headstart.checkpoint import DraftSize, as_policy, inspect, is_head, load, load_head, save, saving
from headstart.core import Shape
from headstart.drafting import HeadDrafter
from headstart.errors import BadInput, FetchError
from headstart.heads.base import Head
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.targets.base import Target
from headstart.testing import tiny_target
from headstart.train.fingerprint import fingerprint
from headstart.vocab.base import DraftVocab
from headstart.vocab.full import Full
from headstart.vocab.trimmed import Trimmed
from helpers import prompts

PATHS = [(0,), (1,), (0, 0), (2,), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)]  # best first
CARD = {"licence": "Apache-2.0", "tokens": 123, "data": {"hash": "abc|d", "files": [1, 2.5, None]}, "argv": ["x", "y"]}
TRIMMED = Trimmed([i for i in range(95, -1, -1) if i % 3], 96)
PROMPTS = prompts(3, seed=7, low=2, high=9)
TINY = tiny_target()
OTHER_WEIGHTS = tiny_target(seed=1)


def medusa(dtype: torch.dtype = torch.float32, vocab: int = 96, **config: Any) -> Medusa:
    head = Medusa(MedusaConfig(**{"heads": 3, "layers": 2, **config}), 48, vocab)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
    return head.to(dtype).eval()


def saved(
    path: Path, head: Medusa | None = None, *, target: Target = TINY, vocab: DraftVocab | None = None, **changes: Any
) -> Path:
    settings: dict[str, Any] = {"target_name": "tiny", "paths": PATHS, "card": CARD, **changes}
    save(path, head or medusa(), "medusa", target=target, vocab=vocab or Full(target.vocabulary.size), **settings)
    return path


def edited(path: Path, **changes: Any) -> Path:
    """config.json with other values; `a__b` goes into the object a."""
    config = json.loads((path / "config.json").read_text())
    for key, value in changes.items():
        *above, last = key.split("__")
        place = config
        for name in above:
            place = place[name]
        place[last] = value
    (path / "config.json").write_text(json.dumps(config))
    return path


def rewritten(path: Path, **changes: torch.Tensor | None) -> Path:
    """model.safetensors with other tensors; None takes one away. `__` stands for a dot."""
    tensors = load_file(path / "model.safetensors")
    for key, value in changes.items():
        name = key.replace("__", ".")
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, path / "model.safetensors")
    return path


def same(one: Head, other: Head) -> bool:
    """All tensors, bit for bit."""
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def answers(drafter: Any, target: Target = TINY) -> list[tuple[list[int], dict[int, int], int]]:
    outputs = hs.generate(target, PROMPTS, drafter=drafter, max_new_tokens=20)
    return [(o.token_ids, o.stats.accepted, o.stats.drafted) for o in outputs]


# --- there and back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [Full(96), TRIMMED], ids=["full", "trimmed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_comes_back_as_it_was(dtype: torch.dtype, vocab: DraftVocab, tmp_path: Path) -> None:
    head = medusa(dtype)
    found = load(saved(tmp_path / "new" / "head", head, vocab=vocab))
    assert same(found.head, head)
    assert {p.dtype for p in found.head.parameters()} == {dtype}
    assert (found.vocab, found.paths, found.head.config) == (vocab, tuple(PATHS), head.config)
    assert found.record.card == CARD
    assert found.record.target.name == "tiny"
    assert found.record.target.fingerprint == fingerprint(TINY)


@pytest.mark.parametrize("vocab", [Full(96), TRIMMED], ids=["full", "trimmed"])
def test_a_saved_head_drafts_as_before(vocab: DraftVocab, tmp_path: Path) -> None:
    before = HeadDrafter(medusa(), TINY, hs.StaticTree(paths=PATHS), vocab)
    drafter = load_head(saved(tmp_path, vocab=vocab), TINY)
    assert answers(drafter) == answers(before)
    assert drafter.policy == before.policy
    assert drafter.verifier is None


@pytest.mark.parametrize(
    "config",
    [{}, {"shared_lm_head": True}, {"own_ids": True}, {"own_ids": True, "shared_lm_head": True}],
    ids=["each", "shared", "chosen ids", "shared, chosen ids"],
)
def test_own_lm_heads_come_back_with_their_ids(config: dict[str, Any], tmp_path: Path) -> None:
    vocab = TRIMMED if "own_ids" in config else Full(96)
    head = medusa(own_lm_heads=True, vocab=vocab.size, **config)
    if head.token_map is not None:
        with pytest.raises(BadInput, match="own rows are those of other ids"):
            saved(tmp_path, head, vocab=vocab)
        head.token_map.copy_(TRIMMED.token_map)
    found = load(saved(tmp_path, head, vocab=vocab))
    assert found.head.config == head.config
    assert same(found.head, head)
    plain = hs.generate(TINY, PROMPTS, max_new_tokens=20)
    assert [a[0] for a in answers(load_head(tmp_path, TINY))] == [o.token_ids for o in plain]


def test_b18_a_tied_target_lends_its_head_and_gets_none(tmp_path: Path) -> None:
    target = tiny_target(tie_word_embeddings=True)
    before = answers(HeadDrafter(medusa(), target, hs.Chain(depth=3), Full(96)), target)
    drafter = load_head(saved(tmp_path, target=target, paths=[(0,), (0, 0), (0, 0, 0)]), target)
    assert answers(drafter, target) == before
    names = {f"{part}.{j}" for part in ("weights", "biases") for j in range(2)}
    assert load_file(tmp_path / "model.safetensors").keys() == names


def test_the_files_are_self_contained_json_and_safetensors(tmp_path: Path) -> None:
    saved(tmp_path, vocab=TRIMMED)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {
        "format": 1,
        "family": "medusa",
        "head": {"heads": 3, "layers": 2, "own_lm_heads": False, "shared_lm_head": False, "own_ids": False},
        "width": 48,
        "target": {
            "name": "tiny",
            "vocabulary": {"size": 96, "digest": TINY.vocabulary.digest},
            "fingerprint": fingerprint(TINY),
        },
        "vocab": {"size": 64, "target_size": 96, "digest": TRIMMED.digest},
        "policy": {"paths": [list(path) for path in PATHS]},
        "dtype": "float32",
        "card": CARD,
    }
    token_map = load_file(tmp_path / "model.safetensors")["token_map"]
    assert token_map.dtype == torch.int64
    assert token_map.tolist() == list(TRIMMED.ids)


def test_the_model_cards_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = (saved(tmp_path) / "README.md").read_text().split("```")[1].removeprefix("python")
    monkeypatch.setattr(hs, "load_target", {"tiny": TINY}.get, raising=False)
    exec(code.replace("this directory", str(tmp_path)))
    assert capsys.readouterr().out == hs.generate(TINY, "Once upon a time").text + "\n"


def test_the_model_card_says_what_it_is_and_how_to_load_it(tmp_path: Path) -> None:
    text = (saved(tmp_path, vocab=TRIMMED, target_name="smol|lm") / "README.md").read_text()
    for part in ("# Draft head for smol|lm", "load_target('smol|lm')", "load_head(", "Licence: Apache-2.0."):
        assert part in text
    for row in ("medusa (heads 3, layers 2,", "smol\\|lm, width 48", "can be drafted: 64 |", "9 nodes, 3 deep |"):
        assert row in text
    assert "| tokens | 123 |" in text
    assert "| licence" not in text
    assert "not stated" in (saved(tmp_path, card={}) / "README.md").read_text()


def test_a_head_published_by_others_can_be_saved_as_ours(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text('{"medusa_num_heads": 1, "medusa_num_layers": 1}')
    save_file({"0.0.linear.weight": torch.eye(48)}, tmp_path / "theirs" / "model.safetensors")
    found = load(tmp_path / "theirs", size=96)
    again = load(saved(tmp_path / "ours", found.head, vocab=found.vocab, paths=found.paths))  # type: ignore[arg-type]
    assert torch.equal(again.head.state_dict()["weights.0"], torch.eye(48)[None])


# --- saving what is not whole ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_not_saved(value: float, tmp_path: Path) -> None:
    head = medusa()
    with torch.no_grad():
        head.biases[1][2, 5] = value
    with pytest.raises(BadInput, match=r"NaN or infinite values in biases\.1;"):
        saved(tmp_path / "head", head)
    assert not (tmp_path / "head").exists()


def test_b18_a_head_of_untrained_own_rows_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="infinite values in lm_heads"):
        saved(tmp_path, Medusa(MedusaConfig(own_lm_heads=True), 48, 96))


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"\[0, 0\] stands before its parent", {"paths": [(0, 0), (0,)]}),
        (r"\[1, 0\] has no parent", {"paths": [(0,), (1, 0)]}),
        ("there is no path", {"paths": []}),
        ("cannot be written as JSON", {"card": {"when": Path("x")}}),
        ("cannot be written as JSON", {"card": {"rate": float("nan")}}),
        ("is for 95 target ids, but the target has 96", {"vocab": Full(95)}),
        ("Id 99 of a draft vocabulary is outside", {"vocab": Trimmed([5, 99], 100)}),
    ],
)
def test_parts_that_do_not_fit_are_not_saved(message: str, changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=message):
        saved(tmp_path / "head", **changes)
    assert not (tmp_path / "head").exists()


def test_a_head_is_saved_under_its_own_family_only(tmp_path: Path) -> None:
    class Odd(Medusa):
        pass

    with pytest.raises(BadInput, match="'eagle9'; the families are medusa"):
        save(tmp_path, medusa(), "eagle9", target=TINY, target_name="", vocab=Full(96), paths=PATHS, card={})
    with pytest.raises(BadInput, match="A Odd was to be saved as family 'medusa'"):
        saved(tmp_path, Odd(MedusaConfig(), 48, 96))
    for rows in (64, 97):  # neither those of the vocabulary: loading could not build it again
        with pytest.raises(BadInput, match=rf"built for .* 96 .*\n  lm_heads: \[3, {rows}, 48\]"):
            saved(tmp_path, medusa(own_lm_heads=True, vocab=rows))
    mixed = medusa()
    mixed.biases.half()
    with pytest.raises(BadInput, match=r"torch\.float16', 'torch\.float32'\]; expected one of"):
        saved(tmp_path, mixed)


def test_other_models_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_text("precious")
    with pytest.raises(BadInput, match="holds another model"):
        saved(tmp_path)
    assert (tmp_path / "model.safetensors").read_text() == "precious"
    with pytest.raises(BadInput, match="is a file"):
        saved(tmp_path / "config.json")


def test_a_kill_between_the_files_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "old")
    for path in (tmp_path / "fresh", tmp_path / "old"):  # over an older head as well: its config is not left behind
        with monkeypatch.context() as patch:
            patch.setattr(saving, "write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                saved(path, medusa(heads=4))
        assert (path / "model.safetensors").exists()
        with pytest.raises(FetchError, match=r"has weights but no config\.json, which is written last"):
            load(path)
        assert load(saved(path)).head.config == medusa().config


def test_a_kill_while_the_weights_are_written_keeps_the_older_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path)
    monkeypatch.setattr(saving, "as_bytes", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path, medusa(heads=4))
    assert load(tmp_path).head.config == medusa().config
    assert sorted(f.name for f in tmp_path.iterdir()) == ["README.md", "config.json", "model.safetensors"]


# --- loading what is not whole -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"missing: biases\.1", {"biases__1": None}),
        (r"unexpected: lm_head\.weight", {"lm_head__weight": torch.zeros(2)}),
        ("unexpected: token_map", {"token_map": torch.arange(9)}),
        (
            r"weights\.0: \[3, 48, 47\] torch\.float32, expected \[3, 48, 48\] torch\.float32",
            {"weights__0": torch.zeros(3, 48, 47)},
        ),
        (
            r"biases\.0: \[3, 48\] torch\.float16, expected \[3, 48\] torch\.float32",
            {"biases__0": torch.zeros(3, 48).half()},
        ),
        (r"NaN or infinite values in weights\.1", {"weights__1": torch.full((3, 48, 48), torch.nan)}),
        (r"NaN or infinite values in biases\.0", {"biases__0": torch.full((3, 48), -torch.inf)}),
    ],
)
def test_b18_weights_that_are_not_the_heads_are_refused(
    message: str, changes: dict[str, torch.Tensor | None], tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=message):
        load(rewritten(saved(tmp_path), **changes))


def test_all_faults_come_at_once(tmp_path: Path) -> None:
    saved(tmp_path)
    rewritten(tmp_path, biases__1=None, weights__1=None, stray=torch.zeros(1), biases__0=torch.zeros(2))
    with pytest.raises(BadInput) as caught:
        load(tmp_path)
    for name in ("biases.1", "weights.1", "stray", "biases.0: [2]", "(4 in all.)"):
        assert name in str(caught.value)


def test_a_weight_that_is_not_filled_is_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda tensor, *_: tensor)
    with pytest.raises(BadInput, match=r"infinite values in weights\.0, weights\.1, biases\.0, biases\.1"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("token_map makes .* but config.json says 64 of 96", {"token_map": torch.tensor(TRIMMED.ids).flip(0)}),
        (r"token_map: \[63\]", {"token_map": torch.tensor(TRIMMED.ids)[1:]}),
        (r"token_map: \[64\] torch\.int32", {"token_map": torch.tensor(TRIMMED.ids).int()}),
        ("Id 96 of a draft vocabulary is outside", {"token_map": torch.tensor([96, *TRIMMED.ids[1:]])}),
        ("missing: token_map", {"token_map": None}),
    ],
)
def test_another_token_map_is_refused(message: str, changes: dict[str, torch.Tensor | None], tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=message):
        load(rewritten(saved(tmp_path, vocab=TRIMMED), **changes))


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("is of format 2; this headstart reads format 1", {"format": 2}),
        ("is of format None", {"format": None}),
        ("no head family 'eagle9'; the families are medusa", {"family": "eagle9"}),
        ("MedusaConfig has no field dropout; its fields are heads, layers", {"head__dropout": 0.1}),
        ("heads: Input should be a valid integer, seen '3'", {"head__heads": "3"}),
        ("heads=0.*at least one head", {"head__heads": 0}),
        ("width: Input should be a valid integer", {"width": "48"}),
        ("width: Input should be greater than 0", {"width": -48}),
        ("speed: Extra inputs are not permitted", {"speed": 3}),
        ("target.vocabulary.hash: Extra inputs", {"target__vocabulary__hash": "x"}),
        ("dtype: Input should be 'float32'", {"dtype": "int8"}),
        ("stands before its parent", {"policy__paths": [[0, 0], [0]]}),
        ("there is no path", {"policy__paths": []}),
        ("policy.paths", {"policy__paths": [[0], ["0"]]}),
        (r"weights\.0: \[3, 48, 48\] torch\.float32, expected \[4, 48, 48\]", {"head__heads": 4}),
        (r"unexpected: biases\.1", {"head__layers": 1}),
        (r"expected \[3, 64, 64\]", {"width": 64}),
        ("torch.float32, expected .* torch.bfloat16", {"dtype": "bfloat16"}),
        ("missing: token_map", {"vocab": {"size": 64, "target_size": 96, "digest": "0"}}),
    ],
)
def test_s18_a_config_that_is_not_the_heads_is_refused(message: str, changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=message):
        load(edited(saved(tmp_path), **changes))


def test_a_vocabulary_of_another_target_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="for a target of 97"):
        load(edited(saved(tmp_path, vocab=TRIMMED), target__vocabulary__size=97))


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("cannot be read as JSON", "{"),
        ("cannot be read as JSON", "[" * 100_000),
        ("holds a list; expected a JSON object", "[]"),
    ],
)
def test_a_broken_config_is_refused(message: str, text: str, tmp_path: Path) -> None:
    (saved(tmp_path) / "config.json").write_text(text)
    with pytest.raises(FetchError, match=message):
        load(tmp_path)


def test_a_config_of_something_else_is_refused(tmp_path: Path) -> None:
    (saved(tmp_path) / "config.json").write_text('{"model_type": "llama", "hidden_size": 48}')
    with pytest.raises(BadInput, match=r"is not that of a draft head.*Its fields are hidden_size, model_type"):
        load(tmp_path)


def test_a_heads_directory_is_told_from_others(tmp_path: Path) -> None:
    assert is_head(saved(tmp_path))
    assert not is_head(tmp_path / "nowhere")
    for config, is_one in (('{"model_type": "medusa"}', True), ('{"model_type": "llama"}', False)):
        (tmp_path / "config.json").write_text(config)
        assert is_head(tmp_path) == is_one


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    weights = saved(tmp_path) / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (whole[:-100], whole[:4], b"", b"\xff" * 200):
        weights.write_bytes(damaged)
        with pytest.raises(FetchError, match=r"model\.safetensors is damaged, cut short or unreadable"):
            load(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="nowhere is not a directory"):
        load(tmp_path / "nowhere")
    (saved(tmp_path) / "model.safetensors").rename(tmp_path / "renamed.safetensors")
    with pytest.raises(FetchError, match=r"neither model\.safetensors nor .*, but renamed\.safetensors"):
        load(tmp_path)
    (tmp_path / "renamed.safetensors").unlink()
    with pytest.raises(FetchError, match=r"has no model\.safetensors; it holds README\.md, config\.json"):
        load(tmp_path)


class _Trap:
    def __reduce__(self) -> Any:
        return (_sprung.append, (1,))


_sprung: list[int] = []


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "pytorch_model.bin", "head.pkl", "head.pth", "last.ckpt"])
def test_a_pickle_is_refused_unopened(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch.load was called"))
    (saved(tmp_path) / "model.safetensors").unlink()
    (tmp_path / name).write_bytes(pickle.dumps(_Trap()))
    opened: list[str] = []
    monkeypatch.setattr(Path, "open", lambda path, *_, **__: opened.append(path.name))
    with pytest.raises(BadInput, match=f"as {name} only. Opening a pickle can run any program.*save_file"):
        load(tmp_path)
    assert not opened
    assert not _sprung
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("nowhere")  # to open this one would be another error
    with pytest.raises(BadInput, match=f"as {name} only"):
        load(tmp_path)


def test_a_pickle_beside_good_weights_is_left_alone(tmp_path: Path) -> None:
    (saved(tmp_path) / "optimiser.pt").write_bytes(pickle.dumps(_Trap()))
    load(tmp_path)
    assert not _sprung


# --- sharded weights (B19) ---------------------------------------------------------------------------------


def sharded(path: Path) -> Path:
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in tensors if names[name] == file}, path / file)
    index = {"metadata": {}, "weight_map": names}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def test_b19_one_file_or_several(tmp_path: Path) -> None:
    one, several = saved(tmp_path / "one", vocab=TRIMMED), sharded(saved(tmp_path / "several", vocab=TRIMMED))
    a, b = load(one), load(several)
    assert same(a.head, b.head)
    assert a.vocab == b.vocab


def test_b19_shards_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    path = sharded(saved(tmp_path))
    index = path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    for name in ("../outside.safetensors", "/etc/passwd", "model-00003-of-00003.safetensors", ""):
        index.write_text(json.dumps({"weight_map": {**good["weight_map"], "biases.0": name}}))
        with pytest.raises(FetchError, match=f"names {name}, not there beside it"):
            load(path)
    swapped = {**good["weight_map"], "biases.0": good["weight_map"]["biases.1"]}
    index.write_text(json.dumps({"weight_map": swapped}))
    with pytest.raises(BadInput, match=r"disagree on biases\.0"):
        load(path)
    for broken in ({}, {"weight_map": ["a"]}, {"weight_map": {"biases.0": 1}}):
        index.write_text(json.dumps(broken))
        with pytest.raises(FetchError, match="has no weight_map"):
            load(path)


# --- on a target -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "seen"),
    [
        (lambda: tiny_target(vocab_size=128), "width 48, 128 ids"),
        (lambda: tiny_target(hidden_size=64), "width 64, 96 ids"),
    ],
    ids=["vocabulary", "width"],
)
def test_s05_s19_another_target_is_refused_with_both_sides(target: Any, seen: str, tmp_path: Path) -> None:
    other = target()
    with pytest.raises(BadInput) as caught:
        load_head(saved(tmp_path), other)
    head, here = str(caught.value).splitlines()[1:3]
    for part in ("tiny", "width 48, 96 ids", TINY.vocabulary.digest, fingerprint(TINY)):
        assert part in head
    for part in (seen, other.vocabulary.digest, fingerprint(other)):
        assert part in here


def test_s05_equal_sizes_are_not_enough(tmp_path: Path) -> None:
    edited(saved(tmp_path), target__vocabulary__digest="0123456789abcdef")
    with pytest.raises(BadInput, match=f"0123456789abcdef(.*\n)+.*{TINY.vocabulary.digest}"):
        load_head(tmp_path, TINY)


def test_b17_other_padding_rows_are_refused(tmp_path: Path) -> None:
    edited(saved(tmp_path), target__vocabulary__size=95)
    with pytest.raises(BadInput, match=r"width 48, 95 ids(.*\n)+.*width 48, 96 ids"):
        load_head(tmp_path, TINY)


def test_other_weights_are_refused_on_request_only(tmp_path: Path) -> None:
    saved(tmp_path)
    plain = hs.generate(OTHER_WEIGHTS, PROMPTS, max_new_tokens=20)
    found = answers(load_head(tmp_path, OTHER_WEIGHTS), OTHER_WEIGHTS)
    assert [a[0] for a in found] == [o.token_ids for o in plain]
    load_head(tmp_path, TINY, same_weights=True)
    with pytest.raises(BadInput, match=f"{fingerprint(TINY)}\n.*{fingerprint(OTHER_WEIGHTS)}"):
        load_head(tmp_path, OTHER_WEIGHTS, same_weights=True)


def test_the_head_takes_the_targets_dtype(tmp_path: Path) -> None:
    saved(tmp_path)
    drafter = load_head(tmp_path, tiny_target(dtype=torch.bfloat16))
    assert {p.dtype for p in drafter.head.parameters()} == {torch.bfloat16}
    big = medusa()
    with torch.no_grad():
        big.weights[1][0, 0, 0] = 1e6
    with pytest.raises(BadInput, match=r"float16 has NaN or infinite values in weights\.1"):
        load_head(saved(tmp_path, big), tiny_target(dtype=torch.float16))


@pytest.mark.parametrize("nodes", range(2, 10))
def test_a_smaller_tree_is_a_prefix(nodes: int, tmp_path: Path) -> None:
    drafter = load_head(saved(tmp_path), TINY, draft=DraftSize(nodes=nodes))
    assert drafter.policy.nodes == nodes
    assert drafter.policy == as_policy(PATHS[: nodes - 1])


def test_a_shallower_tree_keeps_its_best_nodes(tmp_path: Path) -> None:
    paths = [(0,), (0, 0), (0, 0, 0), (1,), (2,)]
    saved(tmp_path, paths=paths)
    assert DraftSize(depth=1).cut(paths) == ((0,), (1,), (2,))
    assert DraftSize(depth=2, nodes=4).cut(paths) == ((0,), (0, 0), (1,))
    assert DraftSize().cut(paths) == tuple(paths)
    drafter = load_head(tmp_path, TINY, draft=DraftSize(depth=2, nodes=4))
    assert (drafter.policy.depth, drafter.policy.nodes, drafter.shape) == (2, 4, Shape.TREE)
    assert load_head(tmp_path, TINY, draft=DraftSize(nodes=4)).policy == hs.Chain(depth=3)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (DraftSize(nodes=10), "9 nodes and depth 3, so nodes can be 2 to 9"),
        (DraftSize(nodes=1), "nodes can be 2 to 9"),
        (DraftSize(depth=4), "depth can be 1 to 3"),
        (DraftSize(depth=0), "depth can be 1 to 3"),
    ],
)
def test_a_tree_is_not_grown_by_loading(size: DraftSize, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=message):
        load_head(saved(tmp_path), TINY, draft=size)


def test_policy_and_verifier_can_be_given(tmp_path: Path) -> None:
    saved(tmp_path)
    verifier = hs.Typical()
    drafter = load_head(tmp_path, TINY, policy=hs.Chain(depth=2), verify=verifier)
    assert drafter.policy == hs.Chain(depth=2)
    assert drafter.verifier is verifier
    with pytest.raises(BadInput, match="give one of them"):
        load_head(tmp_path, TINY, policy=hs.Chain(depth=2), draft=DraftSize(nodes=3))


def test_inspecting_needs_no_target(tmp_path: Path) -> None:
    found = inspect(saved(tmp_path, medusa(torch.bfloat16), vocab=TRIMMED))
    assert found == {
        "family": "medusa",
        "config": {"heads": 3, "layers": 2, "own_lm_heads": False, "shared_lm_head": False, "own_ids": False},
        "parameters": 2 * 3 * (48 * 48 + 48),
        "bytes": 2 * 2 * 3 * (48 * 48 + 48),
        "dtype": "bfloat16",
        "width": 48,
        "target": {
            "name": "tiny",
            "vocabulary": {"size": 96, "digest": TINY.vocabulary.digest},
            "fingerprint": fingerprint(TINY),
        },
        "vocabulary": {"size": 64, "target_size": 96, "digest": TRIMMED.digest},
        "tree": {"nodes": 9, "depth": 3, "nodes_per_depth": [3, 3, 2]},
        "card": CARD,
    }


def test_the_catalogue_cannot_be_changed_and_knows_its_names() -> None:
    assert family("medusa") == ("medusa", MedusaConfig, Medusa)
    with pytest.raises(TypeError):
        catalogue.HEADS["mine"] = catalogue.HEADS["medusa"]  # type: ignore[index]
    assert all(load().name == name for name, load in catalogue.HEADS.items())
    assert catalogue.published({"model_type": "llama"}) is None
