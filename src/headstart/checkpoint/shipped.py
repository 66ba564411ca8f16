"""Heads that come with the package, each for one target: `load_head("default", target)`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from headstart.checkpoint.record import CONFIG, Record
from headstart.errors import BadInput
from headstart.targets.base import Target

DEFAULT = "default"
FOLDER = Path(__file__).parent.parent / "data" / "heads"


def shipped(target: Target) -> Path | None:
    """The head for targets of this width and vocabulary, if there is one. Weights are not compared: with others of the
    same shape, a fine-tune for example, it stays exact and guesses less often right."""
    for path, record in _all():
        known = record.target.vocabulary
        if (record.width, known.size, known.digest) == (
            target.width,
            target.vocabulary.size,
            target.vocabulary.digest,
        ):
            return path
    return None


def default(target: Target) -> Path:
    """The same, or BadInput with what there is."""
    found = shipped(target)
    if found is None:
        names = ", ".join(record.target.name for _, record in _all())
        raise BadInput(
            f"No head comes with headstart for this target (width {target.width}, vocabulary "
            f"{target.vocabulary.digest}); there is one for {names or 'none'}. Train one: headstart distill, then "
            "headstart train."
        )
    return found


def _all() -> Iterator[tuple[Path, Record]]:
    for config in sorted(FOLDER.glob(f"*/{CONFIG}")):
        yield config.parent, Record.model_validate_json(config.read_bytes())
