"""Reading a head's directory, ours or a published one; everything is checked before it is used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from headstart.catalogue import Published, family, published
from headstart.checkpoint.record import (
    CONFIG,
    DTYPES,
    FORMAT,
    INDEX,
    PICKLES,
    SHOWN,
    TOKEN_MAP,
    WEIGHTS,
    PolicyRecord,
    Record,
    TargetRecord,
    VocabularyRecord,
    demand_finite,
    dtype_name,
    in_a_row,
    in_order,
    json_object,
    mismatches,
    trimmed_record,
)
from headstart.errors import BadInput, FetchError
from headstart.heads.base import Head
from headstart.vocab.trimmed import Trimmed


class _Read(NamedTuple):
    head: Head
    trimmed: Trimmed | None
    record: Record


def read(path: Path) -> _Read:
    """See `load`."""
    _demand_files(path)
    raw = json_object(path / CONFIG)
    if "format" in raw:
        return _own(path, raw)
    layout = published(raw)
    if layout is None:
        raise BadInput(
            f"{path / CONFIG} is not that of a draft head: it has no `format` and belongs to no published layout that "
            f"is known. Its fields are {in_a_row(sorted(raw))}. Pass a directory that headstart saved."
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
                f"{path} holds weights as {in_a_row(pickles)} only. Opening a pickle can run any program, so one is "
                f"never loaded. Convert it where you trust it: safetensors.torch.save_file(torch.load({pickles[0]!r}, "
                f"weights_only=True), {WEIGHTS!r})."
            )
        raise FetchError(f"{path} has no {WEIGHTS}; it holds {in_a_row(names)}. Copy or train the head again.")
    if CONFIG not in names:
        raise FetchError(
            f"{path} has weights but no {CONFIG}, which is written last: saving or copying was interrupted. Save or "
            "copy the head again."
        )


def _own(path: Path, raw: Mapping[str, Any]) -> _Read:
    if raw["format"] != FORMAT:
        raise BadInput(f"{path} is of format {raw['format']!r}; this headstart reads format {FORMAT}. Update it.")
    record = _validated(TypeAdapter(Record), raw, path / CONFIG)
    in_order(record.policy.paths)
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
    if trimmed_record(trimmed) != record.vocab or trimmed.target_size != record.target.vocabulary.size:
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
    dtype = dtype_name(found.state)
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
        vocab=trimmed_record(trimmed),
        policy=PolicyRecord(paths=tuple((0,) * d for d in range(1, head.horizon(0, None) + 1))),
        dtype=dtype,
        card={"notes": found.notes},
    )
    return _Read(head, trimmed, record)


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
            f"{where}: {kind.__name__} has no field {in_a_row(unknown)}; its fields are "
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
        f"{path} has neither {WEIGHTS} nor {INDEX}, but {in_a_row([f.name for f in files])}. Copy or save it again."
    )


def _sharded(path: Path) -> dict[str, Tensor]:
    listed = json_object(path / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise FetchError(f"{path / INDEX} has no weight_map from tensor to file name. Copy or save it again.")
    names = sorted(set(listed.values()))
    absent = [name for name in names if Path(name).name != name or not (path / name).is_file()]
    if absent:
        raise FetchError(f"{path / INDEX} names {in_a_row(absent)}, not there beside it. Copy the missing files.")
    tensors: dict[str, Tensor] = {}
    for name in names:
        part = _tensors(path / name)
        astray = sorted({t for t, file in listed.items() if file == name} ^ part.keys())
        if astray:
            raise BadInput(f"{path / name} and {INDEX} disagree on {in_a_row(astray)}. Take all files from one save.")
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
    faults = mismatches(tensors, wanted)
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
    demand_finite(own, str(path))
