"""A draft head as a directory: `config.json` and `model.safetensors` are all of it, and no pickle is ever opened.

config.json is written last, so a directory that has one is complete. The tree's paths stand in growth order, best
first: the first n - 1 are the best tree of n nodes, so a smaller tree is a prefix. Heads that others published are read
from their own layouts (see `catalogue.PUBLISHED`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as as_bytes
from torch import Tensor

from headstart.catalogue import Published, family, published
from headstart.drafting import HeadDrafter
from headstart.errors import BadInput, FetchError
from headstart.heads.base import Head
from headstart.policies.base import Policy
from headstart.policies.chain import Chain
from headstart.policies.static import StaticTree
from headstart.targets.base import Target, Vocabulary
from headstart.train.files import whole, write_json
from headstart.train.fingerprint import fingerprint
from headstart.tree import from_paths
from headstart.verify.base import Verifier
from headstart.vocab.base import DraftVocab
from headstart.vocab.full import Full
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


def save(
    path: Path | str,
    head: Head,
    family_name: str,
    *,
    target: Target,
    target_name: str,
    vocab: DraftVocab,
    paths: Sequence[Sequence[int]],
    card: Mapping[str, Any],
) -> None:
    """Write the head's directory, over an older head if one is there.

    Raises BadInput for weights that are not finite, parts that do not fit together, a card that is no JSON, and a
    directory that holds something else.
    """
    path = Path(path)
    _demand_place(path)
    known = family(family_name)
    if type(head) is not known.head:
        raise BadInput(f"A {type(head).__name__} was to be saved as family {family_name!r}: {known.head.__name__}.")
    trimmed = _trimmed(vocab, target)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    dtype = _dtype_name(tensors)
    with torch.device("meta"):
        again = known.head(head.config, head.width, vocab.size).to(DTYPES[dtype])
    _demand_rebuilt(tensors, again.state_dict(), vocab, trimmed)
    _demand_finite(tensors, "The head")
    record = Record(
        format=FORMAT,
        family=family_name,
        head=asdict(head.config),
        width=head.width,
        target=TargetRecord(
            name=target_name,
            vocabulary=VocabularyRecord(size=target.vocabulary.size, digest=target.vocabulary.digest),
            fingerprint=fingerprint(target),
        ),
        vocab=_trimmed_record(trimmed),
        policy=PolicyRecord(paths=_in_order(paths)),
        dtype=dtype,
        card=_json(card),
    )
    if trimmed is not None:
        tensors[TOKEN_MAP] = trimmed.token_map
    with whole(path / WEIGHTS) as draft:
        draft.write_bytes(as_bytes(tensors, {"format": "pt"}))
        (path / CONFIG).unlink(missing_ok=True)  # an older head's config must not stand beside these weights
    with whole(path / "README.md") as draft:
        draft.write_text(_model_card(record), encoding="utf-8")
    write_json(path / CONFIG, record.model_dump(mode="json"))


def load(path: Path | str, *, size: int | None = None) -> Loaded:
    """Read a head's directory, ours or a published one; `size` V is needed only if a published one does not tell it.

    Raises FetchError for files that are missing or damaged, BadInput for contents that are not a head's: weights that
    are missing, left over, misshapen or not finite, unknown families and fields, pickles.
    """
    path = Path(path)
    head, trimmed, record = _read(path)
    size = record.target.vocabulary.size or size
    if trimmed is None and size is None:
        raise BadInput(f"{path} does not say how many ids its target has; use load_head, or pass size=...")
    vocab: DraftVocab = Full(size or 0) if trimmed is None else trimmed
    return Loaded(head, vocab, record.policy.paths, record)


def load_head(
    path: Path | str,
    target: Target,
    *,
    policy: Policy | None = None,
    verify: Verifier | None = None,
    draft: DraftSize | None = None,
    same_weights: bool = False,
) -> HeadDrafter:
    """The saved head as a drafter for `target`, on its device and in its dtype.

    The saved tree is used; `draft` cuts it, `policy` replaces it. `verify` is the verifier of calls that name none.
    Raises BadInput for a target of other width or vocabulary; `same_weights` refuses other weights (or another dtype)
    as well, at the price of hashing them.
    """
    if policy is not None and draft is not None:
        raise BadInput("policy= replaces the saved tree and draft= cuts it; give one of them.")
    found = load(path, size=target.vocabulary.size)
    _demand_fits(found.record, target, same_weights)
    head = found.head.to(target.device, target.can.dtype)
    _demand_finite(head.state_dict(), f"{path} in the target's {target.can.dtype}")
    policy = policy or as_policy((draft or DraftSize()).cut(found.paths))
    return HeadDrafter(head, target, policy, found.vocab, verifier=verify)


def is_head(path: Path | str) -> bool:
    """Is this a head's directory, ours or a published one, rather than a whole model's?"""
    config = Path(path) / CONFIG
    if not config.is_file():
        return False
    found = _json_object(config)
    return "format" in found or published(found) is not None


def inspect(path: Path | str) -> dict[str, Any]:
    """What stands in a head's directory, checked as `load` does, but without a target. `bytes`: of the weights."""
    head, _, record = _read(Path(path))
    tensors = list(head.state_dict().values())
    depths = Counter(map(len, record.policy.paths))
    return {
        "family": record.family,
        "config": record.head,
        "parameters": sum(p.numel() for p in head.parameters()),
        "bytes": sum(t.numel() * t.element_size() for t in tensors),
        "dtype": record.dtype,
        "width": record.width,
        "target": record.target.model_dump(),
        "vocabulary": None if record.vocab is None else record.vocab.model_dump(),
        "tree": {
            "nodes": len(record.policy.paths) + 1,
            "depth": max(depths),
            "nodes_per_depth": [depths[d] for d in range(1, max(depths) + 1)],
        },
        "card": record.card,
    }


def as_policy(paths: Sequence[Sequence[int]]) -> Policy:
    """A chain where the paths are one: some verifiers and targets take nothing else."""
    if all(not any(path) for path in paths):
        return Chain(depth=len(paths))
    return StaticTree(paths=paths)


# --- the parts of saving -----------------------------------------------------------------------------------


def _demand_place(path: Path) -> None:
    config = path / CONFIG
    if path.exists() and not path.is_dir():
        raise BadInput(f"{path} is a file; a head is saved as a directory. Choose another name.")
    if config.exists() and "format" not in _json_object(config):
        raise BadInput(
            f"{path} holds another model ({CONFIG} is not ours), which would be overwritten. Choose another."
        )


def _demand_rebuilt(
    tensors: Mapping[str, Tensor], again: Mapping[str, Tensor], vocab: DraftVocab, trimmed: Trimmed | None
) -> None:
    """What loading would build must have the same tensors, and own rows the ids of the vocabulary."""
    if faults := _mismatches(tensors, again):
        raise BadInput(
            f"The head was not built for this draft vocabulary of {vocab.size} ids; save it with its own.\n  "
            + "\n  ".join(faults)
        )
    if TOKEN_MAP in tensors and (trimmed is None or not torch.equal(tensors[TOKEN_MAP], trimmed.token_map)):
        raise BadInput(
            f"The head's own rows are those of other ids ({TOKEN_MAP}) than the draft vocabulary's; save it with "
            "the vocabulary that it was built for."
        )


def _trimmed(vocab: DraftVocab, target: Target) -> Trimmed | None:
    size = target.vocabulary.size
    if vocab.ids_U is not None:
        return Trimmed.from_token_map(vocab.ids_U, size)
    if vocab.size != size:
        raise BadInput(f"The draft vocabulary is for {vocab.size} target ids, but the target has {size}.")
    return None


def _trimmed_record(vocab: Trimmed | None) -> TrimmedRecord | None:
    if vocab is None:
        return None
    return TrimmedRecord(size=vocab.size, target_size=vocab.target_size, digest=vocab.digest)


def _in_order(paths: Iterable[Sequence[int]]) -> Paths:
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


def _json(card: Mapping[str, Any]) -> dict[str, Any]:
    try:
        out: dict[str, Any] = json.loads(json.dumps(dict(card), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise BadInput(
            f"The card cannot be written as JSON: {error}. Use numbers, strings, lists and dicts."
        ) from error
    return out


def _dtype_name(tensors: Mapping[str, Tensor]) -> Any:
    dtypes = {t.dtype for t in tensors.values() if t.is_floating_point()}
    names = [name for name, dtype in DTYPES.items() if dtype in dtypes]
    if len(dtypes) != 1 or not names:
        raise BadInput(f"The weights are {sorted(map(str, dtypes))}; expected one of {', '.join(DTYPES)} for all.")
    return names[0]


def _demand_finite(tensors: Mapping[str, Tensor], what: str) -> None:
    bad = [name for name, t in tensors.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())]
    if bad:
        raise BadInput(
            f"{what} has NaN or infinite values in {_listed(bad)}; it would draft nonsense. Use an earlier checkpoint."
        )


def _model_card(record: Record) -> str:
    """README.md for whoever finds the directory."""
    target, depth = record.target, max(map(len, record.policy.paths))
    vocab = "all of them" if record.vocab is None else str(record.vocab.size)
    settings = ", ".join(f"{name} {value}" for name, value in record.head.items())
    facts: dict[str, Any] = {
        "head": f"{record.family} ({settings}), {record.dtype}",
        "target": f"{target.name}, width {record.width}, weights {target.fingerprint}",
        "target ids": f"{target.vocabulary.size} (digest {target.vocabulary.digest}), can be drafted: {vocab}",
        "tree": f"{len(record.policy.paths) + 1} nodes, {depth} deep",
        **{k: v for k, v in record.card.items() if k != "licence" and isinstance(v, str | int | float)},
    }
    rows = "\n".join(f"| {_cell(name)} | {_cell(value)} |" for name, value in facts.items())
    return f"""# Draft head for {target.name}

Guesses up to {depth} tokens ahead of {target.name}, which checks every guess. It fits no other target.

```python
import headstart

target = headstart.load_target({target.name!r})
drafter = headstart.load_head("this directory", target)
print(headstart.generate(target, "Once upon a time", drafter=drafter).text)
```

| | |
|---|---|
{rows}

Licence: {record.card.get("licence", "not stated")}.

Where it comes from in full: `card` in {CONFIG}.
"""


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


# --- the parts of loading ----------------------------------------------------------------------------------


class _Read(NamedTuple):
    head: Head
    trimmed: Trimmed | None
    record: Record


def _read(path: Path) -> _Read:
    _demand_files(path)
    raw = _json_object(path / CONFIG)
    if "format" in raw:
        return _own(path, raw)
    layout = published(raw)
    if layout is None:
        raise BadInput(
            f"{path / CONFIG} is not that of a draft head: it has no `format` and belongs to no published layout that "
            f"is known. Its fields are {_listed(sorted(raw))}. Pass a directory that headstart saved."
        )
    return _foreign(path, raw, layout)


def _demand_files(path: Path) -> None:
    if not path.is_dir():
        raise FetchError(f"{path} is not a directory; expected one with {CONFIG} and {WEIGHTS}. Check the name.")
    names = sorted(file.name for file in path.iterdir())
    if not any(name.endswith(".safetensors") for name in names):
        pickles = [name for name in names if Path(name).suffix in PICKLES]
        if pickles:
            raise BadInput(
                f"{path} holds weights as {_listed(pickles)} only. Opening a pickle can run any program, so one is "
                f"never loaded. Convert it where you trust it: safetensors.torch.save_file(torch.load({pickles[0]!r}, "
                f"weights_only=True), {WEIGHTS!r})."
            )
        raise FetchError(f"{path} has no {WEIGHTS}; it holds {_listed(names)}. Copy or train the head again.")
    if CONFIG not in names:
        raise FetchError(
            f"{path} has weights but no {CONFIG}, which is written last: saving or copying was interrupted. Save or "
            "copy the head again."
        )


def _own(path: Path, raw: Mapping[str, Any]) -> _Read:
    if raw["format"] != FORMAT:
        raise BadInput(f"{path} is of format {raw['format']!r}; this headstart reads format {FORMAT}. Update it.")
    record = _validated(TypeAdapter(Record), raw, path / CONFIG)
    _in_order(record.policy.paths)
    known = family(record.family)
    config = _head_config(known.config, record.head, path / CONFIG)
    size = record.target.vocabulary.size if record.vocab is None else record.vocab.size
    head = known.head(config, record.width, size or 0)
    tensors = _weights(path)
    extra = {} if record.vocab is None else {TOKEN_MAP: torch.empty(record.vocab.size, dtype=torch.long)}
    _fill(head.to(DTYPES[record.dtype]), tensors, extra, path)
    if record.vocab is None:
        return _Read(head, None, record)
    trimmed = Trimmed.from_token_map(tensors[TOKEN_MAP], record.vocab.target_size)
    if _trimmed_record(trimmed) != record.vocab or trimmed.target_size != record.target.vocabulary.size:
        raise BadInput(
            f"{path}: {TOKEN_MAP} makes {trimmed}, but {CONFIG} says {record.vocab.size} of {record.vocab.target_size} "
            f"ids, digest {record.vocab.digest}, for a target of {record.target.vocabulary.size}. Take both files from "
            "one save."
        )
    return _Read(head, trimmed, record)


def _foreign(path: Path, raw: Mapping[str, Any], layout: Published) -> _Read:
    """A published head, with a chain of all it can guess as its tree."""
    tensors = _weights(path, any_name=True)
    try:
        found = layout.convert(raw, tensors)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error
    trimmed = None if found.token_map is None else Trimmed.from_token_map(found.token_map, found.vocab_size or 0)
    dtype = _dtype_name(found.state)
    head = family(layout.family).head(found.config, found.width, trimmed.size if trimmed else found.vocab_size or 0)
    _fill(head.to(DTYPES[dtype]), found.state, {}, path)
    record = Record(
        format=FORMAT,
        family=layout.family,
        head=asdict(found.config),
        width=found.width,
        target=TargetRecord(
            name=str(raw.get("base_model_name_or_path", "not stated")),
            vocabulary=VocabularyRecord(size=found.vocab_size, digest=None),
            fingerprint=None,
        ),
        vocab=_trimmed_record(trimmed),
        policy=PolicyRecord(paths=tuple((0,) * d for d in range(1, head.horizon(0, None) + 1))),
        dtype=dtype,
        card={"notes": found.notes},
    )
    return _Read(head, trimmed, record)


def _json_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FetchError(f"{file} cannot be read as JSON: {error}. Save or copy it again.") from error
    if not isinstance(value, dict):
        raise FetchError(f"{file} holds a {type(value).__name__}; expected a JSON object. Save or copy it again.")
    return value


Value = TypeVar("Value")


def _validated(adapter: TypeAdapter[Value], raw: Mapping[str, Any], where: Path) -> Value:
    try:
        return adapter.validate_json(json.dumps(raw), strict=True)
    except ValidationError as error:
        faults = [
            f"{'.'.join(map(str, e['loc'])) or 'it'}: {e['msg']}, seen {e['input']!r:.60}" for e in error.errors()
        ]
        raise BadInput(
            f"{where} is not the config of a head that this headstart knows:\n  " + "\n  ".join(faults[:SHOWN]) + "\n"
            "Use it as it was saved; if a newer headstart saved it, update."
        ) from error


def _head_config(kind: type[Any], values: Mapping[str, Any], where: Path) -> Any:
    unknown = sorted(values.keys() - {field.name for field in fields(kind)})
    if unknown:
        raise BadInput(
            f"{where}: {kind.__name__} has no field {_listed(unknown)}; its fields are "
            f"{', '.join(field.name for field in fields(kind))}. If a newer headstart saved the head, update."
        )
    return _validated(TypeAdapter(kind), values, where)


def _weights(path: Path, any_name: bool = False) -> dict[str, Tensor]:
    """All tensors: of one file, or of those that an index names. `any_name`: a single file may be called otherwise."""
    if (path / WEIGHTS).is_file():
        return _tensors(path / WEIGHTS)
    if (path / INDEX).is_file():
        return _sharded(path)
    files = sorted(path.glob("*.safetensors"))
    if any_name and len(files) == 1:
        return _tensors(files[0])
    raise FetchError(
        f"{path} has neither {WEIGHTS} nor {INDEX}, but {_listed([f.name for f in files])}. Copy or save it again."
    )


def _sharded(path: Path) -> dict[str, Tensor]:
    listed = _json_object(path / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise FetchError(f"{path / INDEX} has no weight_map from tensor to file name. Copy or save it again.")
    names = sorted(set(listed.values()))
    absent = [name for name in names if Path(name).name != name or not (path / name).is_file()]
    if absent:
        raise FetchError(f"{path / INDEX} names {_listed(absent)}, not there beside it. Copy the missing files.")
    tensors: dict[str, Tensor] = {}
    for name in names:
        part = _tensors(path / name)
        astray = sorted({t for t, file in listed.items() if file == name} ^ part.keys())
        if astray:
            raise BadInput(f"{path / name} and {INDEX} disagree on {_listed(astray)}. Take all files from one save.")
        tensors |= part
    return tensors


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (SafetensorError, OSError) as error:
        raise FetchError(f"{file} is damaged, cut short or unreadable ({error}). Copy or save it again.") from error
    return tensors


def _fill(head: Head, tensors: Mapping[str, Tensor], extra: Mapping[str, Tensor], path: Path) -> None:
    """Every weight is NaN until its tensor comes, so that one forgotten here cannot go unseen. `extra` tensors have to
    be there as well. Raises BadInput with all that does not match."""
    own = head.state_dict()
    wanted = {**own, **extra}
    faults = _mismatches(tensors, wanted)
    if faults:
        raise BadInput(
            f"The weights in {path} are not those that its {CONFIG} describes:\n  " + "\n  ".join(faults[:SHOWN]) + "\n"
            f"({len(faults)} in all.) Take both files from one save."
        )
    with torch.no_grad():
        for tensor in own.values():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
    _demand_finite(own, str(path))


def _mismatches(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """Names, shapes and types that differ, one a line."""
    faults = [f"missing: {name}" for name in sorted(wanted.keys() - tensors.keys())]
    faults += [f"unexpected: {name}" for name in sorted(tensors.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & tensors.keys()):
        seen, due = ((list(t.shape), str(t.dtype)) for t in (tensors[name], wanted[name]))
        if seen != due:
            faults.append(f"{name}: {seen[0]} {seen[1]}, expected {due[0]} {due[1]}")
    return faults


def _demand_fits(record: Record, target: Target, same_weights: bool) -> None:
    """Raises BadInput for a target that the head was not trained for, with both sides."""
    known = record.target.vocabulary
    here = target.vocabulary
    fits = record.width == target.width and known.size in (None, here.size) and known.digest in (None, here.digest)
    if fits and not same_weights:
        return
    weights = fingerprint(target)
    if fits and record.target.fingerprint == weights:
        return
    raise BadInput(
        "The head was trained for another target.\n"
        f"  head:        {_described(record.target.name, record.width, known, record.target.fingerprint)}\n"
        f"  this target: {_described(_name(target), target.width, here, weights)}\n"
        "Use the target it was trained for, or train a head for this one."
    )


def _name(target: Target) -> str:
    return str(getattr(target, "path", None) or type(target).__name__)


def _described(name: str, width: int, vocabulary: VocabularyRecord | Vocabulary, weights: str | None) -> str:
    size, digest = (x if x is not None else "not stated" for x in (vocabulary.size, vocabulary.digest))
    return f"{name}: width {width}, {size} ids with digest {digest}, weights {weights or 'not stated'}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
