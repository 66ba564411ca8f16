"""The real loop against exactly known laws: Pearson chi-square, and injected bugs that it must find.

Every verifier and proposal kind runs through `hs.generate`: sampler, policy, tree, caches and commit are the real
ones, only the model is a table (verification.md 5.12, items 2 to 4). The target is a Markov chain over 8 tokens,
and the cells are its 64 pairs (token, next token): given the first, the next ones are independent draws from the
processed row, so every token of a long answer counts as a sample and the statistic has at most 8 * 7 degrees of
freedom. The average total variation of the rows that N samples find with power .99 follows from
sum (o - p)^2 / p >= 4 TV^2: 4 N TV^2 = 95 for 56 degrees of freedom at level 1e-3 / 8. The 240,000 per pair find
TV 0.01 (verification.md 5.12). Smaller biases are the business of the exact tests. HEADSTART_SAMPLES=40000 is a quick
run that finds TV 0.024.
"""

from __future__ import annotations

import os

import pytest
import torch

import headstart as hs
from headstart.core import Kind
from headstart.drafters import draft_model
from headstart.sampling import draws
from headstart.testing import table_target
from headstart.testing.exact import random_table
from headstart.verify import lossless
from helpers import Coverage

SIZE, REQUESTS = 8, 200
SAMPLES = int(os.environ.get("HEADSTART_SAMPLES", 240_000))
LEVEL = 1e-3

P = random_table(SIZE, 1, seed=11, zeros=0.1)
Q = random_table(SIZE, 1, seed=12, zeros=0.1)
DRAFT = table_target((P.table + Q.table) / 2)
PAIR = [(0,), (1,), (0, 0), (0, 1), (1, 0)]


def model(kind, paths=None, depth=2):
    policy = hs.Chain(depth=depth, kind=kind) if paths is None else hs.StaticTree(paths=paths, kind=kind)
    return hs.DraftModel(DRAFT, policy)


def run(drafter, verifier, sampling, samples, seed, seen=None):
    """The p-value of the pairs in `samples` emitted tokens."""
    how = hs.Sampling(seed=seed, n=REQUESTS, **sampling)
    each = -(-samples // REQUESTS)
    out = hs.generate(P, [0], drafter=drafter, max_new_tokens=each, sampling=how, verifier=verifier)
    count = torch.zeros(SIZE, SIZE, dtype=torch.float64)
    for sample in out.samples:
        ids = torch.tensor([0, *sample.token_ids])
        count += torch.bincount(ids[:-1] * SIZE + ids[1:], minlength=SIZE**2).view(SIZE, SIZE)
    if seen is not None:
        seen.see(*out.samples)
    return chi_square(count, processed(P.table, **sampling))


def processed(table, temperature, top_p=1.0):
    """The rows that plain decoding would draw from, by the definition of temperature and top-p."""
    law = table ** (1 / temperature)
    law = law / law.sum(-1, keepdim=True)
    best, order = law.sort(-1, descending=True)
    kept = torch.zeros_like(law).scatter(-1, order, best * (best.cumsum(-1) - best < top_p))
    return kept / kept.sum(-1, keepdim=True)


def chi_square(count, law):
    """Probability of a deviation at least this large; rare cells of a row are merged until 5 are expected."""
    expected = count.sum(-1, keepdim=True) * law
    if (count[law == 0] > 0).any():
        return 0.0
    statistic, freedom = 0.0, 0
    for seen, due in zip(count, expected, strict=True):
        rare = due < 5
        seen = torch.cat([seen[~rare], seen[rare].sum()[None]])
        due = torch.cat([due[~rare], due[rare].sum()[None]])
        used = due > 0
        statistic += float(((seen - due)[used] ** 2 / due[used]).sum())
        freedom += int(used.sum()) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(statistic / 2)))


CASES = {
    "lossless, lookup chain": (lambda: hs.PromptLookup(depth=2, min_ngram=1), hs.Lossless(), {"temperature": 1.0}),
    "lossless, point mass tree": (lambda: model(Kind.POINT, PAIR), hs.Lossless(), {"temperature": 0.7}),
    "lossless, iid chain": (lambda: model(Kind.IID), hs.Lossless(), {"temperature": 0.7}),
    "lossless, iid tree": (lambda: model(Kind.IID, PAIR), hs.Lossless(), {"temperature": 1.0}),
    "lossless, without replacement": (
        lambda: model(Kind.WITHOUT_REPLACEMENT, PAIR),
        hs.Lossless(),
        {"temperature": 1.0, "top_p": 0.8},
    ),
    "target-only, lookup tree": (
        lambda: hs.PromptLookup(depth=2, min_ngram=1, branches=3),
        hs.TargetOnly(),
        {"temperature": 1.0},
    ),
    "target-only, iid chain": (lambda: model(Kind.IID), hs.TargetOnly(), {"temperature": 1.0, "top_p": 0.8}),
    "target-only, without replacement": (
        lambda: model(Kind.WITHOUT_REPLACEMENT, PAIR),
        hs.TargetOnly(),
        {"temperature": 0.7},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_law_through_the_loop(case):
    make, verifier, sampling = CASES[case]
    seen = Coverage(2)
    level = LEVEL / len(CASES)
    value = run(make(), verifier, sampling, SAMPLES, 1, seen)
    if value < level:  # one more chance, with a fresh seed
        value = run(make(), verifier, sampling, SAMPLES, 2, seen)
    assert value >= level
    seen.demand(distinct=SIZE)


def test_the_statistic_is_calibrated():
    """p-values of true samples are spread out, those of samples with a bias of TV 0.05 are not."""
    generator = torch.Generator().manual_seed(0)
    values = []
    for table in (P.table, 0.95 * P.table + 0.05 * P.table.roll(1, 1)):
        rows = [torch.multinomial(row, 2000, True, generator=generator).bincount(minlength=SIZE) for row in table]
        values.append(chi_square(torch.stack(rows).double(), P.table))
    assert values[0] > 0.01
    assert values[1] < 1e-9


# --- injected bugs (verification.md 5.12, item 4)


def skipped_residual(patch):
    patch.setattr(lossless, "_normalised", lambda rest_V, before_V: before_V)
    return model(Kind.IID), hs.Lossless(), {"temperature": 1.0}


def full_q_in_the_test(patch):
    """Draws from the two likeliest tokens, hands over the law of all."""

    def truncated(q_V, k, without_replacement, coin):
        return draws(q_V * (q_V >= q_V.topk(2).values[-1]), k, without_replacement, coin)

    patch.setattr(draft_model, "draws", truncated)
    return model(Kind.IID), hs.Lossless(), {"temperature": 1.0}


class OneUniform(hs.Lossless):
    """All accept tests of a step compare with the same number."""

    def walk(self, tree, law, coin):
        same = float(coin._rng.random())

        class Stuck:
            draw = staticmethod(coin.draw)

            @staticmethod
            def accept(numerator, denominator):
                return same * denominator < numerator

        return super().walk(tree, law, Stuck)


class UnwarpedBonus(hs.Lossless):
    """The token after a fully accepted path is drawn at temperature 1."""

    def walk(self, tree, law, coin):
        def warped_above_leaves(node):
            p_V = law(node)
            return p_V if tree.trials[node] else p_V**0.7 / (p_V**0.7).sum()

        return super().walk(tree, warped_above_leaves, coin)


BUGS = {
    "residual skipped": skipped_residual,
    "full q in the test": full_q_in_the_test,
    "one uniform for all positions": lambda patch: (model(Kind.IID, depth=4), OneUniform(), {"temperature": 1.0}),
    "bonus from unwarped logits": lambda patch: (model(Kind.IID), UnwarpedBonus(), {"temperature": 0.7}),
    "typical acceptance": lambda patch: (model(Kind.POINT), hs.Typical(), {"temperature": 1.0}),
}


@pytest.mark.parametrize("bug", BUGS)
def test_injected_bugs_are_found(bug, monkeypatch):
    """With a quarter of the samples, on two seeds."""
    drafter, verifier, sampling = BUGS[bug](monkeypatch)
    for seed in (1, 2):
        value = run(drafter, verifier, sampling, 10_000, seed)
        assert value < LEVEL / len(CASES)
