"""What stands in a head's directory, and what both saving and loading ask of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt
from torch import Tensor

from headstart.errors import BadInput, FetchError
from headstart.heads.base import Head
from headstart.tree import from_paths
from headstart.vocab.base import DraftVocab
from headstart.vocab.trimmed import Trimmed

FORMAT: Final = 1
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKEN_MAP = "token_map"  # absolute target ids by draft index, int64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
PICKLES = {".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle"}
SHOWN = 12  # names or faults in a message

Paths = tuple[tuple[int, ...], ...]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class VocabularyRecord(_Strict):
    """Of the target; null where a head published elsewhere does not say."""

    size: PositiveInt | None
    digest: str | None


class TargetRecord(_Strict):
    """The target that a head was trained for; `fingerprint` covers weights, their dtype, tokenizer and template."""

    name: str
    vocabulary: VocabularyRecord
    fingerprint: str | None


class TrimmedRecord(_Strict):
    """A draft vocabulary; its ids are the tensor `token_map`."""

    size: PositiveInt
    target_size: PositiveInt
    digest: str


class PolicyRecord(_Strict):
    """Paths of ranks in growth order."""

    paths: Paths


class Record(_Strict):
    """config.json. `head` are the fields of the family's config, `card` is provenance as it was given."""

    format: Literal[1]
    family: str
    head: dict[str, Any]
    width: PositiveInt
    target: TargetRecord
    vocab: TrimmedRecord | None
    policy: PolicyRecord
    dtype: Literal["float32", "bfloat16", "float16", "float64"]
    card: dict[str, Any]


class Loaded(NamedTuple):
    """A head on the CPU in the type it was stored in, what it can draft, its tree in growth order, its record."""

    head: Head
    vocab: DraftVocab
    paths: Paths
    record: Record


@dataclass(frozen=True)
class DraftSize:
    """A part of the saved tree: `nodes` of it (the root counts), none deeper than `depth`."""

    nodes: int | None = None
    depth: int | None = None

    def cut(self, paths: Sequence[Sequence[int]]) -> Paths:
        """The best such part. Raises BadInput if the tree is smaller than that: it cannot be grown here."""
        held = (len(paths) + 1, max(map(len, paths)))
        for name, asked, least, most in zip(("nodes", "depth"), (self.nodes, self.depth), (2, 1), held, strict=True):
            if asked is not None and not least <= asked <= most:
                raise BadInput(
                    f"{self}: the saved tree has {held[0]} nodes and depth {held[1]}, so {name} can be {least} to "
                    f"{most}. For another tree pass policy=StaticTree(...)."
                )
        shallow = [tuple(path) for path in paths if self.depth is None or len(path) <= self.depth]
        return tuple(shallow if self.nodes is None else shallow[: self.nodes - 1])


def trimmed_record(vocab: Trimmed | None) -> TrimmedRecord | None:
    """What config.json says of a draft vocabulary."""
    if vocab is None:
        return None
    return TrimmedRecord(size=vocab.size, target_size=vocab.target_size, digest=vocab.digest)


def in_order(paths: Iterable[Sequence[int]]) -> Paths:
    """Raises BadInput unless the paths make a tree and no path stands before its parent."""
    out = tuple(tuple(path) for path in paths)
    if not out:
        raise BadInput("A head is saved with its tree, but there is no path; [(0,)] is the smallest tree.")
    from_paths(out)
    place = {path: i for i, path in enumerate(out)}
    early = [path for path in out if len(path) > 1 and place[path[:-1]] > place[path]]
    if early:
        raise BadInput(
            f"Tree path {list(early[0])} stands before its parent; expected growth order (best first), so that "
            "every beginning of the list is a tree."
        )
    return out


def dtype_name(tensors: Mapping[str, Tensor]) -> Any:
    """The one type of all weights; raises BadInput if there are several."""
    dtypes = {t.dtype for t in tensors.values() if t.is_floating_point()}
    names = [name for name, dtype in DTYPES.items() if dtype in dtypes]
    if len(dtypes) != 1 or not names:
        raise BadInput(f"The weights are {sorted(map(str, dtypes))}; expected one of {', '.join(DTYPES)} for all.")
    return names[0]


def demand_finite(tensors: Mapping[str, Tensor], what: str) -> None:
    """Raises BadInput for NaN or infinity."""
    bad = [name for name, t in tensors.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())]
    if bad:
        raise BadInput(
            f"{what} has NaN or infinite values in {in_a_row(bad)}; it would draft nonsense. Use an earlier checkpoint."
        )


def json_object(file: Path) -> dict[str, Any]:
    """Raises FetchError if the file is none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FetchError(f"{file} cannot be read as JSON: {error}. Save or copy it again.") from error
    if not isinstance(value, dict):
        raise FetchError(f"{file} holds a {type(value).__name__}; expected a JSON object. Save or copy it again.")
    return value


def mismatches(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """Names, shapes and types that differ, one a line."""
    faults = [f"missing: {name}" for name in sorted(wanted.keys() - tensors.keys())]
    faults += [f"unexpected: {name}" for name in sorted(tensors.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & tensors.keys()):
        seen, due = ((list(t.shape), str(t.dtype)) for t in (tensors[name], wanted[name]))
        if seen != due:
            faults.append(f"{name}: {seen[0]} {seen[1]}, expected {due[0]} {due[1]}")
    return faults


def in_a_row(names: Sequence[str]) -> str:
    """Names with commas, a long list cut."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
