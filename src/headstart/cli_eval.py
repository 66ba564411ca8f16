"""`headstart eval`: what a drafter gains, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown

from headstart.cli_common import SAVED, Dtype, TargetArg, drafter_for, interruptible, load, progress, resized

BEST = "best"
GAINS_NOTHING = 1.02  # speed-up below which it says so


def evaluate(
    target: TargetArg,
    drafter: Annotated[str, typer.Argument(help="Directory of a head or draft model, or lookup.")],
    prompts: Annotated[Path | None, typer.Option(help="File of prompts; the packaged held-out ones if none.")] = None,
    per_category: Annotated[int | None, typer.Option(min=1, help="Prompts of each category; all if not given.")] = None,
    timed: Annotated[int, typer.Option(min=0, help="Answers timed plainly, with the drafter and with lookup.")] = 26,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-m", min=2, help="Longest answer.")] = 128,
    costs: Annotated[bool, typer.Option(help="Time target passes of 1 to 64 nodes as well.")] = True,
    nodes: Annotated[str, typer.Option(help="saved: the head's tree; best: what pays here; or a number.")] = SAVED,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Directory for eval.json, eval.md, eval.png.")] = None,
    cache: Annotated[Path | None, typer.Option(help="For answers and features; default: the user cache.")] = None,
    dtype: Dtype = "auto",
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad rows of the file out.")] = False,
) -> None:
    """Measure a drafter: tokens per step by replay, wall clock against plain decoding, cost of a target pass."""
    from headstart.errors import BadInput
    from headstart.evaluate.report import markdown, picture
    from headstart.evaluate.run import evaluate as measured
    from headstart.evaluate.run import forecast, some
    from headstart.learn import argv
    from headstart.targets.resolve import cache_dir
    from headstart.train.files import whole, write_json
    from headstart.train.readers import packaged_chats, read

    log = Console(stderr=True)
    found = packaged_chats() if prompts is None else read(prompts, on_bad="skip" if skip_bad else "refuse").chats
    chats = some(found, per_category)
    with interruptible("interrupted; answers made so far are kept"):
        model = load(target, dtype)
        trees = resized(drafter, model) if nodes == BEST else None
        made = drafter_for(drafter, model, dtype, SAVED if nodes == BEST else nodes)
        if made is None:
            raise BadInput("Plain decoding gains nothing over itself; name lookup, or the directory of a head.")
        made.check(model)
        log.print(forecast(model, made, len(chats), max_new_tokens, timed), highlight=False)
        with progress() as report:
            figures = measured(
                model, made, chats, cache or cache_dir() / "eval",
                max_new_tokens=max_new_tokens, n_timed=timed, costs=costs, trees=trees, report=report,
            )  # fmt: skip
    record: dict[str, Any] = {
        "command": " ".join(argv()),
        "target": target,
        "drafter": drafter,
        "prompts": "packaged held-out prompts" if prompts is None else prompts.name,
        "per_category": per_category,
        **figures,
    }
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "eval.json", record)
        with whole(out / "eval.md") as draft:
            draft.write_text(markdown(record), encoding="utf-8")
        drawn = picture(record, out / "eval.png")
    console = Console()
    console.print(Markdown(markdown(record)) if console.is_terminal else markdown(record), highlight=False)
    if record.get("speedup", 2.0) < GAINS_NOTHING:
        console.print(f"On this machine {drafter} gains nothing; see docs/no-speed-up.md.", style="yellow")
    if out is not None:
        kinds = ("json", "md", "png") if drawn else ("json", "md")
        console.print(f"written: {', '.join(str(out / f'eval.{kind}') for kind in kinds)}", highlight=False)
