"""The whole proof: greedy identity, the sampled law, the controls, and one verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from headstart.core import Report
from headstart.drafters.base import Drafter
from headstart.generation import generate
from headstart.prove.controls import GREEDY, SAMPLED, Control
from headstart.prove.greedy import Divergence, Identity, first_difference, identity
from headstart.prove.sampled import Checked, check, checks
from headstart.requests import pair
from headstart.sampling import Sampling
from headstart.targets.base import Target

LEVEL = 1e-4  # of each sampled setting: an exact decoder fails one proof in thousands
LEAST_GAIN = 1.2  # tokens per step below which hardly anything was drafted that could have gone wrong
SETTINGS = (Sampling(temperature=0.7, top_p=0.9, seed=0), Sampling(temperature=1.0, top_p=0.9, seed=1))


class Caught(NamedTuple):
    """What became of one control: after how many tokens it showed, and at which p-value (None: a token differed)."""

    name: str
    how: str
    caught: bool
    tokens: int
    p_value: float | None


class Proof(NamedTuple):
    """`serving` is the identity in the dtype that is served, where that is not the exact one."""

    verdict: str
    reasons: list[str]
    greedy: Identity
    serving: Identity | None
    sampling: list[tuple[Sampling, Checked]]
    controls: list[Caught]

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "verdict": self.verdict,
            "reasons": self.reasons,
            "tokens_per_step": round(self.greedy.tokens_per_step, 4),
            "greedy": _of_identity(self.greedy),
            "serving_dtype": None if self.serving is None else _of_identity(self.serving),
            "sampling": [
                {
                    "temperature": how.temperature,
                    "top_p": how.top_p,
                    "tokens": found.tokens,
                    "impossible_tokens": found.impossible,
                    "p_value": found.p_value,
                    "p_values": found.p_values,
                    "accepted": {str(k): n for k, n in found.accepted.items()},
                }
                for how, found in self.sampling
            ],
            "negative_controls": [caught._asdict() for caught in self.controls],
        }


def prove(
    exact: Target,
    make: Callable[[Target], Drafter],
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int = 64,
    sampled_tokens: int = 3000,
    serving: Target | None = None,
    settings: Sequence[Sampling] = SETTINGS,
    report: Report | None = None,
) -> Proof:
    """`exact` is the target in fp32, `serving` as it is served; `make` builds the drafter for either."""
    say = report or (lambda message, share: None)
    drafter = make(exact)

    def told(what: str, start: float, length: float) -> Report:
        """Progress of a part, as that of the whole."""
        return lambda message, share: say(f"{what}: {message}", start + length * (share or 0.0))

    greedy = identity(exact, drafter, prompts, max_new_tokens, told("greedy text in fp32", 0.0, 0.2))
    served = None
    if serving is not None:
        report_of = told(f"greedy text in {str(serving.can.dtype).removeprefix('torch.')}", 0.2, 0.1)
        served = identity(serving, make(serving), prompts, max_new_tokens, report_of)
    runs = -(-sampled_tokens // max_new_tokens)
    some = [prompts[i % len(prompts)] for i in range(runs)]
    verifier = pair(exact, drafter, None)[1]
    sampling, controls = [], []
    for i, how in enumerate(settings):
        what = f"sampled text at temperature {how.temperature}, top-p {how.top_p}"
        part = told(what, 0.3 + 0.3 * i / len(settings), 0.3 / len(settings))
        sampling.append((how, check(exact, drafter, verifier, some, how, max_new_tokens, report=part)))
    for i, control in enumerate((*GREEDY, *SAMPLED)):
        say(f"control: {control.name}", 0.6 + 0.05 * i)
        if control.target is not None and control.applies(drafter, Sampling()):
            controls.append(_greedy_control(control, exact, drafter, prompts, greedy.plain, max_new_tokens))
        elif control.verifier is not None and control.applies(drafter, settings[0]):
            controls.append(_sampled_control(control, exact, drafter, some, settings[0], max_new_tokens))
    verdict, reasons = judge(greedy, served, sampling, controls)
    return Proof(verdict, reasons, greedy, served, sampling, controls)


def judge(
    greedy: Identity,
    serving: Identity | None,
    sampling: Sequence[tuple[Sampling, Checked]],
    controls: Sequence[Caught],
) -> tuple[str, list[str]]:
    """fail if anything differs that rounding cannot explain, inconclusive if the run could not have shown it."""
    failures = []
    for name, arm in (("fp32", greedy), ("the serving dtype", serving)):
        if arm is not None and (wrong := [d for d in arm.divergences if not d.rounding]):
            failures.append(
                f"greedy text in {name} differs on {len(wrong)} of {arm.prompts} prompts where the target is not near "
                f"a tie: prompt {wrong[0].prompt}, token {wrong[0].at}, logit gap {wrong[0].gap:.3g}"
            )
    for how, found in sampling:
        if found.p_value < LEVEL:
            worst = min(found.p_values, key=lambda name: found.p_values[name], default="impossible tokens")
            failures.append(
                f"sampled text at temperature {how.temperature}, top-p {how.top_p} does not follow the target's law: "
                f"p = {found.p_value:.2g} ({worst}), {found.impossible} impossible tokens"
            )
    if failures:
        return "fail", failures
    doubts = [f"the control '{c.name}' was not caught in {c.tokens} tokens" for c in controls if not c.caught]
    if greedy.tokens_per_step < LEAST_GAIN:
        doubts.append(
            f"{greedy.tokens_per_step:.2f} tokens per step, less than {LEAST_GAIN}: too little was accepted for this "
            "run to show a fault"
        )
    return ("inconclusive", doubts) if doubts else ("pass", [])


def _greedy_control(
    control: Control, target: Target, drafter: Drafter, prompts: Sequence[list[int]], plain: list[list[int]], limit: int
) -> Caught:
    """Until an answer differs from the plain one."""
    assert control.target is not None
    faulty, tokens = control.target(target), 0
    for ids, expected in zip(prompts, plain, strict=True):
        found = generate(faulty, ids, drafter=drafter, max_new_tokens=limit).token_ids
        if found != expected:
            return Caught(control.name, "greedy", True, tokens + first_difference(found, expected) + 1, None)
        tokens += len(found)
    return Caught(control.name, "greedy", False, tokens, None)


def _sampled_control(
    control: Control, target: Target, drafter: Drafter, prompts: Sequence[list[int]], how: Sampling, limit: int
) -> Caught:
    """Until it is caught, with no more tokens than the proof itself used."""
    assert control.verifier is not None
    raw = replace(how, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0) if control.raw else None
    found = Checked(0, {}, 0, {}, 1.0)
    for found in checks(target, drafter, control.verifier(how), prompts, how, limit, decoded=raw):
        if found.p_value < LEVEL:
            break
    return Caught(control.name, f"temperature {how.temperature}", found.p_value < LEVEL, found.tokens, found.p_value)


def _of_identity(found: Identity) -> dict[str, Any]:
    return {
        "prompts": found.prompts,
        "identical": found.identical,
        "tokens": found.tokens,
        "tokens_per_step": round(found.tokens_per_step, 4),
        "accepted": {str(k): n for k, n in found.accepted.items()},
        "divergences": [_of_divergence(d) for d in found.divergences],
    }


def _of_divergence(d: Divergence) -> dict[str, Any]:
    return {**d._asdict(), "rounding": d.rounding}
