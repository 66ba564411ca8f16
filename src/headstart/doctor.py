"""What is wrong with a pair of target and head? The usual faults leave a head that runs, stays exact and guesses badly.

Each fault is looked for by undoing it: if the head is right far more often when it is fed states before the final
norm, it was trained on those; if it is when its ids are read as offsets, the vocabulary map was misread. What drafting
guesses is compared with what training would have guessed, position by position: the two must not differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from headstart.checkpoint import Loaded, load
from headstart.core import Budget, Features, Report, Taps
from headstart.drafting import HeadDrafter, readouts
from headstart.evaluate.texts import answered, spoken
from headstart.heads.base import Head
from headstart.policies.chain import Chain
from headstart.replay import Spoken, along
from headstart.sampling import Coin, Sampling
from headstart.targets.base import Target
from headstart.train.capture import Window
from headstart.train.fingerprint import fingerprint
from headstart.train.readers import Chat
from headstart.train.rollout import How, rollout
from headstart.train.template import Sample
from headstart.unroll import Batch, Independent, SelfFed, Unroll, unroll

TOKENS = 64  # of an answer
NEAR_ZERO = 0.02  # accuracy at depth 1 of a head that knows nothing
BETTER = (1.5, 0.05)  # an undone fault must gain this factor, and this much
COLLAPSE = 0.2  # accuracy at depth 2 over depth 1, below which deeper guesses are worthless
FALL = 0.5  # accuracy in the last third of the answers over the first third
SAME = 0.98  # share of guesses that drafting and training must have in common: ties may go either way
COVERED = 0.8  # share of the answers' tokens that can be drafted


class Finding(NamedTuple):
    """One check. `fault` "" means that all is well there."""

    check: str
    fault: str
    seen: str
    advice: str = ""


class Examined(NamedTuple):
    """Findings in the order they were made; `by_depth` is top-1 accuracy on the target's own answers."""

    findings: list[Finding]
    by_depth: list[float]

    @property
    def faults(self) -> list[Finding]:
        """Only those."""
        return [f for f in self.findings if f.fault]


def examine(
    target: Target, path: Path, chats: Sequence[Chat], cache: Path, *, report: Report | None = None
) -> Examined:
    """All checks. Raises BadInput or FetchError for a directory that is no head's."""
    say = report or (lambda message, share: None)
    found = load(path, size=target.vocabulary.size)
    findings = _identity(found, target)
    if any(f.fault for f in findings):
        return Examined(findings, [])
    head = found.head.to(target.device, target.can.dtype).eval()
    layers = sorted({n + d for n in head.needs.layers for d in (-1, 0, 1) if n + d >= 0} | {target.layers})
    needs = Taps(final=True, layers=tuple(n for n in layers if n <= target.layers))
    say("the target answers prompts through its template", 0.1)
    window = Window()
    turns = answered(target, chats, cache, max_new_tokens=TOKENS, needs=needs, window=window, report=report)
    probe = _Probe(head, target, found, [turn.text for turn in turns], needs)
    as_it_is = probe.accuracy()
    say("undoing the usual faults", 0.5)
    findings += [_coverage(probe), *_undone(probe, as_it_is)]
    if getattr(target.tokenizer, "chat_template", None):
        say("the target goes on from prompts without its template", 0.6)
        bare = spoken(target, _bare(target, chats), cache, needs=needs, window=window, report=report)
        findings.append(_template(as_it_is, _Probe(head, target, found, bare, needs).accuracy()))
    say("comparing drafting with training", 0.8)
    findings += [_parity(probe), *_symptoms(as_it_is, probe.thirds(), any(f.fault for f in findings))]
    return Examined(findings, as_it_is)


def _identity(found: Loaded, target: Target) -> list[Finding]:
    """What the record says against what is here."""
    known, here = found.record.target, target.vocabulary
    findings = [
        Finding(
            "width",
            "" if found.record.width == target.width else "width",
            f"head {found.record.width}, target {target.width}",
            "The head belongs to another model.",
        ),
        Finding(
            "tokenizer",
            "" if known.vocabulary.digest in (None, here.digest) else "tokenizer",
            f"head {known.vocabulary.size} ids ({known.vocabulary.digest}), target {here.size} ({here.digest})",
            "Its token ids mean other text here. Use the tokenizer it was trained with.",
        ),
    ]
    weights = fingerprint(target)
    same = known.fingerprint in (None, weights)
    note = "" if same else " (another dtype, fine-tune or template: it stays exact, and may guess worse)"
    findings.append(Finding("weights", "", f"head {known.fingerprint or 'not stated'}, target {weights}{note}"))
    return findings


def _bare(target: Target, chats: Sequence[Chat]) -> list[Sample]:
    """The same requests as plain text, gone on from."""
    texts = [chat.messages[-1]["content"] for chat in chats]
    prompts = [ids for text in texts if (ids := target.tokenizer.encode(text, add_special_tokens=False))]
    answers = rollout(target, prompts, How(rows=64, max_new_tokens=TOKENS, cut_loops=False), target.eos)
    return [
        Sample(prompt + answer.ids, [False] * len(prompt) + [True] * len(answer.ids))
        for prompt, answer in zip(prompts, answers, strict=True)
        if len(answer.ids) > 1
    ]


class _Probe:
    """A head and answers whose states were tapped in more places than it reads."""

    def __init__(self, head: Head, target: Target, found: Loaded, said: Sequence[Spoken], tapped: Taps) -> None:
        self.head, self.target, self.vocab, self.said, self.tapped = head, target, found.vocab, said, tapped
        self.depths = max(map(len, found.paths))
        self.unrolling: Unroll = Independent() if head.alone else SelfFed(steps=None)
        self.readout = readouts(head, target, found.vocab)

    def features(self, text: Spoken, *, final: str = "final", shift: int = 0) -> Features:
        """What the head is fed: its own taps, or others."""
        layer = dict(zip(self.tapped.layers, text.features.layers, strict=True))
        top = text.features.final if final == "final" else layer[max(layer)]
        return Features(top if self.head.needs.final else None, tuple(layer[n + shift] for n in self.head.needs.layers))

    @torch.no_grad()
    def hits(
        self, change: Callable[[Spoken], Features] | None = None, ids_U: Tensor | None = None
    ) -> list[list[tuple[int, int, int, bool]]]:
        """Per text: (anchor, depth, guess, right) of every guess of the training path."""
        out = []
        for text in self.said:
            features = (change or self.features)(text)
            ids = torch.tensor([text.ids], device=self.target.device)
            said_BT = torch.arange(ids.shape[1], device=ids.device)[None] >= text.prompt
            batch = Batch(ids, said_BT, features.map(self._fed), [ids.shape[1]])
            rows = []
            for said in unroll(self.head, self.unrolling, batch, self.depths):
                index_S = self.readout(said.depth).project(said.feature_SF).argmax(-1).cpu()
                guess_S = self.vocab.to_target(index_S) if ids_U is None else ids_U[index_S]
                right_S = guess_S == said.label_S.cpu()
                for position, guess, right in zip(
                    said.position_S.tolist(), guess_S.tolist(), right_S.tolist(), strict=True
                ):
                    rows.append((position - 1 - said.depth, said.depth, guess, right))
            out.append(rows)
        return out

    def _fed(self, x_TD: Tensor) -> Tensor:
        return x_TD[None].to(self.target.device, self.target.can.dtype)

    def accuracy(self, change: Callable[[Spoken], Features] | None = None, ids_U: Tensor | None = None) -> list[float]:
        """Top-1, by depth."""
        rows = [row for text in self.hits(change, ids_U) for row in text]
        return [_mean([right for _, depth, _, right in rows if depth == d + 1]) for d in range(self.depths)]

    def thirds(self) -> tuple[float, float]:
        """Accuracy at depth 1 in the first and in the last third of the answers."""
        early, late = [], []
        for text, rows in zip(self.said, self.hits(), strict=True):
            length = len(text.ids) - text.prompt
            for anchor, depth, _, right in rows:
                if depth == 1 and anchor - text.prompt < length / 3:
                    early.append(right)
                elif depth == 1 and anchor - text.prompt >= 2 * length / 3:
                    late.append(right)
        return _mean(early), _mean(late)

    def drafted(self) -> list[list[tuple[int, int, int]]]:
        """Per text: (anchor, depth, guess) of a chain drafted for real at every position of the answer."""
        drafter = HeadDrafter(self.head, self.target, Chain(depth=self.depths), self.vocab)
        out = []
        for text in self.said:
            rows = []
            for root, state in along(drafter, text._replace(features=self.features(text))):
                budget = Budget([self.depths], self.depths + 1)
                guesses = drafter.draft(state, budget, [Sampling()], [Coin(0)]).token_BN[0, 1:].tolist()
                rows += [(root - 1, depth, guess) for depth, guess in enumerate(guesses, 1)]
            out.append(rows)
        return out


def _coverage(probe: _Probe) -> Finding:
    said = torch.tensor([i for text in probe.said for i in text.ids[text.prompt :]])
    share = float(probe.vocab.labels(said)[1].float().mean())
    return Finding(
        "vocabulary covers the answers",
        "" if share >= COVERED else "vocabulary",
        f"{share:.1%} of the answers' tokens can be drafted",
        "What is not in the draft vocabulary is never guessed: its map is wrong, or it was built from other text.",
    )


def _undone(probe: _Probe, as_it_is: list[float]) -> list[Finding]:
    """Each fault undone; a head that gains much by it has that fault."""
    findings = []
    tries: list[tuple[str, str, str, list[float]]] = []
    if probe.head.needs.final:
        rate = probe.accuracy(lambda text: probe.features(text, final="residual"))
        tries.append(("norm", "fed the state before the final norm", "It was trained on states before the final norm.",
                      rate))  # fmt: skip
    for shift in (-1, 1) if probe.head.needs.layers else ():
        if all(n + shift in probe.tapped.layers for n in probe.head.needs.layers):
            rate = probe.accuracy(lambda text, shift=shift: probe.features(text, shift=shift))  # type: ignore[misc]
            tries.append(("tap", f"fed layers {shift:+d}", "Its taps are counted from another layer.", rate))
    for by in (-1, 1):
        rate = probe.accuracy(lambda text, by=by: probe.features(text).map(lambda x: x.roll(by, 0)))  # type: ignore[misc]
        tries.append(("alignment", f"fed states {by:+d} position", "It pairs states and tokens another way.", rate))
    ids_U = probe.vocab.ids_U
    if ids_U is not None and probe.readout(1).trained:
        index_U = torch.arange(len(ids_U))
        for name, other_U in (("offsets", ids_U + index_U), ("absolute", ids_U - index_U)):
            if int(other_U.min()) >= 0 and int(other_U.max()) < probe.target.vocabulary.size:
                rate = probe.accuracy(ids_U=other_U)
                tries.append(
                    ("vocabulary map", f"its ids read as {name}", "Its d2t and token_map were confused.", rate)
                )
    for fault, how, advice, rate in tries:
        found = _better(rate, as_it_is)
        findings.append(Finding(f"{fault}: {how}", fault if found else "", _compare(as_it_is, rate), advice))
    return findings


def _template(as_it_is: list[float], bare: list[float]) -> Finding:
    return Finding(
        "template: prompts without it",
        "template" if _better(bare, as_it_is) else "",
        _compare(as_it_is, bare),
        "It was trained on text without the chat template, or with another one; serve it the same way or train anew.",
    )


def _parity(probe: _Probe) -> Finding:
    """Guess by guess; where training had nothing to learn there is nothing to compare."""
    same = total = 0
    for trained, drafted in zip(probe.hits(), probe.drafted(), strict=True):
        expected = {(anchor, depth): guess for anchor, depth, guess, _ in trained}
        for anchor, depth, guess in drafted:
            if (anchor, depth) in expected:
                total += 1
                same += expected[anchor, depth] == guess
    share = same / max(total, 1)
    return Finding(
        "drafting guesses what training guesses",
        "" if share >= SAME else "parity",
        f"{share:.1%} of {total} guesses",
        "Training and drafting feed the head differently: a fault of its code, not of its weights.",
    )


def _symptoms(by_depth: list[float], thirds: tuple[float, float], explained: bool) -> list[Finding]:
    """What remains when no single cause was found."""
    first = by_depth[0]
    second = by_depth[1] / first if len(by_depth) > 1 and first else 1.0
    early, late = thirds
    why = (
        "See the fault above." if explained else "No usual fault explains it: it may be untrained, or another model's."
    )
    return [
        Finding("acceptance near zero", "near zero" if first < NEAR_ZERO else "", f"{first:.1%} at depth 1", why),
        Finding(
            "collapse at depth 2",
            "collapse" if first >= NEAR_ZERO and second < COLLAPSE else "",
            f"{second:.0%} of depth 1",
            "Deeper guesses were not trained on the head's own states, or their rows are fed wrongly.",
        ),
        Finding(
            "falling with position",
            "falling" if first >= NEAR_ZERO and late < FALL * early else "",
            f"{early:.1%} in the first third of the answers, {late:.1%} in the last",
            "Usual causes: another rotary setting than in training, or training texts that were cut short.",
        ),
    ]


def _better(rate: list[float], as_it_is: list[float]) -> bool:
    factor, gain = BETTER
    return rate[0] >= factor * as_it_is[0] and rate[0] >= as_it_is[0] + gain


def _compare(as_it_is: list[float], rate: list[float]) -> str:
    return f"{rate[0]:.1%} right at depth 1, {as_it_is[0]:.1%} as it is"


def _mean(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else 0.0
