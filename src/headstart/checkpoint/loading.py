"""From a directory to a head, and to a drafter for a target that it fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headstart.catalogue import published
from headstart.checkpoint.reading import read
from headstart.checkpoint.record import (
    CONFIG,
    DraftSize,
    Loaded,
    Record,
    VocabularyRecord,
    demand_finite,
    json_object,
)
from headstart.checkpoint.shipped import DEFAULT, default
from headstart.drafting import HeadDrafter
from headstart.errors import BadInput
from headstart.policies.base import Policy
from headstart.policies.chain import Chain
from headstart.policies.static import StaticTree
from headstart.targets.base import Target, Vocabulary
from headstart.train.fingerprint import fingerprint
from headstart.verify.base import Verifier
from headstart.vocab.base import DraftVocab
from headstart.vocab.full import Full


def load(path: Path | str, *, size: int | None = None) -> Loaded:
    """Read a head's directory, ours or a published one; `size` V is needed only if a published one does not tell it.

    Raises FetchError for files that are missing or damaged, BadInput for contents that are not a head's: weights that
    are missing, left over, misshapen or not finite, unknown families and fields, pickles.
    """
    path = Path(path)
    head, trimmed, record = read(path)
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
    """The saved head as a drafter for `target`, on its device and in its dtype; "default" is the one that comes with
    headstart for it.

    The saved tree is used; `draft` cuts it, `policy` replaces it. `verify` is the verifier of calls that name none.
    Raises BadInput for a target of other width or vocabulary; `same_weights` refuses other weights (or another dtype)
    as well, at the price of hashing them.
    """
    if policy is not None and draft is not None:
        raise BadInput("policy= replaces the saved tree and draft= cuts it; give one of them.")
    if path == DEFAULT:
        path = default(target)
    found = load(path, size=target.vocabulary.size)
    _demand_fits(found.record, target, same_weights)
    head = found.head.to(target.device, target.can.dtype)
    demand_finite(head.state_dict(), f"{path} in the target's {target.can.dtype}")
    policy = policy or as_policy((draft or DraftSize()).cut(found.paths))
    return HeadDrafter(head, target, policy, found.vocab, verifier=verify)


def is_head(path: Path | str) -> bool:
    """Is this a head's directory, ours or a published one, rather than a whole model's?"""
    config = Path(path) / CONFIG
    if not config.is_file():
        return False
    found = json_object(config)
    return "format" in found or published(found) is not None


def inspect(path: Path | str) -> dict[str, Any]:
    """What stands in a head's directory, checked as `load` does, but without a target. `bytes`: of the weights."""
    head, _, record = read(Path(path))
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
