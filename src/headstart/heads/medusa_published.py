"""Medusa heads as others store them, turned into ours. K heads, N layers each, D target width.

    reference   {k}.{j}.linear.weight [D, D], .bias [D]          own LM heads: {k}.{N}.weight [V, D]; without, they
                                                                 borrow the target's (the authors' legacy trainer)
    vLLM        blocks.{k}.layers.{j}.weight [D, D], maybe .bias lm_heads.{k}.weight [V, D], or with
                                                                 `original_lm_head` lm_heads.0.weight for all heads

Both may carry the prefix `medusa_heads.`. A draft vocabulary is `token_map` [U], absolute target ids, with
`truncated_vocab_size` U; LM heads then have U rows, or V of which those are taken. Where vLLM skips a tensor that it
has no place for, or leaves out one that is missing, this reader refuses. Biases that are there are loaded whatever
`medusa_fc_bias` says: they were trained.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.errors import BadInput
from headstart.heads.medusa import MedusaConfig

HEADS = ("num_heads", "medusa_num_heads")
LAYERS = ("num_hidden_layers", "num_layers", "medusa_num_layers")
OPTIONS = ("hidden_size", "vocab_size", "truncated_vocab_size", "original_lm_head", "medusa_fc_bias", "logit_scale")
ABOUT = {  # where a head comes from, or how its authors' own program drafts: nothing that changes its logits
    *("model_type", "architectures", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "version"),
    *("base_model_name_or_path", "max_paths", "topk", "max_seq_len", "bos_token_id", "eos_token_id", "pad_token_id"),
}
PREFIX = "medusa_heads."
PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAP = "token_map"
SHOWN = 12  # names in a message


class Converted(NamedTuple):
    """`state` is a state dict of ours; `vocab_size` V is None where nothing tells; `notes` are for the model card."""

    config: MedusaConfig
    state: dict[str, Tensor]
    token_map: Tensor | None
    width: int
    vocab_size: int | None
    notes: list[str]


class _Layout(NamedTuple):
    """The names that a layout gives to the parts: of block `(k, j)` with suffix, and of the LM head of k."""

    name: str
    block: Callable[[int, int, str], str]
    lm_head: Callable[[int], str]


class _Sizes(NamedTuple):
    heads: int
    layers: int
    stored: int  # layers that have tensors of their own
    lm_heads: int  # 0: borrowed; 1: one for all, or that of a single head
    bias: bool


def recognises(config: Mapping[str, Any]) -> bool:
    """Is this the config.json of a published Medusa head?"""
    return config.get("model_type") == "medusa" or any(name in config for name in (HEADS[1], LAYERS[2]))


def convert(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Converted:
    """Raises BadInput, naming them, for options and tensors that are unknown, missing, contradictory or misshapen."""
    _demand_known(config)
    found = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    if len(found) < len(tensors):
        raise BadInput(f"Some tensors of this Medusa head stand in it with and without the prefix {PREFIX!r}.")
    layout, sizes = _measured(config, found)
    _demand_names(found, layout, sizes)
    return _filled(config, found, layout, sizes)


def _demand_known(config: Mapping[str, Any]) -> None:
    unknown = sorted(config.keys() - {*HEADS, *LAYERS, *OPTIONS} - ABOUT)
    if unknown:
        raise BadInput(
            f"The published Medusa config.json has unknown fields: {_listed(unknown)}. They may change what the heads "
            "compute; remove those that do not."
        )
    flags = {name: config[name] for name in ("original_lm_head", "medusa_fc_bias") if name in config}
    if any(type(value) is not bool for value in flags.values()):
        raise BadInput(f"The published Medusa config.json says {flags}; expected true or false.")
    if config.get("logit_scale", 1) not in (1, None):
        raise BadInput(f"logit_scale is {config['logit_scale']}; only 1 is supported. Scale the LM heads themselves.")


def _option(config: Mapping[str, Any], *names: str) -> int | None:
    """A count that goes by several names."""
    values = {name: config[name] for name in names if config.get(name) is not None}
    if len(set(map(repr, values.values()))) > 1 or any(type(v) is not int or v < 1 for v in values.values()):
        raise BadInput(f"The published Medusa config.json says {values}; expected one whole number above 0.")
    return next(iter(values.values()), None)


def _measured(config: Mapping[str, Any], found: Mapping[str, Tensor]) -> tuple[_Layout, _Sizes]:
    """Which layout it is, and how many heads and layers; config.json has the last word where it has one."""
    vllm = any(re.match(r"(blocks|lm_heads)\.\d", name) for name in found)
    pattern = r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)" if vllm else r"(\d+)\.(\d+)\.linear\.(weight|bias)"
    blocks = [m.groups() for m in (re.fullmatch(pattern, name) for name in found) if m]
    if not blocks:
        raise BadInput(
            f"No residual block of a Medusa head is among the tensors {_listed(sorted(found))}; expected names such as "
            "0.0.linear.weight or blocks.0.layers.0.weight."
        )
    own = [m.groups() for m in (re.fullmatch(r"(\d+)\.(\d+)\.weight", name) for name in found) if m and not vllm]
    stored = 1 + max(int(j) for _, j, _ in blocks)
    heads = _option(config, *HEADS) or 1 + max(int(k) for k, _, _ in blocks)
    layers = _option(config, *LAYERS) or max([int(n) for _, n in own] or [stored])
    bias = bool(config.get("medusa_fc_bias")) or any(part == "bias" for *_, part in blocks)
    if vllm:
        shared = bool(config.get("original_lm_head"))
        layout = _Layout("vLLM", lambda k, j, part: f"blocks.{k}.layers.{j}.{part}", lambda k: f"lm_heads.{k}.weight")
        return layout, _Sizes(heads, layers, layers, 1 if shared else heads, bias)
    if config.get("original_lm_head"):
        raise BadInput("original_lm_head belongs to vLLM's layout, but the tensors are named as by the reference code.")
    layout = _Layout("reference", lambda k, j, part: f"{k}.{j}.linear.{part}", lambda k: f"{k}.{layers}.weight")
    return layout, _Sizes(heads, layers, 1 if stored == 1 else layers, heads if own else 0, bias)


def _demand_names(found: Mapping[str, Tensor], layout: _Layout, sizes: _Sizes) -> None:
    parts = ("weight", "bias") if sizes.bias else ("weight",)
    blocks = {layout.block(k, j, part) for k in range(sizes.heads) for j in range(sizes.stored) for part in parts}
    wanted = blocks | {layout.lm_head(k) for k in range(sizes.lm_heads)}
    missing, left = sorted(wanted - found.keys()), sorted(found.keys() - wanted - {MAP})
    if missing or left:
        raise BadInput(
            f"The tensors are not those of {sizes.heads} Medusa heads with {sizes.layers} layers each and "
            f"{'one LM head for all' if sizes.lm_heads == 1 else f'{sizes.lm_heads} LM heads'} in the {layout.name} "
            f"layout.\n  missing: {_listed(missing)}\n  left over: {_listed(left)}\n"
            "If config.json counts them wrongly, correct it; else fetch the file again."
        )


def _filled(config: Mapping[str, Any], found: Mapping[str, Tensor], layout: _Layout, sizes: _Sizes) -> Converted:
    width = _option(config, "hidden_size") or found[layout.block(0, 0, "weight")].shape[-1]
    token_map = _token_map(config, found)
    dtype = _dtype({name: tensor for name, tensor in found.items() if name != MAP})

    def stacked(j: int, part: str, shape: list[int]) -> Tensor:
        if part == "bias" and not sizes.bias:
            return torch.zeros(sizes.heads, *shape, dtype=dtype)
        names = [layout.block(k, min(j, sizes.stored - 1), part) for k in range(sizes.heads)]
        _demand_shape(found, names, [shape])
        return torch.stack([found[name].to(dtype) for name in names])

    state = {f"weights.{j}": stacked(j, "weight", [width, width]) for j in range(sizes.layers)}
    state |= {f"biases.{j}": stacked(j, "bias", [width]) for j in range(sizes.layers)}
    vocab_size = _option(config, "vocab_size")
    if sizes.lm_heads:
        names = [layout.lm_head(k) for k in range(sizes.lm_heads)]
        vocab_size = vocab_size or (None if token_map is not None else len(found[names[0]]))
        rows = [vocab_size] if token_map is None else [len(token_map), vocab_size or len(token_map)]
        _demand_shape(found, names, [[n, width] for n in rows if n])
        lm_heads = [found[name].to(dtype) for name in names]
        if token_map is not None:
            state[MAP] = token_map
            lm_heads = [x if len(x) == len(token_map) else x[token_map] for x in lm_heads]
        state["lm_heads"] = torch.stack(lm_heads)
    ours = MedusaConfig(
        heads=sizes.heads,
        layers=sizes.layers,
        own_lm_heads=sizes.lm_heads > 0,
        shared_lm_head=bool(config.get("original_lm_head")),
        own_ids=MAP in state,
    )
    return Converted(ours, state, token_map, width, vocab_size, _notes(layout, sizes, state))


def _dtype(found: Mapping[str, Tensor]) -> torch.dtype:
    """The smallest that holds all weights as they are."""
    packed = sorted(name for name, tensor in found.items() if tensor.dtype not in PLAIN)
    if packed:
        raise BadInput(
            f"{_listed(packed)} of the Medusa head are {found[packed[0]].dtype}; expected plain floating-point ones. "
            "Undo the quantisation first."
        )
    return reduce(torch.promote_types, {tensor.dtype for tensor in found.values()})


def _token_map(config: Mapping[str, Any], found: Mapping[str, Tensor]) -> Tensor | None:
    """Absolute ids `[U]`; raises BadInput unless config.json and the tensors agree that there are some."""
    size, kept = _option(config, "vocab_size"), _option(config, "truncated_vocab_size")
    wanted = kept if kept != size else None
    ids_U = found.get(MAP)
    seen = None if ids_U is None else list(ids_U.shape)
    if seen != (None if wanted is None else [wanted]):
        raise BadInput(
            f"truncated_vocab_size is {kept}, vocab_size {size}, and token_map "
            f"{'is not there' if seen is None else f'has shape {seen}'}; expected one id for each truncated token, and "
            "no token_map without truncation."
        )
    if ids_U is None:
        return None
    if size is None:
        raise BadInput("token_map holds target ids, but config.json lacks vocab_size: how many ids the target has.")
    outside = ids_U.is_floating_point() or not bool(((ids_U >= 0) & (ids_U < size)).all())
    if outside:
        raise BadInput(f"token_map holds {ids_U.dtype} values outside 0..{size - 1}; expected absolute target ids.")
    return ids_U.long()


def _demand_shape(found: Mapping[str, Tensor], names: Sequence[str], shapes: Sequence[list[int]]) -> None:
    for name in names:
        if list(found[name].shape) not in shapes:
            expected = " or ".join(map(str, shapes))
            raise BadInput(f"{name} of the Medusa head has shape {list(found[name].shape)}; expected {expected}.")


def _notes(layout: _Layout, sizes: _Sizes, state: Mapping[str, Tensor]) -> list[str]:
    notes = [f"read from the {layout.name} layout"]
    if not sizes.lm_heads:
        notes.append("no LM heads of its own: it borrows the target's")
    if not sizes.bias:
        notes.append("no biases are stored: they are zero")
    if sizes.layers > 1 and all(torch.equal(state["weights.0"], state[f"weights.{j}"]) for j in range(sizes.layers)):
        notes.append(f"the {sizes.layers} layers of a head are equal: the reference code repeats one layer")
    return notes


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more if names else "none"
