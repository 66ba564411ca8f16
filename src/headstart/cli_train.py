"""Commands that make heads: distill, train, inspect."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from headstart.cli_common import Dtype, TargetArg, interruptible, load, progress

if TYPE_CHECKING:
    from headstart.forecast import Forecast
    from headstart.learn import Data, Recipe

Out = Annotated[Path, typer.Option("--out", "-o", help="Directory for the results; the same command resumes there.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave bad rows out, and count them, instead of refusing.")]
UNIT = 1024  # conversations of one file of answers at most: what a killed run loses
GOES_ON = "interrupted; the same command goes on from here"


def distill(
    target: TargetArg,
    prompts: Annotated[list[Path] | None, typer.Argument(help="Files of prompts: JSONL, JSON.")] = None,
    out: Out = Path("answers"),
    self_prompt: Annotated[int, typer.Option(help="Let the target invent so many prompts; no data needed.")] = 0,
    packaged: Annotated[bool, typer.Option("--packaged", help="Answer the packaged prompts too.")] = False,
    categories: Annotated[str, typer.Option(help="Kinds of invented prompts, with commas; all if empty.")] = "",
    seeded: Annotated[float, typer.Option(help="Share of invented prompts that start from an opener.")] = 0.6,
    script: Annotated[str, typer.Option(help="Letters of invented prompts: latin, cyrillic, ...; any if empty.")] = "",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-m", help="Longest answer.")] = 192,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="Of the answers; 0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus mass of the answers.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Same seed, same prompts and answers.")] = 0,
    batch: Annotated[int, typer.Option(help="Conversations side by side.")] = 128,
    part: Annotated[str, typer.Option(help="k/n: this is process k of n that share the directory.")] = "1/1",
    skip_bad: SkipBad = False,
    dtype: Dtype = "auto",
) -> None:
    """Let the target answer prompts, given or its own: the training data of a head."""
    from headstart.errors import BadInput
    from headstart.train.answers import read_answers, summary
    from headstart.train.distil import Given, SelfPrompts, Source, distil, estimate
    from headstart.train.readers import Chat, packaged_chats, read
    from headstart.train.rollout import How
    from headstart.train.selfprompt import Inventing

    console = Console(stderr=True)
    how = How(rows=batch, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    share = _part(part)
    chats: list[Chat] = []
    for path in prompts or []:
        reading = read(path, on_bad="skip" if skip_bad else "refuse")
        chats += reading.chats
        if reading.skipped:
            console.print(f"{path}: {len(reading.skipped)} bad rows left out, the first in line "
                          f"{reading.skipped[0].line}: {reading.skipped[0].reason}", style="yellow")  # fmt: skip
    if packaged:
        chats += packaged_chats(held_out=False)
    if bool(chats) == bool(self_prompt):
        raise BadInput("Give files of prompts or --packaged, or else --self-prompt N; expected one of the two.")
    names = tuple(name for name in categories.split(",") if name)
    source: Source = (
        Given(chats, min(UNIT, -(-len(chats) // share[1])))  # no part without work
        if chats
        else SelfPrompts(
            self_prompt,
            Inventing(rows=batch, seed=seed, seeded=seeded, categories=names, script=script.upper()),
            UNIT,
        )
    )
    with interruptible(GOES_ON):
        model = load(target, dtype)
        console.print(estimate(model, source, how, share), highlight=False)
        with progress() as report:
            distil(model, source, out, how, part=share, report=report)
    rows = read_answers(out)
    _print_summary(summary(rows), out)
    if isinstance(source, Given) and source.dropped:
        console.print(f"{source.dropped} prompts left out: without a user turn, or too like a held-out prompt.")


def train(
    target: TargetArg,
    data: Annotated[list[Path], typer.Argument(help="Directories of answers, or files of chats with answers.")],
    out: Out = Path("run"),
    family: Annotated[str, typer.Option(help="Kind of head.")] = "medusa",
    heads: Annotated[int, typer.Option(help="Tokens guessed ahead.")] = 5,
    layers: Annotated[int, typer.Option(help="Blocks per head.")] = 1,
    own_lm_heads: Annotated[bool, typer.Option("--own-lm-heads", help="An LM head per head, as published.")] = False,
    tokens: Annotated[str, typer.Option(help="Supervised tokens to train on: 300k, 2M.")] = "1M",
    draft_vocab: Annotated[int, typer.Option(help="Tokens that can be drafted; 0 for all.")] = 8192,
    tree_nodes: Annotated[int, typer.Option(help="Nodes of the tree saved with the head, root included.")] = 32,
    learning_rate: Annotated[float, typer.Option("--lr", help="Peak learning rate.")] = 2e-3,
    step_tokens: Annotated[int, typer.Option(help="Supervised tokens per optimiser step.")] = 2048,
    decay: Annotated[float, typer.Option(help="Weight of depth k is this to the power k.")] = 0.8,
    start: Annotated[
        Path | None, typer.Option("--from", help="Go on from this head, with a report before/after.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Two minutes of probing: time, memory, disk, curve.")
    ] = False,
    autocast: Annotated[bool, typer.Option("--bf16", help="Compute in bf16 over fp32 weights.")] = False,
    on_the_fly: Annotated[bool, typer.Option("--on-the-fly", help="Keep no features: a target pass per text.")] = False,
    refuse_long: Annotated[bool, typer.Option("--refuse-long", help="Refuse texts beyond the context.")] = False,
    cache: Annotated[Path | None, typer.Option(help="For features and held-out answers; default beside --out.")] = None,
    seed: Annotated[int, typer.Option(help="Order of the texts.")] = 0,
    skip_bad: SkipBad = False,
    dtype: Dtype = "auto",
) -> None:
    """Train a head on a target's answers; the checkpoint is chosen by held-out tokens per step."""
    from headstart.checkpoint import load as load_checkpoint
    from headstart.learn import Recipe, fitted, gather
    from headstart.objectives.base import decay as decayed
    from headstart.train.loop import Training

    console = Console(stderr=True)
    training = Training(
        tokens=_count(tokens),
        step_tokens=step_tokens,
        learning_rate=learning_rate,
        weights=tuple(decayed(heads, decay)),
        autocast=autocast,
        seed=seed,
    )
    fields: dict[str, Any] = {"heads": heads, "layers": layers}
    if own_lm_heads:
        fields |= {"own_lm_heads": True, "own_ids": bool(draft_vocab)}
    recipe = Recipe(
        training=training, family=family, head=fields, draft_vocab=draft_vocab or None,
        tree_nodes=tree_nodes, on_the_fly=on_the_fly, on_long="refuse" if refuse_long else "cut",
    )  # fmt: skip
    place = cache or out.parent / "cache"
    before = None if start is None else load_checkpoint(start)
    with interruptible(GOES_ON):
        model = load(target, dtype)
        with progress() as report:
            texts = gather(model, data, place, on_long=recipe.on_long, on_bad="skip" if skip_bad else "refuse",
                           report=report)  # fmt: skip
        _print_data(console, model, texts, recipe)
        if dry_run:
            from headstart.forecast import forecast

            with progress() as report:
                _print_forecast(forecast(model, texts, recipe, report=report), recipe)
            return
        with progress() as report:
            done = fitted(model, target, texts, recipe, out, place, start=before, report=report)
    _print_fitted(done, out)


def inspect(head: Annotated[Path, typer.Argument(help="Directory of a head.")]) -> None:
    """Show what a head is, what it was trained for and on, and what it reached."""
    from headstart.checkpoint import inspect as read_record

    table = Table(show_header=False, box=None)
    for key, value in _flat(read_record(head)):
        table.add_row(key, str(value))
    Console().print(table)


COMMANDS = (distill, train, inspect)


def _flat(record: Any, prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in record.items():
        name = f"{prefix}{key}"
        rows += _flat(value, f"{name}.") if isinstance(value, dict) and value else [(name, value)]
    return rows


def _part(text: str) -> tuple[int, int]:
    from headstart.errors import BadInput

    k, _, n = text.partition("/")
    if not (k.isdigit() and n.isdigit() and 1 <= int(k) <= int(n)):
        raise BadInput(f"--part {text!r}: expected k/n with 1 <= k <= n, 2/4 for the second of four.")
    return int(k) - 1, int(n)


def _count(text: str) -> int:
    from headstart.errors import BadInput

    scale = {"k": 1_000, "m": 1_000_000}.get(text[-1:].lower(), 1)
    try:
        return int(float(text if scale == 1 else text[:-1]) * scale)
    except ValueError:
        raise BadInput(f"--tokens {text!r}: expected a number, with k or M for thousands or millions.") from None


def _print_summary(found: Any, out: Path) -> None:
    console = Console()
    console.print(
        f"{found.answers} answers of {found.tokens} tokens in {out} "
        f"({', '.join(f'{n} by {why}' for why, n in found.ended.items())})",
        highlight=False,
    )
    console.print(
        f"prompts: {found.prompts.texts}, {100 * found.prompts.distinct:.1f} % distinct 8-grams, "
        f"{100 * found.prompts.near_duplicates:.1f} % near-duplicates; "
        + ", ".join(f"{name} {n}" for name, n in sorted(found.categories.items())),
        highlight=False,
    )


def _print_data(console: Console, model: Any, texts: Data, recipe: Recipe) -> None:
    from headstart.catalogue import family
    from headstart.learn import draft_vocab, stored_as, vocab_report, window_of
    from headstart.train.capture import cost, pace

    vocab = draft_vocab(model, texts.samples, recipe.draft_vocab)
    kind = family(recipe.family)
    head = kind.head(kind.config(**recipe.head), model.width, vocab.size)
    window, stored = window_of(head, len(recipe.training.weights)), stored_as(model, recipe.stored)
    price = cost(model, texts.samples, head.needs, window, stored, model.width)
    rate = pace(model, texts.samples, head.needs)
    kept = "kept nowhere (--on-the-fly)" if recipe.on_the_fly else f"at most {price.bytes / 2**20:.0f} MiB on disk"
    console.print(
        f"{len(texts.samples)} texts, {texts.report['supervised']} supervised tokens; {len(texts.held_out)} held-out "
        f"answers\ndraft vocabulary of {vocab.size}: covers {100 * vocab_report(model, texts.samples, vocab):.2f} % of "
        f"training and {100 * vocab_report(model, texts.held_out, vocab):.2f} % of held-out tokens\n"
        f"features of {price.kept} of {price.tokens} positions: {kept}, about {price.tokens / rate / 60:.0f} min at "
        f"{rate:.0f} tokens/s, {'every epoch' if recipe.on_the_fly else 'once'}",
        highlight=False,
    )


def _print_forecast(found: Forecast, recipe: Recipe) -> None:
    table = Table(title="dry run", show_header=False)
    table.add_row("features", f"{found.capture_tokens} tokens, {found.capture_seconds / 60:.0f} min")
    table.add_row("training", f"{recipe.training.tokens} tokens, {found.train_seconds / 60:.0f} min")
    table.add_row("disk", f"{found.disk_bytes / 2**20:.0f} MiB")
    table.add_row("memory", f"about {found.memory_bytes / 2**20:.0f} MiB and the batch")
    for tokens, value in found.seen:
        table.add_row(f"measured at {tokens}", f"{value:.2f} tokens per step")
    for tokens, value in found.curve:
        table.add_row(f"guessed at {tokens}", f"{value:.2f} tokens per step")
    Console().print(table)


def _print_fitted(done: Any, out: Path) -> None:
    import json

    console = Console()
    result = done.held_out
    before = out / "before.json"
    if before.exists():
        was = json.loads(before.read_text(encoding="utf-8"))["tokens_per_step"]
        console.print(f"before: {was:.2f} tokens per step on the held-out answers; after: {result.tokens_per_step:.2f}")
    console.print(
        f"{done.progress.tokens} tokens; best after {done.progress.best_tokens}: {result.tokens_per_step:.2f} tokens "
        f"per step on held-out answers with a tree of {len(done.paths) + 1} nodes\n"
        "accepted at least d tokens (unconditional): "
        + " ".join(f"{x:.2f}" for x in result.unconditional())
        + "; given d - 1 (conditional): "
        + " ".join(f"{x:.2f}" for x in result.conditional())
        + f"\nhead in {out / 'head'}; use it with --drafter {out / 'head'}",
        highlight=False,
    )
