"""Files that survive a kill at any moment: each is written beside its place and moved there whole."""

from __future__ import annotations

import errno
import glob
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from headstart.errors import BadInput

FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to; it takes the place of `path` when the block ends well, and is removed when it does not.

    Each writer has a draft of its own: processes that share a directory may write the same file at once. What a kill
    left is swept away when the file is finished. Raises BadInput if the disk is full or a file is in the way.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield draft
        _settle(draft, path)
    except (OSError, SafetensorError) as error:
        # safetensors has an error of its own, which is no OSError and names the number in its text only
        if getattr(error, "errno", None) in FULL or any(f"(os error {number})" in str(error) for number in FULL):
            raise BadInput(
                f"The disk is full: {path} could not be written. What was finished before is safe; make room and "
                "run the same command again, it goes on from there."
            ) from error
        if isinstance(error, FileExistsError | NotADirectoryError) and not path.parent.is_dir():
            raise BadInput(f"{path.parent} cannot be made a directory: a file is in the way. Name another.") from error
        raise
    finally:
        if path.parent.is_dir():
            draft.unlink(missing_ok=True)


def _settle(draft: Path, path: Path) -> None:
    try:
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(draft, path)
    except FileNotFoundError:  # swept away by another process that finished the same file
        if not path.exists():
            raise
    for left in path.parent.glob(f".{glob.escape(path.name)}.{8 * '[0-9a-f]'}"):
        left.unlink(missing_ok=True)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file. The library's own writer leaves a file of another name behind when it is killed."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with whole(path) as draft:
        draft.write_bytes(save(contiguous, None if metadata is None else dict(metadata)))


def write_json(path: Path, value: Any) -> None:
    """One JSON document."""
    with whole(path) as draft:
        draft.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_jsonl(path: Path, rows: Iterable[Any]) -> None:
    """One JSON document a line."""
    with whole(path) as draft, draft.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows)


def read_jsonl(path: Path) -> list[Any]:
    """The rows of a file that `write_jsonl` wrote. Raises BadInput for one that was torn or changed later."""
    try:
        *lines, rest = path.read_bytes().split(b"\n")
        if rest:
            raise ValueError("its last line is torn")
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise BadInput(
            f"{path} is damaged: {error}. Run the command that made it again, it makes this file anew."
        ) from error


def same_or_refuse(path: Path, config: dict[str, Any], what: str) -> None:
    """Keep `config` beside the work it shaped; raises BadInput, with the differences, if other work stands there."""
    now = json.loads(json.dumps(config))
    if not path.exists():
        write_json(path, now)
    before, now = _flat(json.loads(path.read_text(encoding="utf-8"))), _flat(now)
    changed = [
        f"  {key}: was {before.get(key)!r}, now {now.get(key)!r}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]
    if changed:
        raise BadInput(
            f"{path.parent} holds {what} made with other settings:\n" + "\n".join(changed) + "\n"
            "Use the same settings to go on, or another directory to start anew."
        )


def _flat(config: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Keys within keys joined by dots, so that a difference is shown alone."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        out |= _flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return out
