"""Writing a head's directory: config.json last, so a directory that has one is complete."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as as_bytes
from torch import Tensor

from headstart.catalogue import family
from headstart.checkpoint.record import (
    CONFIG,
    DTYPES,
    FORMAT,
    TOKEN_MAP,
    WEIGHTS,
    PolicyRecord,
    Record,
    TargetRecord,
    VocabularyRecord,
    demand_finite,
    dtype_name,
    in_order,
    json_object,
    mismatches,
    trimmed_record,
)
from headstart.errors import BadInput
from headstart.heads.base import Head
from headstart.targets.base import Target
from headstart.train.files import whole, write_json
from headstart.train.fingerprint import fingerprint
from headstart.vocab.base import DraftVocab
from headstart.vocab.trimmed import Trimmed


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
    dtype = dtype_name(tensors)
    with torch.device("meta"):
        again = known.head(head.config, head.width, vocab.size).to(DTYPES[dtype])
    _demand_rebuilt(tensors, again.state_dict(), vocab, trimmed)
    demand_finite(tensors, "The head")
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
        vocab=trimmed_record(trimmed),
        policy=PolicyRecord(paths=in_order(paths)),
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


def _demand_place(path: Path) -> None:
    config = path / CONFIG
    if path.exists() and not path.is_dir():
        raise BadInput(f"{path} is a file; a head is saved as a directory. Choose another name.")
    if config.exists() and "format" not in json_object(config):
        raise BadInput(
            f"{path} holds another model ({CONFIG} is not ours), which would be overwritten. Choose another."
        )


def _demand_rebuilt(
    tensors: Mapping[str, Tensor], again: Mapping[str, Tensor], vocab: DraftVocab, trimmed: Trimmed | None
) -> None:
    """What loading would build must have the same tensors, and own rows the ids of the vocabulary."""
    if faults := mismatches(tensors, again):
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


def _json(card: Mapping[str, Any]) -> dict[str, Any]:
    try:
        out: dict[str, Any] = json.loads(json.dumps(dict(card), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise BadInput(
            f"The card cannot be written as JSON: {error}. Use numbers, strings, lists and dicts."
        ) from error
    return out


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
