"""How answers are shown in a terminal: drafted tokens in colour, two answers side by side, counts in a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headstart.generation import Output, Piece
from headstart.stopping import TextStream

DRAFTED, OWN = "bold green", "default"


class Coloured:
    """Collects the pieces of one answer as text in which accepted draft tokens are green."""

    def __init__(self, tokenizer: Any) -> None:
        self._stream = TextStream(tokenizer)
        self.text = Text()
        self.output: Output | None = None

    def add(self, piece: Piece) -> None:
        """A character belongs to the token that completed it."""
        for i, token in enumerate(piece.token_ids):
            self.text.append(self._stream.push(token), style=DRAFTED if i < piece.accepted else OWN)
        if piece.output is not None:
            self.text.append(self._stream.flush())
            self.text.truncate(len(piece.output.text))  # a stop string is not part of the answer
            self.output = piece.output

    def collect(self, pieces: Iterable[Piece]) -> Coloured:
        """All of a stream."""
        for piece in pieces:
            self.add(piece)
        return self


def side_by_side(console: Console, left: tuple[str, Text], right: tuple[str, Text]) -> None:
    """Two answers next to each other, or below each other on a narrow terminal."""
    panels = [Panel(text, title=title, title_align="left") for title, text in (left, right)]
    if console.width >= 100:
        grid = Table.grid(expand=True, padding=(0, 1))
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        grid.add_row(*panels)
        console.print(grid)
    else:
        console.print(Group(*panels))


def rate(output: Output) -> float:
    """Tokens per second of the whole call, prompt included."""
    return len(output.token_ids) / output.stats.seconds


def summary(rows: Sequence[tuple[str, Output, Output]]) -> Table:
    """Plain against speculative decoding, one row per prompt."""
    table = Table(title="plain against speculative decoding", title_justify="left")
    for name in ("prompt", "tokens", "plain tok/s", "speculative tok/s", "speed-up", "tokens per step", "identical"):
        table.add_column(name, justify="left" if name == "prompt" else "right")
    for name, plain, fast in rows:
        same = plain.token_ids == fast.token_ids
        table.add_row(
            name, str(len(fast.token_ids)), f"{rate(plain):.1f}", f"{rate(fast):.1f}",
            f"{rate(fast) / rate(plain):.2f}x", f"{fast.stats.tokens_per_step:.2f}",
            "[green]yes[/]" if same else "[red]NO[/]",
        )  # fmt: skip
    return table


def legend() -> Columns:
    """What the colours mean."""
    drafted = Text("drafted and accepted", style=DRAFTED)
    return Columns([drafted, Text("the target's own token", style=OWN)], padding=(0, 3))
