"""What all commands share: errors as one line, Ctrl-C, progress bars, loading a target."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from headstart.drafters.base import Drafter
    from headstart.evaluate.run import Trees
    from headstart.targets.base import Target
    from headstart.targets.hf import HFTarget

SAVED = "saved"  # the tree of a head as it stands
AUTO = "auto"  # the drafter of commands that are given none
LOG_SECONDS = 15.0  # between two lines of progress in a log
INTERRUPTED = 130  # the shell's code for Ctrl-C

TargetArg = Annotated[str, typer.Argument(help="Directory, hub id, GGUF file or alias (smollm2-135m).")]
Dtype = Annotated[str, typer.Option(help="auto, fp32, bf16 or fp16. Greedy identity is exact in fp32.")]


@contextmanager
def interruptible(what: str = "interrupted") -> Iterator[None]:
    """Ctrl-C ends a command with one line: nothing half-written is left, and what was printed stays."""
    try:
        yield
    except KeyboardInterrupt:
        Console(stderr=True).print(f"\n{what}", style="yellow")
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def progress() -> Iterator[Any]:
    """A reporter `(message, fraction)` drawn as a bar on standard error; nothing is drawn if nothing is reported.

    Where standard error is no terminal (a log), it writes a line now and then instead."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True)
    task: Any = None
    written = time.monotonic()

    def report(message: str, fraction: float | None) -> None:
        nonlocal task, written
        if not console.is_terminal:
            if time.monotonic() - written > LOG_SECONDS:
                written = time.monotonic()
                share = "" if fraction is None else f"{fraction:4.0%}  "
                console.print(f"{share}{message}", highlight=False, soft_wrap=True)
            return
        if task is None:
            bar.start()
            task = bar.add_task(message, total=None)
        bar.update(task, description=message, completed=fraction or 0, total=None if fraction is None else 1.0)

    try:
        yield report
    finally:
        if task is not None:
            bar.stop()


def load(target: str, dtype: str) -> HFTarget:
    """The target, with a bar while it is fetched or converted."""
    with progress() as report:
        from headstart.targets.load import load_target

        return load_target(target, dtype=dtype, progress=report)


def drafter_for(name: str, target: HFTarget, dtype: str, nodes: str = SAVED) -> Drafter | None:
    """`none`, `lookup`, `default` (the head that comes with headstart for this target), `auto` (that, or lookup where
    there is none), or a directory of a head or of a small causal LM; the target refuses one that does not fit. `nodes`:
    the head's saved tree, or the best so many nodes of it."""
    from headstart.checkpoint import is_head, load_head
    from headstart.checkpoint.shipped import DEFAULT, shipped
    from headstart.drafters.draft_model import DraftModel
    from headstart.drafters.lookup import PromptLookup
    from headstart.errors import BadInput

    if nodes != SAVED:
        return resized(name, target).make(_whole_number(nodes, "--nodes"))
    if name == "none":
        return None
    if name == AUTO:
        name = DEFAULT if shipped(target) is not None else "lookup"
    if name == "lookup":
        return PromptLookup()
    if name == DEFAULT:
        own: Drafter = load_head(DEFAULT, target)
        return own
    if not Path(name).is_dir():
        raise BadInput(
            f"--drafter {name!r} is not a directory; expected auto, default, lookup, none, or the directory of a head "
            "or draft model."
        )
    if is_head(name):
        head: Drafter = load_head(name, target)
        return head
    drafter = DraftModel(load(name, dtype))
    drafter.check(target)
    return drafter


def resized(drafter: str, target: Target) -> Trees:
    """The head with smaller trees. Raises BadInput for a drafter that has no tree of its own."""
    from headstart.checkpoint import DraftSize, inspect, is_head, load_head
    from headstart.checkpoint.shipped import DEFAULT, default
    from headstart.errors import BadInput
    from headstart.evaluate.run import Trees

    path = default(target) if drafter == DEFAULT else Path(drafter)
    if not is_head(path):
        raise BadInput(f"{drafter} has no saved tree to cut; --nodes is for heads.")
    return Trees(lambda n: load_head(path, target, draft=DraftSize(nodes=n)), inspect(path)["tree"]["nodes"])


def _whole_number(text: str, option: str) -> int:
    """Raises BadInput for what is no number."""
    from headstart.errors import BadInput

    if not text.isdigit():
        raise BadInput(f"{option} {text!r}: expected saved, best where it is offered, or a number (the root counts).")
    return int(text)
