"""`headstart prove`: does speculation change nothing, with this drafter on this target?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from headstart.cli_common import SAVED, Dtype, TargetArg, drafter_for, interruptible, load, progress

if TYPE_CHECKING:
    from headstart.drafters.base import Drafter

EXIT = {"pass": 0, "fail": 1, "inconclusive": 3}


def prove(
    target: TargetArg,
    drafter: Annotated[str, typer.Argument(help="Directory of a head or draft model, or lookup.")],
    prompts: Annotated[Path | None, typer.Option(help="File of prompts; the packaged held-out ones if none.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts at most.")] = 24,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-m", help="Longest answer.")] = 64,
    sampled_tokens: Annotated[int, typer.Option(help="Tokens per sampled setting and control.")] = 3000,
    nodes: Annotated[str, typer.Option(help="saved: the head's tree; or a number: its best so many nodes.")] = SAVED,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the proof here, as JSON.")] = None,
    dtype: Dtype = "auto",
) -> None:
    """Prove on your own model that drafts change no output. Exit code 0: pass, 1: fail, 3: inconclusive."""
    import torch

    from headstart.errors import BadInput
    from headstart.learn import argv
    from headstart.prove.proof import prove as proved
    from headstart.requests import encode
    from headstart.train.readers import evenly, opening, packaged_chats, read, user_turns

    def make(at: Any) -> Drafter:
        made = drafter_for(drafter, at, "fp32" if at is exact else dtype, nodes)
        if made is None:
            raise BadInput(
                "Plain decoding has nothing to prove; name lookup, or the directory of a head or draft model."
            )
        return made

    chats = packaged_chats() if prompts is None else [c for c in read(prompts).chats if c.text is None]
    asked = evenly([chat for chat in chats if user_turns(chat)[1]], count)
    with interruptible():
        serving = load(target, dtype)
        exact = serving if serving.can.dtype is torch.float32 else load(target, "fp32")
        ids = [encode(exact, opening(chat)) for chat in asked]
        if not ids:
            raise BadInput(f"{prompts} holds no prompt with a user turn.")
        with progress() as report:
            found = proved(
                exact, make, ids,
                max_new_tokens=max_new_tokens, sampled_tokens=sampled_tokens,
                serving=None if serving is exact else serving, report=report,
            )  # fmt: skip
    if out is not None:
        record = {
            "command": " ".join(argv()),
            "target": target,
            "drafter": drafter,
            "serving_dtype_name": str(serving.can.dtype),
            **found.record(),
        }
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    _print(found)
    raise typer.Exit(EXIT[found.verdict])


def _print(found: Any) -> None:
    table = Table(box=None, show_header=False)
    arms = [("greedy, fp32", found.greedy)]
    arms += [] if found.serving is None else [("greedy, serving dtype", found.serving)]
    for name, arm in arms:
        near = sum(d.rounding for d in arm.divergences)
        table.add_row(
            name,
            f"{arm.identical} of {arm.prompts} identical, {arm.tokens} tokens"
            + (f"; {near} of the others part at near ties" if arm.divergences else ""),
        )
    for how, checked in found.sampling:
        table.add_row(
            f"sampled, T {how.temperature}, top-p {how.top_p}",
            f"p = {checked.p_value:.3g} over {checked.tokens} tokens, {checked.impossible} impossible",
        )
    for caught in found.controls:
        state = f"caught in {caught.tokens} tokens" if caught.caught else f"NOT caught in {caught.tokens} tokens"
        table.add_row(f"control: {caught.name}", state)
    table.add_row("tokens per step", f"{found.greedy.tokens_per_step:.2f}")
    console = Console()
    console.print(table)
    console.print(f"[bold]{found.verdict}[/]" + "".join(f"\n- {reason}" for reason in found.reasons), highlight=False)


COMMANDS = (prove,)
