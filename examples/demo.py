"""The main job on a real model: SmolLM2-135M-Instruct answers prompts plainly and with prompt lookup.

Run by `make demo`. Both answers are shown side by side, with what was drafted in colour. They must be identical
(fp32, greedy), else the exit code is 1.
"""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

import headstart as hs
from headstart.prompts import packaged
from headstart.show import Coloured, legend, side_by_side, summary

CATEGORIES = ("summary", "rag", "code", "chat")
TOKENS = 96


def main() -> int:
    """Two arms per prompt on the same target object, first plain, then speculative."""
    console = Console()
    console.print(
        "[bold]headstart demo[/]: one model, two ways to decode. About 93 MB are fetched once into the user cache "
        "(640 MB on disk after unpacking); then about two minutes on two cores."
    )
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("fetching smollm2-135m")
        target = hs.load_target(
            "smollm2-135m", dtype="fp32", progress=lambda text, _: bar.update(task, description=text)
        )
        bar.update(task, description="warming up")
        hs.generate(target, "Hello", max_new_tokens=4)
        bar.update(task, description="ready")
    drafter = hs.PromptLookup()
    rows = []
    for category in CATEGORIES:
        prompt = packaged(category)[0]
        console.rule(f"{prompt.id} ({category})")
        console.print(Text(shortened(prompt.messages[-1]["content"]), style="italic"))
        started = time.perf_counter()
        plain = hs.generate(target, prompt.messages, max_new_tokens=TOKENS)
        fast = Coloured(target.tokenizer).collect(
            hs.stream(target, prompt.messages, drafter=drafter, max_new_tokens=TOKENS)
        )
        assert fast.output is not None
        side_by_side(console, ("plain", Text(plain.text)), ("with prompt lookup", fast.text))
        console.print(f"[dim]{time.perf_counter() - started:.1f} s for both[/]")
        rows.append((prompt.id, plain, fast.output))
    console.print(legend())
    console.print(summary(rows))
    return verdict(console, [name for name, plain, fast in rows if plain.token_ids != fast.token_ids])


def verdict(console: Console, differing: list[str]) -> int:
    """Say what the table means to someone who sees it for the first time."""
    if differing:
        console.print(f"[bold red]The answers to {', '.join(differing)} differ. That is a bug: please report it.[/]")
        return 1
    console.print(
        "All answers are identical, token by token. Green tokens were guessed from the text so far and confirmed by "
        "the model in one pass; where an answer repeats little of its prompt, lookup gains little or nothing."
    )
    return 0


def shortened(text: str, length: int = 400) -> str:
    """Enough of a prompt to know what was asked."""
    return text if len(text) <= length else f"{text[: length // 2]} [...] {text[-length // 2 :]}"


if __name__ == "__main__":
    sys.exit(main())
