"""Files that survive a kill at any moment: each is written beside its place and moved there whole."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headstart.errors import BadInput


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to; it takes the place of `path` when the block ends well, and is removed when it does not.

    Raises BadInput if the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.unfinished")  # one name: what a kill leaves is written over next time
    try:
        yield draft
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BadInput(
                f"The disk is full: {path} could not be written. What was finished before is safe; make room and "
                "run the same command again, it goes on from there."
            ) from error
        raise
    finally:
        draft.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """One JSON document."""
    with whole(path) as draft:
        draft.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_jsonl(path: Path, rows: Iterable[Any]) -> None:
    """One JSON document a line."""
    with whole(path) as draft, draft.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows)


def read_jsonl(path: Path) -> list[Any]:
    """The rows of a file that `write_jsonl` wrote."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def same_or_refuse(path: Path, config: dict[str, Any], what: str) -> None:
    """Keep `config` beside the work it shaped; raises BadInput, with the differences, if other work stands there."""
    now = json.loads(json.dumps(config))
    if not path.exists():
        write_json(path, now)
        return
    before = json.loads(path.read_text(encoding="utf-8"))
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
