"""One evaluation as figures, as a table to read, and as a picture. Definitions: docs/evaluation.md."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headstart.drafters.base import Drafter
from headstart.evaluate.speed import REST, VERBS, Arm, speedup
from headstart.evaluate.texts import LOOP, Turn, looping
from headstart.replay import Replayed, replay
from headstart.train.files import whole

PLAIN, HEAD, LOOKUP = "plain", "speculative", "lookup"  # arms of the wall clock
DIGITS = 4


def replayed(drafter: Drafter, lookup: Drafter, turns: Sequence[Turn]) -> dict[str, Any]:
    """Figures that need no target pass."""
    found = replay(drafter, [turn.text for turn in turns])
    beside = replay(lookup, [turn.text for turn in turns])
    loops = [looping(turn.text) for turn in turns]
    groups: dict[str, list[int]] = defaultdict(list)
    for i, turn in enumerate(turns):
        groups[turn.category or "free"].append(i)
    return {
        "answers": len(turns),
        "tokens_per_step": _round(found.tokens_per_step),
        "tokens_per_step_mean_of_answers": _round(_mean([t / s for t, s in found.per_text if s])),
        "steps_by_accepted_length": {str(k): n for k, n in found.accepted.items()},
        "acceptance_by_depth": {
            "unconditional": list(map(_round, found.unconditional())),
            "conditional": list(map(_round, found.conditional())),
        },
        "by_category": {
            name: {
                "answers": len(members),
                "tokens_per_step": _round(found.only(members).tokens_per_step),
                "lookup_tokens_per_step": _round(beside.only(members).tokens_per_step),
            }
            for name, members in sorted(groups.items())
        },
        "lookup_tokens_per_step": _round(beside.tokens_per_step),
        f"share_of_tokens_in_a_repeated_{LOOP}_gram": _round(sum(map(sum, loops)) / max(sum(map(len, loops)), 1)),
        "tokens_per_step_without_them": _round(_without(found, loops)),
        "lookup_tokens_per_step_without_them": _round(_without(beside, loops)),
    }


def timed(arms: Mapping[str, Arm]) -> dict[str, Any]:
    """Figures of the wall clock."""
    plain, fast = arms[PLAIN], arms[HEAD]
    ratio, interval = speedup(plain, fast)
    pairs = list(zip(plain.answers, fast.answers, strict=True))
    parts = fast.step_ms()
    return {
        "timed_prompts": len(pairs),
        "speedup": _round(ratio),
        "speedup_interval": list(map(_round, interval)),
        PLAIN: _arm(plain),
        HEAD: _arm(fast),
        LOOKUP: {**_arm(arms[LOOKUP]), "speedup": _round(speedup(plain, arms[LOOKUP])[0])},
        "identical": sum(a.ids == b.ids for a, b in pairs),
        "overhead_ms_per_step": _round(parts["step"] - parts["draft"] - parts["target"] - parts["absorb"]),
    }


def markdown(record: Mapping[str, Any]) -> str:
    """The same, to read."""
    lines = [
        f"# {record['drafter']} on {record['target']} ({record['dtype']})",
        "",
        f"{record['answers']} answers to {record['prompts']}, {record['max_new_tokens']} tokens at most, greedy.",
        "",
        f"- **{record['tokens_per_step']:.2f} tokens per step** by replay, {record['lookup_tokens_per_step']:.2f} with "
        "prompt lookup",
    ]
    if "speedup" in record:
        low, high = record["speedup_interval"]
        lines += [
            f"- **{record['speedup']:.2f} times as fast** as plain decoding ({low:.2f} to {high:.2f}): "
            f"{record[HEAD]['tokens_per_s']:.1f} against {record[PLAIN]['tokens_per_s']:.1f} tokens/s; prompt lookup "
            f"{record[LOOKUP]['speedup']:.2f}",
            f"- {record['identical']} of {record['timed_prompts']} timed answers identical to plain decoding",
        ]
    if "sizes" in record:
        lines.append(f"- of this head's trees, {record['nodes']} nodes pay best on this machine")
    share, without = (record[k] for k in (f"share_of_tokens_in_a_repeated_{LOOP}_gram", "tokens_per_step_without_them"))
    lines += [
        f"- {share:.1%} of the tokens end a run of {LOOP} that stood in the answer before; {without:.2f} tokens per "
        "step without them",
        "",
        "| depth | accepted at least so many (unconditional) | given one less (conditional) |",
        "| ---: | ---: | ---: |",
    ]
    depths = record["acceptance_by_depth"]
    for depth, (all_of, given) in enumerate(zip(depths["unconditional"], depths["conditional"], strict=True), 1):
        lines.append(f"| {depth} | {all_of:.3f} | {given:.3f} |")
    lines += ["", "| category | answers | tokens per step | prompt lookup |", "| --- | ---: | ---: | ---: |"]
    for name, row in record["by_category"].items():
        figures = f"{row['tokens_per_step']:.2f} | {row['lookup_tokens_per_step']:.2f}"
        lines.append(f"| {name} | {row['answers']} | {figures} |")
    if "speedup" in record:
        names = [*VERBS, REST, "step"]
        lines += ["", "| ms per step | " + " | ".join(names) + " |", "| --- |" + " ---: |" * len(names)]
        for arm in (PLAIN, HEAD, LOOKUP):
            cells = " | ".join(f"{record[arm]['step_ms'][name]:.2f}" for name in names)
            lines.append(f"| {arm} | {cells} |")
    if "sizes" in record:
        lines += ["", "| nodes of the tree | tokens per step | pass, ms | draft, ms | modelled speed-up |"]
        lines.append("|" + " ---: |" * 5)
        for size in record["sizes"]:
            row = [f"{size[k]:.2f}" for k in ("tokens_per_step", "target_ms", "draft_ms", "speedup")]
            lines.append(f"| {size['nodes']} | " + " | ".join(row) + " |")
    for context, costs in record.get("target_cost_ms", {}).items():
        lines += ["", f"| nodes of a pass, {context} tokens of context | " + " | ".join(costs) + " |"]
        lines += ["| --- |" + " ---: |" * len(costs), "| ms | " + " | ".join(f"{v:.1f}" for v in costs.values()) + " |"]
    return "\n".join(lines) + "\n"


def picture(record: Mapping[str, Any], path: Path) -> bool:
    """Tokens per step by category, and v(n) where it was measured; False if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    costs = record.get("target_cost_ms", {})
    figure = Figure(figsize=(11 if costs else 6, 4), layout="constrained")
    axes = figure.subplots(1, 2 if costs else 1, squeeze=False)[0]
    names = list(record["by_category"])[::-1]
    for shift, (key, label) in enumerate((("lookup_tokens_per_step", "prompt lookup"), ("tokens_per_step", "head"))):
        values = [record["by_category"][name][key] for name in names]
        axes[0].barh([i + 0.4 * shift - 0.2 for i in range(len(names))], values, 0.4, label=label)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set_xlabel("tokens per step")
    axes[0].set_xlim(left=1.0)
    axes[0].legend()
    for context, row in costs.items():
        axes[1].plot(list(map(int, row)), list(row.values()), marker="o", label=f"{context} tokens of context")
    if costs:
        axes[1].set_xlabel("nodes in one target pass")
        axes[1].set_ylabel("milliseconds")
        axes[1].set_ylim(bottom=0)
        axes[1].grid(alpha=0.3)
        axes[1].legend()
    with whole(path) as draft:
        figure.savefig(draft, format="png", dpi=120)
    return True


def _arm(arm: Arm) -> dict[str, Any]:
    return {
        "tokens_per_s": _round(arm.tokens_per_s),
        "tokens_per_step": _round(arm.tokens_per_step),
        "steps_by_accepted_length": {str(k): n for k, n in sorted(arm.accepted.items())},
        "prompt_s": _round(sum(a.prompt_seconds for a in arm.answers)),
        "step_ms": {name: _round(ms) for name, ms in arm.step_ms().items()},
    }


def _without(found: Replayed, loops: Sequence[Sequence[bool]]) -> float:
    """Tokens per step with every looping token left out, and its share of the step that emitted it."""
    tokens, steps = 0, 0.0
    for trace, loop in zip(found.trace, loops, strict=True):
        at = 1  # the answer's first token belongs to the prompt's pass
        for accepted in trace:
            fresh = sum(not x for x in loop[at : at + accepted + 1])
            at += accepted + 1
            tokens += fresh
            steps += fresh / (accepted + 1)
    return tokens / steps if steps else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _round(value: float) -> float:
    return round(value, DIGITS)
