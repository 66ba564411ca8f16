"""The command line. Heavy imports wait until a command runs, so `--help` is instant."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from headstart import cli_doctor, cli_eval, cli_prove, cli_train, memory
from headstart._version import __version__
from headstart.cli_common import AUTO, Dtype, TargetArg, drafter_for, interruptible, load, progress
from headstart.errors import HeadstartError

if TYPE_CHECKING:
    from headstart.drafters.base import Drafter
    from headstart.generation import Output
    from headstart.sampling import Sampling
    from headstart.targets.hf import HFTarget

app = typer.Typer(
    help="Speculative decoding that never changes an output.", no_args_is_help=True, pretty_exceptions_enable=False
)
for command in (*cli_train.COMMANDS, *cli_prove.COMMANDS, *cli_doctor.COMMANDS):
    app.command()(command)
app.command("eval")(cli_eval.evaluate)
Tokens = Annotated[int, typer.Option("--max-new-tokens", "-m", help="Longest answer.")]
DrafterOpt = Annotated[
    str,
    typer.Option(
        "--drafter",
        "-d",
        help="auto: the head that comes for this target, else lookup. default, lookup, none, or a directory.",
    ),
]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus mass.")]
TopK = Annotated[int, typer.Option(help="0 is off.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text.")]
StopOpt = Annotated[list[str] | None, typer.Option("--stop", help="Stop string; may be given more than once.")]
ShowOpt = Annotated[bool, typer.Option("--show", help="Colour what was drafted.")]


def main() -> None:
    """Entry point: errors that headstart raises on purpose are one message and exit code 1."""
    console = Console(stderr=True)
    memory.keep()
    try:
        app()
    except HeadstartError as error:
        console.print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"headstart {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


@app.command()
def fetch(target: TargetArg) -> None:
    """Bring a target into the user cache and print its directory."""
    with interruptible(), progress() as report:
        from headstart.targets.resolve import resolve

        print(resolve(target, report))


@app.command()
def generate(
    target: TargetArg,
    prompt: Annotated[str, typer.Argument(help="What to ask; `-` reads standard input.")],
    drafter: DrafterOpt = AUTO,
    max_new_tokens: Tokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    stop: StopOpt = None,
    dtype: Dtype = "auto",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    show: ShowOpt = False,
    compare: Annotated[bool, typer.Option("--compare", help="Decode plainly as well, side by side.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the answer and its counts here.")] = None,
) -> None:
    """Answer one prompt, with a draft or without."""
    from headstart.sampling import Sampling

    how = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop or ())
    text = sys.stdin.read() if prompt == "-" else prompt
    with interruptible():
        model = load(target, dtype)
        asked: Any = text if raw or not model.tokenizer.chat_template else [{"role": "user", "content": text}]
        answers = _answer(model, asked, drafter_for(drafter, model, dtype), max_new_tokens, how, show, compare)
    if json_file is not None:
        json_file.write_text(json.dumps({n: _record(a) for n, a in answers.items()}, indent=1, ensure_ascii=False))
    if compare and answers["plain"].token_ids != answers["speculative"].token_ids and how.greedy:
        Console(stderr=True).print(
            f"The answers differ. In {dtype} rounding can do that near ties; with --dtype fp32 it must not.",
            style="yellow",
        )


@app.command()
def chat(
    target: TargetArg,
    drafter: DrafterOpt = AUTO,
    max_new_tokens: Tokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    dtype: Dtype = "auto",
    show: ShowOpt = False,
) -> None:
    """Talk to a target; caches are kept between turns. An empty line or Ctrl-D ends."""
    from headstart.sampling import Sampling
    from headstart.session import Session

    model = load(target, dtype)
    session = Session(
        model,
        drafter=drafter_for(drafter, model, dtype),
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature=temperature, top_p=top_p, seed=seed),
        messages=[] if system is None else [{"role": "system", "content": system}],
    )
    console = Console()
    while (said := _ask(console)) is not None:
        try:
            output = _print_stream(console, model, session.stream(said), show)
            _footer(console, output)
        except KeyboardInterrupt:
            console.print("\n(stopped; go on or leave with an empty line)", style="yellow")


def _ask(console: Console) -> str | None:
    try:
        return console.input("[bold]you> [/]").strip() or None
    except (EOFError, KeyboardInterrupt):
        return None


def _answer(
    target: HFTarget, prompt: Any, drafter: Drafter | None, tokens: int, how: Sampling, show: bool, compare: bool
) -> dict[str, Output]:
    from headstart.generation import generate as plain_generate
    from headstart.generation import stream
    from headstart.show import Coloured, legend, side_by_side, summary

    console = Console()
    if not compare:
        pieces = stream(target, prompt, drafter=drafter, max_new_tokens=tokens, sampling=how)
        output = _print_stream(console, target, pieces, show)
        _footer(console, output)
        return {"answer": output}
    plain = plain_generate(target, prompt, max_new_tokens=tokens, sampling=how)
    coloured = Coloured(target.tokenizer).collect(
        stream(target, prompt, drafter=drafter, max_new_tokens=tokens, sampling=how)
    )
    assert coloured.output is not None
    from rich.text import Text

    fast_text = coloured.text if show else Text(coloured.output.text)
    side_by_side(console, ("plain", Text(plain.text)), ("speculative", fast_text))
    if show:
        console.print(legend())
    console.print(summary([("this prompt", plain, coloured.output)]))
    return {"plain": plain, "speculative": coloured.output}


def _print_stream(console: Console, target: HFTarget, pieces: Iterator[Any], show: bool) -> Output:
    from headstart.show import Coloured

    coloured = Coloured(target.tokenizer)
    shown = 0
    for piece in pieces:
        coloured.add(piece)
        if show:  # only text that is certain: the stream itself holds back what could still be cut
            certain = coloured.text[shown : shown + len(piece.text)]
            console.print(certain, end="")
            shown += len(piece.text)
        else:
            console.print(piece.text, end="", markup=False, highlight=False, soft_wrap=True)
    console.print()
    assert coloured.output is not None
    return coloured.output


def _footer(console: Console, output: Output) -> None:
    from headstart.show import rate

    console.print(
        f"[dim]{len(output.token_ids)} tokens, {rate(output):.1f} tokens/s, "
        f"{output.stats.tokens_per_step:.2f} tokens per step, ended by {output.finish_reason}[/]",
        highlight=False,
    )


def _record(output: Output) -> dict[str, Any]:
    stats = output.stats
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "tokens_per_step": stats.tokens_per_step,
        "accepted": {str(k): n for k, n in stats.accepted.items()},
        "passes": stats.passes,
        "drafted": stats.drafted,
        "prompt_tokens": stats.prompt_tokens,
        "seconds": stats.seconds,
        "verifier": stats.verifier,
    }
