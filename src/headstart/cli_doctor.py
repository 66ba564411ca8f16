"""`headstart doctor`: why does this head guess badly?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from headstart.cli_common import Dtype, TargetArg, interruptible, load, progress


def doctor(
    target: TargetArg,
    head: Annotated[Path, typer.Argument(help="Directory of a head, or default.")],
    prompts: Annotated[Path | None, typer.Option(help="File of prompts; the packaged held-out ones if none.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts at most.")] = 16,
    cache: Annotated[Path | None, typer.Option(help="For answers and features; default: the user cache.")] = None,
    dtype: Dtype = "auto",
) -> None:
    """Look for the usual faults of a target and a head: template, taps, norm, vocabulary map, parity of training and
    drafting. Exit code 0: none found, 1: found."""
    from headstart.checkpoint.shipped import DEFAULT, default
    from headstart.doctor import examine
    from headstart.targets.resolve import cache_dir
    from headstart.train.readers import evenly, packaged_chats, read

    chats = packaged_chats() if prompts is None else [c for c in read(prompts).chats if c.text is None]
    with interruptible():
        model = load(target, dtype)
        path = default(model) if str(head) == DEFAULT else head
        with progress() as report:
            found = examine(model, path, evenly(chats, count), cache or cache_dir() / "eval", report=report)
    table = Table(box=None, show_header=False)
    for finding in found.findings:
        table.add_row(f"[red]{finding.fault}[/]" if finding.fault else "[green]ok[/]", finding.check, finding.seen)
    console = Console()
    console.print(table)
    for finding in found.faults:
        console.print(f"[bold]{finding.fault}[/]: {finding.advice}", highlight=False)
    if found.by_depth:
        rates = " ".join(f"{rate:.1%}" for rate in found.by_depth)
        console.print(f"right at depth 1, 2, ... on the target's own answers: {rates}", highlight=False)
    raise typer.Exit(1 if found.faults else 0)


COMMANDS = (doctor,)
