"""The same as greedy, and whose weights and ids (bugs.md B16 to B20, S03, S05, S06, S08)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import headstart as hs
from headstart.core import Kind
from headstart.errors import BadInput, Unsupported
from headstart.sampling import Sampling
from headstart.targets.hf import HFTarget
from headstart.targets.tiny import tiny_tokenizer
from headstart.testing import Mixed, Oracle, Wrong, tiny_target
from helpers import FAMILIES, Coverage, blurred, causal_logits, prompts, stock

PATTERN = [0, 4, 2, 1, 4]


# --- B16: ties and near ties ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_b16_fp32_equals_generate_on_50_prompts(tiny, family):
    target, coverage = tiny(family), Coverage(4)
    texts = prompts(50, seed=16)
    plain = hs.generate(target, texts, max_new_tokens=20)
    for ids, one, width in zip(texts, plain, cycle((1, 3))):
        reference = stock(target, ids, 20)
        out = hs.generate(target, ids, drafter=Mixed(target, 4, PATTERN, width), max_new_tokens=20)
        assert one.token_ids == out.token_ids == reference
        coverage.see(out)
    coverage.demand()


@pytest.mark.parametrize(("vocab", "apart"), [(96, 1), (96, 2), (1100, 550)])
def test_b16_the_first_of_equal_maxima_wins(vocab, apart):
    """Half of the LM-head rows are twins of earlier ones; a stub's wrong token is the twin of the right one."""
    target, coverage = tiny_target(vocab_size=vocab), Coverage(4)
    head = target.model.lm_head.weight.data.unflatten(0, (-1, 2, apart))
    head[:, 1] = head[:, 0]
    ties = 0
    for ids in prompts(8, seed=17):
        reference = stock(target, ids, 24)
        plain = hs.generate(target, ids, max_new_tokens=24)
        out = hs.generate(target, ids, drafter=Mixed(target, 4, PATTERN, min(apart, 2)), max_new_tokens=24)
        looked_up = hs.generate(target, ids, drafter=hs.PromptLookup(min_ngram=1), max_new_tokens=24)
        assert plain.token_ids == out.token_ids == looked_up.token_ids == reference
        assert all(token // apart % 2 == 0 for token in reference)
        logits = causal_logits(target, [*ids, *reference[:-1]])[len(ids) - 1 :]
        ties += sum(int((row == row.max()).sum() == 2) for row in logits)
        coverage.see(out)
    assert ties > 100, "few exact ties were met"
    coverage.demand()


def ulp(value: float) -> float:
    """Distance of neighbouring bf16 numbers at this size: 8 significant bits."""
    return 2.0 ** (math.floor(math.log2(abs(value))) - 7)


def demand_near_argmax(target: Any, ids: list[int], tokens: list[int]) -> int:
    """Every token is an argmax of a teacher-forced pass, or misses it by rounding; how many missed."""
    logits = causal_logits(target, [*ids, *tokens[:-1]])[len(ids) - 1 :].float()
    missed = 0
    for at, (row, token) in enumerate(zip(logits, tokens, strict=True)):
        gap, best = float(row.max() - row[token]), float(row.max())
        assert gap <= 4 * ulp(best), f"token {at}: {gap / ulp(best):.0f} bf16 steps below the maximum {best}"
        missed += gap > 0
    return missed


@pytest.mark.parametrize("family", FAMILIES)
def test_b16_bf16_tokens_are_argmaxes_up_to_rounding(family):
    target, coverage = tiny_target(family, dtype=torch.bfloat16), Coverage(4)
    assert target.can.dtype is torch.bfloat16
    missed = total = 0
    for ids, width in zip(prompts(5, seed=1, low=3), cycle((1, 3))):
        out = hs.generate(target, ids, drafter=Mixed(target, 4, PATTERN, width), max_new_tokens=24)
        missed += demand_near_argmax(target, ids, out.token_ids)
        total += len(out.token_ids)
        coverage.see(out)
    assert missed <= total / 10
    coverage.demand()


# --- B17: more rows than tokens ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def padded() -> HFTarget:
    """A tokenizer of 100 around a model of 128 rows."""
    return HFTarget(tiny_target(vocab_size=128).model, tiny_tokenizer(100))


def test_b17_padding_rows_are_emitted_where_the_model_emits_them(padded):
    assert padded.vocabulary.size == 128
    coverage, beyond = Coverage(4), 0
    for ids in prompts(5, seed=18, vocab=128):
        reference = stock(padded, ids, 24)
        for drafter in (None, Mixed(padded, 4, PATTERN), Mixed(padded, 4, PATTERN, width=3)):
            out = hs.generate(padded, ids, drafter=drafter, max_new_tokens=24)
            pieces = list(hs.stream(padded, ids, drafter=drafter, max_new_tokens=24))
            assert out.token_ids == reference
            assert out.text == "".join(p.text for p in pieces) == padded.tokenizer.decode(reference)
            assert len(out.text) == sum(token < 100 for token in reference)
            coverage.see(out)
        beyond += sum(token >= 100 for token in reference)
    assert beyond > 10, "no padding row was emitted"
    coverage.demand()


def test_b17_padding_rows_when_sampling(padded):
    coverage = Coverage(4)
    for seed, ids in enumerate(prompts(8, seed=19, vocab=128)):
        how = Sampling(temperature=0.6, seed=seed, logprobs=True, top_logprobs=3)
        reference = hs.generate(padded, ids, max_new_tokens=24, sampling=how)
        out = hs.generate(padded, ids, drafter=Mixed(padded, 4, PATTERN), max_new_tokens=24, sampling=how)
        assert (out.token_ids, out.text) == (reference.token_ids, reference.text)
        coverage.see(out)
    assert max(coverage.tokens) >= 100
    coverage.demand()


@pytest.mark.parametrize("kind", [Kind.POINT, Kind.IID])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_b17_a_draft_model_without_the_padding_rows(padded, kind, temperature):
    """Same tokens, fewer rows: ids that it lacks are never drafted, and its embedding is never asked for them."""
    small = tiny_target(vocab_size=100)
    small.model.lm_head.weight.data.copy_(padded.model.lm_head.weight.data[:100])
    small.base.load_state_dict({**padded.base.state_dict(), "embed_tokens.weight": padded.embed(torch.arange(100))})
    drafter = hs.DraftModel(small, hs.Chain(depth=2, kind=kind))
    beyond, accepted = 0, set()
    for seed, ids in enumerate(prompts(4, seed=20, vocab=128)):
        how = Sampling(temperature=temperature, seed=seed)
        out = hs.generate(padded, ids, drafter=drafter, max_new_tokens=30, sampling=how)
        assert temperature or out.token_ids == stock(padded, ids, 30)
        beyond += sum(token >= 100 for token in out.token_ids)
        accepted |= set(out.stats.accepted)
    assert beyond > 10 and accepted == {0, 1, 2}


# --- B18, B19: weights ------------------------------------------------------------------------------------------------


def saved(target: Any, path: Path, shard: str = "1GB") -> Path:
    target.model.save_pretrained(path, max_shard_size=shard)
    target.tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("shard", ["1GB", "90KB", "20KB"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_b18_b19_one_file_or_many_tied_or_not(tmp_path, family, tied, shard):
    target = tiny_target(family, tie_word_embeddings=tied)
    directory = saved(target, tmp_path, shard)
    files = list(directory.glob("*.safetensors"))
    assert (len(files) == 1) == (shard == "1GB")
    stored = {name for file in files for name in load_file(file)}
    assert ("lm_head.weight" in stored) == (not tied)
    loaded = hs.load_target(directory, dtype="fp32", device="cpu")
    assert loaded.path == directory and loaded.vocabulary == target.vocabulary
    ids = prompts(1, seed=21, low=15)[0]
    assert torch.equal(causal_logits(loaded, ids), causal_logits(target, ids))
    out = hs.generate(loaded, ids, drafter=Mixed(loaded, 3, [1, 3, 0]), max_new_tokens=12)
    assert out.token_ids == stock(target, ids, 12)


def test_b19_two_shards(tmp_path):
    target = tiny_target()
    size = sum(weight.nbytes for weight in target.model.parameters())
    directory = saved(target, tmp_path, f"{size // 1000 * 2 // 3}KB")
    assert len(list(directory.glob("*.safetensors"))) == 2
    loaded = hs.load_target(str(directory), dtype="fp32", device="cpu")
    assert torch.equal(causal_logits(loaded, [3, 4, 5]), causal_logits(target, [3, 4, 5]))


def test_b19_a_pickle_is_never_opened(tmp_path):
    target = tiny_target()
    directory = saved(target, tmp_path)
    (directory / "model.safetensors").unlink()
    torch.save(target.model.state_dict(), directory / "pytorch_model.bin")
    with pytest.raises(Unsupported, match="safetensors"):
        hs.load_target(directory)


def without(path: Path) -> None:
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})


def misshapen(path: Path) -> None:
    weights = load_file(path)
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 3)
    save_file(weights, path, metadata={"format": "pt"})


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.parametrize("damage", [without, misshapen, truncated])
def test_b18_no_weight_is_left_at_random(tmp_path, damage: Callable[[Path], None]):
    directory = saved(tiny_target(), tmp_path)
    damage(directory / "model.safetensors")
    with pytest.raises(Unsupported, match="up_proj" if damage is without else str(directory)):
        hs.load_target(directory)


# --- B20: packed layers -----------------------------------------------------------------------------------------------


class FakeQuantised(torch.nn.Module):
    """A linear layer kept as int8 rows and scales; there is no `.weight`."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("packed", (linear.weight.detach() / scale).round().to(torch.int8))
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.packed.to(x.dtype) * self.scale, self.bias)


def quantised(family: str, dtype: torch.dtype) -> HFTarget:
    model = tiny_target(family, dtype=dtype).model
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear):
            model.set_submodule(name, FakeQuantised(module))
    return HFTarget(model, tiny_tokenizer(96))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_b20_a_packed_target(family):
    target, coverage = quantised(family, torch.float32), Coverage(4)
    assert not hasattr(target.head, "weight")
    assert target.can.tree and target.can.rollback and target.vocabulary.size == 96
    for ids, width in zip(prompts(5, seed=22), cycle((1, 3))):
        reference = stock(target, ids, 24)
        out = hs.generate(target, ids, drafter=Mixed(target, 4, PATTERN, width), max_new_tokens=24)
        assert out.token_ids == reference
        coverage.see(out)
    coverage.demand()


def test_b20_what_a_packed_head_cannot_do_is_refused_with_the_reason():
    can = quantised("llama", torch.float32).can
    assert not can.gather_head_rows and not can.trainable
    with pytest.raises(Unsupported, match=r"gather_head_rows.*packed"):
        can.demand("gather_head_rows", "A trimmed vocabulary")


def test_b20_a_plain_draft_in_another_dtype_for_a_packed_target():
    target = quantised("llama", torch.bfloat16)
    drafter = hs.DraftModel(tiny_target(), hs.Chain(depth=2))
    assert (target.can.dtype, drafter.model.can.dtype) == (torch.bfloat16, torch.float32)
    accepted = set()
    for ids in prompts(5, seed=23):
        out = hs.generate(target, ids, drafter=drafter, max_new_tokens=24)
        demand_near_argmax(target, ids, out.token_ids)
        accepted |= set(out.stats.accepted)
        sampled = Sampling(temperature=0.7, seed=1)
        iid = hs.DraftModel(drafter.model, hs.Chain(depth=3, kind=Kind.IID))
        assert len(hs.generate(target, ids, drafter=iid, max_new_tokens=9, sampling=sampled).token_ids) == 9
    assert accepted == {0, 1, 2}


# --- S03: what is counted ---------------------------------------------------------------------------------------------


def test_s03_the_figures_add_up(tiny):
    target, coverage = tiny(), Coverage(4)
    cut = 0
    for number, ids in enumerate(prompts(5, seed=24)):
        for drafter in (None, Mixed(target, 4, PATTERN), Oracle(target, 4, width=2), Wrong(target, 4)):
            for count in (1, 2, 18 + number):
                out = hs.generate(target, ids, drafter=drafter, max_new_tokens=count)
                stats = out.stats
                assert stats.tokens == len(out.token_ids) == count and stats.prompt_tokens == len(ids)
                assert sum(stats.accepted.values()) == stats.passes
                assert sum((k + 1) * n for k, n in stats.accepted.items()) == stats.tokens - 1
                assert stats.tokens_per_step == ((count - 1) / stats.passes if count > 1 else 0.0)
                assert sum(k * n for k, n in stats.accepted.items()) <= stats.drafted
                assert drafter is not None or (stats.drafted == 0 and stats.tokens_per_step == (count > 1))
                coverage.see(out)
        answer = out.token_ids
        eos = next((token for at, token in enumerate(answer) if at > 7 and token not in answer[:at]), None)
        if eos is not None:
            out = hs.generate(target, ids, drafter=Oracle(target, 4), max_new_tokens=20, sampling=Sampling(eos=eos))
            assert sum((k + 1) * n for k, n in out.stats.accepted.items()) == out.stats.tokens - 1
            cut += out.stats.tokens % 5 != 1  # the last step emitted less than K + 1
    assert cut, "no EOS cut a block"
    coverage.demand()


def test_s03_pieces_say_what_was_drafted(tiny):
    pieces = list(hs.stream(tiny(), [3, 4], drafter=Mixed(tiny(), 4, PATTERN), max_new_tokens=20))
    assert [p.accepted for p in pieces] == [0, 0, 4, 2, 1, 4, 0, 1]
    assert all(len(p.token_ids) == p.accepted + 1 for p in pieces)


# --- S05, S06, S08 ----------------------------------------------------------------------------------------------------


def other_words(target: HFTarget) -> HFTarget:
    """The same model under a vocabulary of the same size in which two ids have changed places."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    content = json.loads(target.tokenizer.backend_tokenizer.to_str())
    words = content["model"]["vocab"]
    words["A"], words["B"] = words["B"], words["A"]
    return HFTarget(target.model, PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content))))


def test_s05_another_vocabulary_is_refused_by_its_ids(tiny):
    target = tiny()
    stranger = other_words(tiny_target())
    assert stranger.vocabulary.size == target.vocabulary.size
    for drafter in (hs.DraftModel(stranger), Mixed(stranger, 2, [1]), Oracle(stranger, 2)):
        for start in (
            lambda d=drafter: hs.generate(target, [3], drafter=d),
            lambda d=drafter: hs.stream(target, [3], drafter=d),
            lambda d=drafter: hs.Session(target, drafter=d),
        ):
            with pytest.raises(BadInput, match="vocabulary"):
                start()
    with pytest.raises(BadInput, match="vocabulary"):
        hs.generate(target, [3], drafter=hs.DraftModel(tiny_target(vocab_size=80)))


def test_s05_the_same_ids_with_other_padding_are_accepted(padded):
    with pytest.raises(BadInput, match="more LM-head rows"):
        hs.generate(
            HFTarget(tiny_target(vocab_size=100).model, tiny_tokenizer(100)), [3], drafter=hs.DraftModel(padded)
        )
    drafter = hs.DraftModel(tiny_target("gpt2", vocab_size=100))  # another family, the same tokens
    assert hs.generate(padded, [3], drafter=drafter, max_new_tokens=9).token_ids == stock(padded, [3], 9)


TREE = hs.StaticTree(paths=[(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_s06_no_invalid_id_reaches_an_embedding(monkeypatch, temperature):
    """Ragged drafts are padded: the filler must be an id that exists."""
    target, model = tiny_target(), blurred(0.05)
    seen: list[tuple[int, int]] = []
    for one in (target, model):
        table = one.model.get_input_embeddings()
        table.register_forward_pre_hook(lambda _m, args: seen.append((int(args[0].min()), int(args[0].max()))))
    widths = set()
    for drafter in (
        hs.PromptLookup(min_ngram=1, branches=3),
        hs.DraftModel(model, TREE),
        hs.DraftModel(model, hs.Chain(depth=4, kind=Kind.IID)),
        Mixed(target, 4, [[0, 4], [2], [4, 1], [3]], width=2),
    ):
        how = Sampling(temperature=temperature, seed=5)
        outputs = hs.generate(target, prompts(5, seed=25), drafter=drafter, max_new_tokens=17, sampling=how)
        widths |= {out.stats.drafted for out in outputs}
    assert len(seen) > 50 and len(widths) > 4
    assert min(low for low, _ in seen) >= 0 and max(high for _, high in seen) < 96


@pytest.mark.parametrize("kind", [Kind.POINT, Kind.IID, Kind.WITHOUT_REPLACEMENT])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    "paths", [[(0,)], [(i,) for i in range(64)], [(0,), (0, 0), (0, 0, 0)]], ids=["1", "V", "deep"]
)
def test_s08_edge_shapes(paths, kind, temperature):
    """One draft node, as many siblings as tokens, a budget smaller than the depth."""
    target = tiny_target(vocab_size=64)
    drafter = hs.DraftModel(blurred(0.1, vocab_size=64), hs.StaticTree(paths=paths, kind=kind))
    for count in (1, 2, 3, 12):
        how = Sampling(temperature=temperature, seed=count)
        outputs = hs.generate(target, [[3], [5, 6, 7]], drafter=drafter, max_new_tokens=count, sampling=how)
        assert [len(out.token_ids) for out in outputs] == [count, count]
        if not temperature:
            assert [out.token_ids for out in outputs] == [stock(target, ids, count) for ids in ([3], [5, 6, 7])]
    if len(paths) == 64 and kind is not Kind.IID:  # all tokens are tried: one of them is right
        assert all(set(out.stats.accepted) <= {0, 1} and out.stats.accepted.get(0, 0) <= 1 for out in outputs)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_s08_a_tree_wider_than_the_vocabulary(temperature):
    """Distinct siblings cannot outnumber the tokens: refused. Independent draws may repeat: served."""
    target, wide = tiny_target(vocab_size=64), [(i,) for i in range(70)]
    how = Sampling(temperature=temperature, seed=1)
    for kind in (Kind.POINT, Kind.WITHOUT_REPLACEMENT):
        with pytest.raises(BadInput, match=r"70 siblings.*64"):
            hs.generate(target, [3], drafter=hs.DraftModel(target, hs.StaticTree(paths=wide, kind=kind)), sampling=how)
    drafter = hs.DraftModel(blurred(0.1, vocab_size=64), hs.StaticTree(paths=wide, kind=Kind.IID))
    out = hs.generate(target, [3], drafter=drafter, max_new_tokens=12, sampling=how)
    assert len(out.token_ids) == 12 and max(out.stats.accepted) == 1
    assert temperature or out.token_ids == stock(target, [3], 12)


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_s08_one_draft_step_and_depths_beyond_the_budget(tiny, count):
    target = tiny()
    reference = stock(target, [3, 4, 5], count)
    for drafter in (
        *(stub(target, depth, width) for stub in (Oracle, Wrong) for depth in (1, 30) for width in (1, 2)),
        hs.PromptLookup(depth=1, min_ngram=1),
        hs.PromptLookup(depth=500, min_ngram=1, branches=4, nodes=1),  # the root alone
        hs.PromptLookup(depth=500, min_ngram=1, branches=4, nodes=2),
        hs.DraftModel(target, hs.Chain(depth=1)),
        hs.DraftModel(target, hs.Chain(depth=40)),
    ):
        out = hs.generate(target, [3, 4, 5], drafter=drafter, max_new_tokens=count)
        assert out.token_ids == reference
        assert out.stats.drafted <= 60 * max(out.stats.passes, 1)


@pytest.mark.parametrize("paths", [[], [()], [(0, 0)], [(0,), (0,)], [(-1,)]])
def test_s08_what_is_no_tree_is_refused(paths):
    with pytest.raises(BadInput):
        hs.StaticTree(paths=paths)
