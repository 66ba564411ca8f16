"""Layouts as exports.md and medusa.md write them down, in tiny sizes: K = 2 heads, D = 4, V = 7 ids, U = 3 of them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import headstart as hs
from headstart.checkpoint import inspect, load, load_head
from headstart.core import Draft, Features
from headstart.errors import BadInput
from headstart.heads.base import Frontier, Head, Known
from headstart.heads.medusa_published import convert
from headstart.testing import tiny_target

D, V = 4, 7
IDS = [6, 0, 3]
REFERENCE = {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "medusa_num_heads": 2, "medusa_num_layers": 1}
VLLM = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": D, "vocab_size": V, "num_heads": 2}
ONE = VLLM | {"num_hidden_layers": 1}
CUT = {"truncated_vocab_size": 3}


def some(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


W00, W01, W10, W11 = (some(D, D, seed=i) for i in range(4))
B00, B01, B10, B11 = (some(D, seed=10 + i) for i in range(4))
L0, L1, BASE = (some(V, D, seed=20 + i) for i in range(3))
MAP = torch.tensor(IDS)
NO = torch.zeros(D)
BLOCKS = {"0.0.linear.weight": W00, "0.0.linear.bias": B00, "1.0.linear.weight": W10, "1.0.linear.bias": B10}
OWN = {"0.1.weight": L0, "1.1.weight": L1}
V_BLOCKS = {"blocks.0.layers.0.weight": W00, "blocks.1.layers.0.weight": W10}
V_BIAS = {"blocks.0.layers.0.bias": B00, "blocks.1.layers.0.bias": B10}
V_HEADS = {"lm_heads.0.weight": L0, "lm_heads.1.weight": L1}
TWO = {"0.1.linear.weight": W01, "0.1.linear.bias": B01, "1.1.linear.weight": W11, "1.1.linear.bias": B11}
OWN_AT_2 = {"0.2.weight": L0, "1.2.weight": L1}
SAME = {"0.1.linear.weight": W00, "0.1.linear.bias": B00, "1.1.linear.weight": W10, "1.1.linear.bias": B10}
V_TWO = {"blocks.0.layers.1.weight": W01, "blocks.1.layers.1.weight": W11}

Blocks = list[list[tuple[Tensor, Tensor]]]
PLAIN: Blocks = [[(W00, B00)], [(W10, B10)]]
BARE: Blocks = [[(W00, NO)], [(W10, NO)]]
DEEP: Blocks = [[(W00, B00), (W01, B01)], [(W10, B10), (W11, B11)]]
TIED: Blocks = [[(W00, B00)] * 2, [(W10, B10)] * 2]
DEEP_BARE: Blocks = [[(W00, NO), (W01, NO)], [(W10, NO), (W11, NO)]]

# name -> config.json, tensors, what the heads are (weight and bias by head and layer), their LM heads (None: borrowed)
CASES: dict[str, tuple[dict[str, Any], dict[str, Tensor], Blocks, list[Tensor] | None]] = {
    "reference, own LM heads": (REFERENCE, BLOCKS | OWN, PLAIN, [L0, L1]),
    "reference, legacy trainer": (REFERENCE, BLOCKS, PLAIN, None),
    "reference, counts left out": ({"medusa_num_layers": 1}, BLOCKS | OWN, PLAIN, [L0, L1]),
    "reference, prefix": (REFERENCE, {f"medusa_heads.{k}": v for k, v in (BLOCKS | OWN).items()}, PLAIN, [L0, L1]),
    "reference, two layers": (REFERENCE | {"medusa_num_layers": 2}, BLOCKS | TWO | OWN_AT_2, DEEP, [L0, L1]),
    "reference, two layers, legacy": (REFERENCE | {"medusa_num_layers": 2}, BLOCKS | TWO, DEEP, None),
    "reference, repeated layer": (REFERENCE | {"medusa_num_layers": 2}, BLOCKS | SAME | OWN_AT_2, TIED, [L0, L1]),
    "reference, repeated, stored once": (REFERENCE | {"medusa_num_layers": 2}, BLOCKS | OWN_AT_2, TIED, [L0, L1]),
    "reference, repeated, legacy": (REFERENCE | {"medusa_num_layers": 2}, BLOCKS, TIED, None),
    "reference, repeated, uncounted": ({"medusa_num_heads": 2}, BLOCKS | OWN_AT_2, TIED, [L0, L1]),
    "vllm": (ONE, V_BLOCKS | V_HEADS, BARE, [L0, L1]),
    "vllm, counts left out": ({"model_type": "medusa"}, V_BLOCKS | V_HEADS, BARE, [L0, L1]),
    "vllm, prefix": (ONE, {f"medusa_heads.{k}": v for k, v in (V_BLOCKS | V_HEADS).items()}, BARE, [L0, L1]),
    "vllm, biases": (ONE | {"medusa_fc_bias": True}, V_BLOCKS | V_BIAS | V_HEADS, PLAIN, [L0, L1]),
    "vllm, biases it would skip": (ONE, V_BLOCKS | V_BIAS | V_HEADS, PLAIN, [L0, L1]),
    "vllm, two layers": (VLLM | {"num_hidden_layers": 2}, V_BLOCKS | V_TWO | V_HEADS, DEEP_BARE, [L0, L1]),
    "vllm, one LM head": (ONE | {"original_lm_head": True}, V_BLOCKS | {"lm_heads.0.weight": L0}, BARE, [L0, L0]),
    "vllm, truncated, U rows": (
        ONE | CUT,
        V_BLOCKS | {"lm_heads.0.weight": L0[IDS], "lm_heads.1.weight": L1[IDS], "token_map": MAP},
        BARE,
        [L0[IDS], L1[IDS]],
    ),
    "vllm, truncated, V rows": (ONE | CUT, V_BLOCKS | V_HEADS | {"token_map": MAP}, BARE, [L0[IDS], L1[IDS]]),
    "vllm, truncated, one LM head": (
        ONE | CUT | {"original_lm_head": True},
        V_BLOCKS | {"lm_heads.0.weight": L0[IDS], "token_map": MAP},
        BARE,
        [L0[IDS], L0[IDS]],
    ),
}


def expected(h_RD: Tensor, blocks: Blocks, lm_heads: list[Tensor]) -> list[Tensor]:
    """medusa.md 1, exports.md 1: per layer x = x + silu(W x + b), then the head's own rows."""
    out = []
    for layers, rows_UD in zip(blocks, lm_heads, strict=True):
        x_RD = h_RD
        for weight_DD, bias_D in layers:
            y_RD = x_RD @ weight_DD.T + bias_D
            x_RD = x_RD + y_RD / (1 + torch.exp(-y_RD))
        out.append(x_RD @ rows_UD.T)
    return out


def written(path: Path, config: dict[str, Any], tensors: dict[str, Tensor], name: str = "model.safetensors") -> Path:
    (path / "config.json").write_text(json.dumps(config))
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, path / name)
    return path


def said(head: Head, h_RD: Tensor) -> list[Tensor]:
    """Logits `[R, U]` of each head, as drafting gets them; borrowed ones are read out with BASE."""
    known = Known(torch.zeros(1, len(h_RD), dtype=torch.long), Features(h_RD[None], ()), [len(h_RD)])
    cache = head.absorb(head.empty(1), known)
    anchor = torch.arange(len(h_RD))[None]
    z_BWKD, _ = head.step(cache, head.begin(cache, anchor), Frontier(torch.zeros_like(anchor), anchor, 0))
    own = [head.readout(k + 1) for k in range(z_BWKD.shape[2])]
    return [z_BWKD[0, :, k] @ BASE.T if r is None else r.project(z_BWKD[0, :, k]) for k, r in enumerate(own)]


@pytest.mark.parametrize("case", list(CASES))
def test_every_layout_gives_the_logits_of_the_formula(case: str, tmp_path: Path) -> None:
    config, tensors, blocks, lm_heads = CASES[case]
    found = load(written(tmp_path, config, tensors), size=V)
    h_RD = some(5, D, seed=99)
    assert (found.head.readout(1) is None) == (lm_heads is None)
    wanted = expected(h_RD, blocks, lm_heads or [BASE, BASE])
    assert len(wanted) == len(found.paths) == 2
    assert found.paths == ((0,), (0, 0))
    for ours, theirs in zip(said(found.head, h_RD), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    if "truncated" in case:
        assert found.vocab.ids_U is not None
        assert found.vocab.ids_U.tolist() == IDS
        readout = found.head.readout(2)
        assert readout is not None
        best_RK, _ = found.vocab.topk(readout, h_RD, 1)  # the columns know which target ids they are
        assert best_RK[:, 0].tolist() == [IDS[u] for u in (h_RD @ lm_heads[1].T).argmax(1)]  # type: ignore[index]
    else:
        assert found.vocab.ids_U is None
        assert found.vocab.size == V


@pytest.mark.parametrize("case", [case for case in CASES if "count" not in case])
def test_a_tensor_taken_away_or_put_in_is_named(case: str) -> None:
    config, tensors, _, _ = CASES[case]
    for name in tensors:
        fewer = {key: tensor for key, tensor in tensors.items() if key != name}
        with pytest.raises(BadInput, match=name.removeprefix("medusa_heads.").replace(".", r"\.")):
            convert(config, fewer)
    for stray in ("lm_head.weight", "blocks.0.layers.9.weight", "0.9.linear.weight", "2.0.linear.weight", "2.1.weight"):
        with pytest.raises(BadInput, match=stray.replace(".", r"\.")):
            convert(config, tensors | {stray: W00})


@pytest.mark.parametrize("case", [case for case in CASES if "count" in case])
def test_without_counts_the_tensors_still_have_to_be_whole(case: str) -> None:
    config, tensors, _, _ = CASES[case]
    for stray in ("lm_head.weight", "blocks.0.layers.9.weight", "0.9.linear.weight", "2.0.linear.bias", "2.1.weight"):
        with pytest.raises(BadInput, match=r"missing: .*\n  left over: "):
            convert(config, tensors | {stray: W00})


def test_a_long_list_of_names_is_cut() -> None:
    whole_model = {f"model.layers.{i}.mlp.up_proj.weight": W00 for i in range(40)}
    with pytest.raises(BadInput, match=r"model\.layers\.0\..* and 28 more"):
        convert(REFERENCE, BLOCKS | whole_model)


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Tensor]]] = {
    "unknown option": ("unknown fields: hidden_act", REFERENCE | {"hidden_act": "gelu"}, BLOCKS),
    "a target's heads": ("unknown fields: num_attention_heads", ONE | {"num_attention_heads": 8}, V_BLOCKS | V_HEADS),
    "scaled logits": (r"logit_scale is 0\.5", ONE | {"logit_scale": 0.5}, V_BLOCKS | V_HEADS),
    "no switch": ("'original_lm_head': 'false'", ONE | {"original_lm_head": "false"}, V_BLOCKS | V_HEADS),
    "packed weights": ("0.0.linear.weight .* torch.int8", REFERENCE, BLOCKS | {"0.0.linear.weight": W00.char()}),
    "two counts": ("'num_heads': 2, 'medusa_num_heads': 3", ONE | {"medusa_num_heads": 3}, V_BLOCKS | V_HEADS),
    "a count that is none": ("'medusa_num_heads': '2'", REFERENCE | {"medusa_num_heads": "2"}, BLOCKS),
    "no heads": ("'medusa_num_heads': 0", REFERENCE | {"medusa_num_heads": 0}, BLOCKS),
    "fewer counted": (r"1 Medusa heads.*\n.*\n  left over: 1\.0", REFERENCE | {"medusa_num_heads": 1}, BLOCKS),
    "more counted": (r"missing: 2\.0\.linear\.bias", REFERENCE | {"medusa_num_heads": 3}, BLOCKS),
    "both layouts": (r"left over: 0\.0\.linear", ONE, V_BLOCKS | V_HEADS | BLOCKS),
    "prefix and not": ("with and without the prefix", REFERENCE, BLOCKS | {"medusa_heads.0.0.linear.weight": W00}),
    "no block": ("No residual block.*lm_heads.0.weight", ONE, V_HEADS),
    "vLLM without LM heads": (r"missing: lm_heads\.0\.weight, lm_heads\.1\.weight", ONE, V_BLOCKS),
    "vLLM without its biases": ("layers.0.bias", ONE | {"medusa_fc_bias": True}, V_BLOCKS | V_HEADS),
    "vLLM's switch elsewhere": ("belongs to vLLM's layout", REFERENCE | {"original_lm_head": True}, BLOCKS | OWN),
    "block of other width": (r"0\.0\.linear\.weight .* \[4, 4\]; expected \[5, 5\]", ONE | {"hidden_size": 5}, BLOCKS),
    "bias of other width": (r"bias .* \[3\]; expected \[4\]", REFERENCE, BLOCKS | {"0.0.linear.bias": B00[:3]}),
    "LM heads of two sizes": (r"1\.1\.weight .* \[6, 4\]", REFERENCE, BLOCKS | OWN | {"1.1.weight": L1[:6]}),
    "other vocab_size": (r"\[7, 4\]; expected \[9, 4\]", ONE | {"vocab_size": 9}, V_BLOCKS | V_HEADS),
    "map without truncation": ("no token_map without", ONE, V_BLOCKS | V_HEADS | {"token_map": MAP}),
    "truncation without map": ("token_map is not there", ONE | CUT, V_BLOCKS | V_HEADS),
    "map of other length": (r"token_map has shape \[2\]", ONE | CUT, V_BLOCKS | V_HEADS | {"token_map": MAP[:2]}),
    "map outside": (r"outside 0\.\.6", ONE | CUT, V_BLOCKS | V_HEADS | {"token_map": MAP + 1}),
    "map of offsets": (r"outside 0\.\.6", ONE | CUT, V_BLOCKS | V_HEADS | {"token_map": MAP - 1}),
    "map of no size": ("lacks vocab_size", {"model_type": "medusa"} | CUT, V_BLOCKS | V_HEADS | {"token_map": MAP}),
    "rows of neither size": (
        r"\[5, 4\]; expected \[3, 4\] or \[7, 4\]",
        ONE | CUT,
        V_BLOCKS | {"lm_heads.0.weight": L0[:5], "lm_heads.1.weight": L1[:5], "token_map": MAP},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", list(REFUSED))
def test_what_cannot_be_read_for_certain_is_refused(what: str, tmp_path: Path) -> None:
    message, config, tensors = REFUSED[what]
    with pytest.raises(BadInput, match=message):
        convert(config, tensors)
    with pytest.raises(BadInput, match=f"{tmp_path}: "):
        load(written(tmp_path, config, tensors))


def test_repeated_layers_and_missing_biases_are_mentioned(tmp_path: Path) -> None:
    for case in ("reference, repeated layer", "reference, repeated, stored once"):
        notes = convert(*CASES[case][:2]).notes
        assert notes[-1] == "the 2 layers of a head are equal: the reference code repeats one layer"
    assert not any("equal" in note for note in convert(*CASES["reference, two layers"][:2]).notes)
    assert inspect(written(tmp_path, ONE, V_BLOCKS | V_HEADS))["card"]["notes"] == [
        "read from the vLLM layout",
        "no biases are stored: they are zero",
    ]


def test_the_target_it_names_and_its_sizes_are_kept(tmp_path: Path) -> None:
    found = inspect(written(tmp_path, REFERENCE, BLOCKS | OWN, "medusa_lm_head.safetensors"))
    assert found["target"]["name"] == "lmsys/vicuna-7b-v1.3"
    assert found["target"]["vocabulary"] == {"size": V, "digest": None}
    assert (found["width"], found["tree"]["nodes"], found["dtype"]) == (D, 3, "float32")
    assert found["parameters"] == 2 * (D * D + D + V * D)


def test_a_legacy_head_needs_to_be_told_how_many_ids_there_are(tmp_path: Path) -> None:
    written(tmp_path, REFERENCE, BLOCKS)
    with pytest.raises(BadInput, match="does not say how many ids its target has; use load_head"):
        load(tmp_path)
    assert inspect(tmp_path)["target"]["vocabulary"]["size"] is None


def test_half_precision_stays(tmp_path: Path) -> None:
    found = load(written(tmp_path, REFERENCE, {name: t.half() for name, t in (BLOCKS | OWN).items()}))
    assert found.record.dtype == "float16"
    assert torch.equal(found.head.state_dict()["lm_heads"][1], L1.half())
    mixed = {name: t.half() if "linear" in name else t for name, t in (BLOCKS | OWN).items()}
    found = load(written(tmp_path, REFERENCE, mixed))
    assert torch.equal(found.head.state_dict()["lm_heads"][1], L1)  # not rounded to the type of the blocks
    assert torch.equal(found.head.state_dict()["weights.0"][0], W00.half().float())


# --- on a target -------------------------------------------------------------------------------------------

KEPT = [i for i in range(95, -1, -1) if i % 4]
target = cache(tiny_target)


def on_target(layout: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The same two heads, reading out with the target's LM head, in every way to say so."""
    rows_VD = target().model.get_output_embeddings().weight.detach()
    blocks = [0.05 * some(48, 48, seed=i) for i in range(2)]
    vllm = VLLM | {"hidden_size": 48, "vocab_size": 96, "num_hidden_layers": 1}
    v_blocks = {f"blocks.{k}.layers.0.weight": w for k, w in enumerate(blocks)}
    r_blocks = {f"{k}.0.linear.weight": w for k, w in enumerate(blocks)}
    cut = {"truncated_vocab_size": len(KEPT)}
    token_map = {"token_map": torch.tensor(KEPT)}
    return {
        "legacy": (REFERENCE, r_blocks),
        "own": (REFERENCE, r_blocks | {"0.1.weight": rows_VD, "1.1.weight": rows_VD}),
        "vllm": (vllm, v_blocks | {"lm_heads.0.weight": rows_VD, "lm_heads.1.weight": rows_VD}),
        "vllm shared": (vllm | {"original_lm_head": True}, v_blocks | {"lm_heads.0.weight": rows_VD}),
        "legacy cut": (REFERENCE | cut | {"vocab_size": 96}, r_blocks | token_map),
        "vllm cut": (
            vllm | cut | {"original_lm_head": True},
            v_blocks | token_map | {"lm_heads.0.weight": rows_VD[KEPT]},
        ),
    }[layout]


def drafted(path: Path, layout: str) -> tuple[list[int], list[list[int]]]:
    """The greedy text, and every draft on the way."""
    path.mkdir()
    drafter = Watched(load_head(written(path, *on_target(layout)), target()))
    return hs.generate(target(), "a published head", drafter=drafter, max_new_tokens=30).token_ids, drafter.drafts


class Watched:
    """A drafter that remembers its drafts."""

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.drafts = drafter, list[list[int]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def draft(self, *args: Any) -> Draft:
        out: Draft = self.drafter.draft(*args)
        self.drafts.append(out.token_BN[0].tolist())
        return out


@pytest.mark.parametrize(
    ("layout", "same_as"),
    [("own", "legacy"), ("vllm", "legacy"), ("vllm shared", "legacy"), ("vllm cut", "legacy cut")],
)
def test_the_same_heads_in_other_layouts_draft_the_same(layout: str, same_as: str, tmp_path: Path) -> None:
    text, drafts = drafted(tmp_path / "one", layout)
    assert (text, drafts) == drafted(tmp_path / "other", same_as)
    assert text == hs.generate(target(), "a published head", max_new_tokens=30).token_ids
    guesses = {token for draft in drafts for token in draft[1:]}
    assert len(guesses) > 10
    assert all(token in KEPT for token in guesses) == ("cut" in layout)


def test_a_published_head_for_another_width_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"vicuna-7b-v1\.3: width 4, not stated ids .*\n  this target: .*width 48, 96 ids"
    ):
        load_head(written(tmp_path, REFERENCE, BLOCKS), target())
