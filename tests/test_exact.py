"""Verifiers by exact enumeration of the code that runs (verification.md 5.12, item 1); wrong rules must be found."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

import headstart as hs
from headstart.core import Kind, Shape, Walk, Why
from headstart.errors import BadInput, Unsupported
from headstart.sampling import Coin, draws
from headstart.testing import Mixed, Oracle, table_target
from headstart.testing.exact import (
    Proposal,
    block_law,
    chain_paths,
    emitted_law,
    enumerate_law,
    loop_law,
    random_table,
    target_law,
    total_variation,
)
from headstart.verify.base import Candidates, demand_valid
from headstart.verify.lossless import Lossless
from headstart.verify.target_only import TargetOnly
from headstart.verify.typical import Typical
from helpers import Coverage, prompts

EXACT = 1e-12
A_P = table_target([0.10, 0.20, 0.30, 0.25, 0.15])  # test vector A, verification.md 5.2
A_Q = table_target([0.40, 0.30, 0.20, 0.05, 0.05])
EXACT_VERIFIERS = (Lossless(), TargetOnly())
KINDS = pytest.mark.parametrize("kind", Kind, ids=lambda k: k.name)
VERIFIERS = pytest.mark.parametrize("verifier", EXACT_VERIFIERS, ids=lambda v: v.name)


def siblings(count):
    return [(rank,) for rank in range(count)]


def accepted(kind, count, verifier, p=A_P, q=A_Q):
    """Probability that a child of the root is accepted."""
    proposal = Proposal(q=q, paths=siblings(count), kind=kind)
    return sum(weight for block, weight in block_law(p, proposal, verifier, (0,)).items() if len(block) > 1)


def distance(proposal, verifier, p=A_P, length=1, context=(0,)):
    return total_variation(emitted_law(p, proposal, verifier, length, context), target_law(p, length, context))


# --- the method itself


def test_a_coin_walks_every_branch_once():
    def two_throws(coin):
        first = coin.accept(1.0, 4.0)
        return first, coin.draw(torch.tensor([0.0, 2.0, 6.0])) if first else None

    assert enumerate_law(two_throws) == {(False, None): 0.75, (True, 1): 0.0625, (True, 2): 0.1875}


def test_accepting_needs_no_division():
    for numerator, denominator, yes in ((0.2, 0.0, 1.0), (0.0, 0.0, 0.0), (0.0, 0.5, 0.0), (0.7, 0.5, 1.0)):
        assert enumerate_law(lambda coin, n=numerator, d=denominator: coin.accept(n, d)) == {bool(yes): 1.0}
        assert all(Coin(seed).accept(numerator, denominator) is bool(yes) for seed in range(20))


def test_a_law_without_mass_cannot_be_drawn_from():
    with pytest.raises(ValueError, match="without mass"):
        enumerate_law(lambda coin: coin.draw(torch.zeros(3)))


# --- test vector A


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        (Kind.IID, (0.600000, 0.720000, 0.768000)),
        (Kind.WITHOUT_REPLACEMENT, (0.600000, 0.764286, 0.840298)),
        (Kind.POINT, (0.100000, 0.300000, 0.600000)),
    ],
    ids=lambda x: x.name if isinstance(x, Kind) else "",
)
def test_vector_a_acceptance(kind, table):
    """The table of verification.md 5.6."""
    assert [accepted(kind, k, Lossless()) for k in (1, 2, 3)] == pytest.approx(table, abs=1e-6)


@KINDS
@pytest.mark.parametrize("count", (1, 2, 3, 4))
@pytest.mark.parametrize("merged", (False, True))
def test_vector_a_law(kind, count, merged):
    for verifier in EXACT_VERIFIERS:
        assert distance(Proposal(q=A_Q, paths=siblings(count), kind=kind, merged=merged), verifier) < EXACT


def test_target_only_accepts_the_mass_of_the_children():
    """Whatever chose them; for drawn children that can be below 1 - TV (verification.md 5.5)."""
    assert accepted(Kind.POINT, 3, TargetOnly()) == pytest.approx(accepted(Kind.POINT, 3, Lossless()), abs=EXACT)
    assert accepted(Kind.IID, 1, TargetOnly()) == pytest.approx(0.4 * 0.1 + 0.3 * 0.2 + 0.2 * 0.3 + 0.05 * 0.4)


def test_draws_without_replacement_that_cover_the_support_always_end_in_a_child():
    """The property that i.i.d. draws lack (verification.md 5.4)."""
    p, q = table_target([0.5, 0.3, 0.2, 0.0]), table_target([0.1, 0.2, 0.3, 0.4])
    assert accepted(Kind.WITHOUT_REPLACEMENT, 4, Lossless(), p, q) == pytest.approx(1, abs=EXACT)
    assert accepted(Kind.IID, 4, Lossless(), p, q) < 0.9


# --- joint laws over context-dependent tables

PATHS = {
    "one draft token": chain_paths(1),
    "chain": chain_paths(3),
    "tree": [(0,), (1,), (0, 0), (0, 1), (1, 0)],
    "three siblings, then two": [(0,), (1,), (2,), (0, 0), (0, 1)],
    "uneven, deep": [(0,), (1,), (1, 0), (1, 0, 0), (1, 0, 1)],
}


def onehot(size, seed):
    hot = torch.randint(size, (size,), generator=torch.Generator().manual_seed(seed))
    return table_target(torch.nn.functional.one_hot(hot, size))


def sharp(size, seed):
    """One entry of 0.99 and one of 0 after every context (bugs.md B07)."""
    rows = torch.full((size, size), 0.01 / (size - 2), dtype=torch.float64)
    for i in range(size):
        rows[i, (i + seed) % size], rows[i, (i + seed + 1) % size] = 0.99, 0
    return table_target(rows)


LAWS = {  # name: (p, q) of a size and a seed
    "order 1": lambda n, s: (random_table(n, 1, s), random_table(n, 1, s + 50)),
    "order 2": lambda n, s: (random_table(n, 2, s), random_table(n, 2, s + 50)),
    "q knows less context": lambda n, s: (random_table(n, 2, s), random_table(n, 0, s + 50)),
    "zeros in p": lambda n, s: (random_table(n, 1, s, zeros=0.4), random_table(n, 1, s + 50)),
    "zeros in q": lambda n, s: (random_table(n, 1, s), random_table(n, 1, s + 50, zeros=0.4)),
    "zeros in both": lambda n, s: (random_table(n, 1, s, zeros=0.4), random_table(n, 1, s + 50, zeros=0.4)),
    "q = p": lambda n, s: (random_table(n, 1, s),) * 2,
    "q one-hot": lambda n, s: (random_table(n, 1, s), onehot(n, s)),
    "p one-hot": lambda n, s: (onehot(n, s), random_table(n, 1, s + 50)),
    "sharp p": lambda n, s: (sharp(n, s), random_table(n, 1, s + 50)),
    "sharp q": lambda n, s: (random_table(n, 1, s), sharp(n, s)),
}


@VERIFIERS
@KINDS
@pytest.mark.parametrize("shape", PATHS)
@pytest.mark.parametrize("laws", LAWS)
def test_joint_law(verifier, kind, shape, laws):
    """Sizes 3 to 5; three siblings of three tokens exhaust the support, and q with zeros runs out of mass earlier."""
    sizes = (3, 5) if len(PATHS[shape]) < 5 else (3,) if kind is Kind.IID else (3, 4)
    for seed, size in enumerate(sizes):
        p, q = LAWS[laws](size, seed)
        for merged in (False, True) if kind is Kind.IID else (False,):
            proposal = Proposal(q=q, paths=PATHS[shape], kind=kind, merged=merged)
            assert distance(proposal, verifier, p, length=3, context=(1, 0)) < EXACT


@VERIFIERS
@KINDS
@pytest.mark.parametrize("shape", PATHS)
def test_joint_law_meets_every_accept_length(verifier, kind, shape):
    p, q = LAWS["order 1"](4, 1)
    law = block_law(p, Proposal(q=q, paths=PATHS[shape], kind=kind), verifier, (0,))
    depth = max(map(len, PATHS[shape]))
    assert {len(block) - 1 for block in law} == set(range(depth + 1))


@pytest.mark.parametrize("count", (2, 3, 4, 5))
def test_support_that_runs_out(count):
    """More draws than q has mass, down to all of V: the rest is drawn uniformly (verification.md 5.4)."""
    proposal = Proposal(q=table_target([0.7, 0.3, 0, 0, 0]), paths=siblings(count), kind=Kind.WITHOUT_REPLACEMENT)
    for verifier in EXACT_VERIFIERS:
        assert distance(proposal, verifier) < EXACT


def test_a_point_mass_sibling_listed_twice_is_harmless():
    tree = Candidates([0, 2, 2], [0, 0, 0], [[1, 2], [], []], Kind.POINT)
    for verifier in EXACT_VERIFIERS:
        law = enumerate_law(lambda coin, v=verifier: first_token(v.walk(tree, lambda _: A_P.table, coin), tree))
        assert total_variation(law, dict(enumerate(A_P.table.tolist()))) < EXACT


def test_siblings_that_were_drawn_alike_met():
    """The cases above do contain repeated trials: with merged siblings a node is then tried more than once."""
    proposal = Proposal(q=A_Q, paths=siblings(3), kind=Kind.IID, merged=True)
    drawn = enumerate_law(lambda coin: proposal.draw((0,), coin))
    assert any(len(set(d.trials[0])) < len(d.trials[0]) for d in drawn)
    assert any(d.trials[0] == (1, 2, 1) for d in drawn)


def first_token(walk, tree):
    return tree.tokens[walk.kept[1]] if len(walk.kept) > 1 else walk.next


# --- the real loop, every branch of it: drafting, processors, tree, commit, and the token after a full acceptance

DRAWN = {
    "point chain": hs.Chain(depth=2),
    "point tree": hs.StaticTree(paths=[(0,), (1,), (0, 0)]),
    "iid chain": hs.Chain(depth=2, kind=Kind.IID),
    "iid tree": hs.StaticTree(paths=[(0,), (1,), (1, 0)], kind=Kind.IID),
    "without replacement": hs.StaticTree(paths=[(0,), (1,), (2,), (0, 0)], kind=Kind.WITHOUT_REPLACEMENT),
}
SETTINGS = ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 1.4, "top_k": 2, "min_p": 0.1})


def plain_law(p, length, context, temperature, top_p=1.0, top_k=0, min_p=0.0):
    """What plain sampling gives, from the definitions of the settings."""
    law = {(): 1.0}
    for _ in range(length):
        longer = {}
        for seen, weight in law.items():
            row = {x: v ** (1 / temperature) for x, v in enumerate(p.law([*context, *seen]).tolist())}
            kept, mass, total = {}, 0.0, sum(sorted(row.values())[-top_k:])
            for x in sorted(row, key=row.get, reverse=True)[: top_k or None]:
                if mass / total < top_p and row[x] >= min_p * max(row.values()):
                    kept[x] = row[x]
                mass += row[x]
            longer |= {(*seen, x): weight * v / sum(kept.values()) for x, v in kept.items() if v}
        law = longer
    return law


@VERIFIERS
@pytest.mark.parametrize("policy", DRAWN)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_law_of_the_loop(verifier, policy, settings):
    """The answer's first token comes with the prompt; the next ones are drafted, up to depth 2."""
    p, q = random_table(3, 1, 5), random_table(3, 1, 6, zeros=0.3)
    p.table[0] = torch.tensor([0, 1, 0])  # spares two thirds of the branches
    drafter = hs.DraftModel(q, DRAWN[policy])
    law = loop_law(p, drafter, verifier, hs.Sampling(**settings), [2, 0], 4)
    assert total_variation(law, plain_law(p, 4, [2, 0], **settings)) < EXACT


# --- wrong rules must be found


def at_root(choose):
    """A verifier of one level: `choose(children, p, q, coin)` gives the child to take, or the token to emit."""

    def walk(tree, law, coin):
        children = [(c, tree.tokens[c]) for c in tree.trials[0]]
        child, token = choose(children, law(0), tree.q(0) if tree.q else None, coin)
        return Walk([0], token, Why.REFUSED) if child is None else Walk([0, child], 0, Why.LEAF)

    return SimpleNamespace(walk=walk)


def residual(p, q):
    rest = (p - q).clamp(min=0)
    return rest / rest.sum()


def independent_tests(children, p, q, coin):
    for child, x in children:
        if coin.accept(float(p[x]), float(q[x])):
            return child, x
    return None, coin.draw(residual(p, q))


def without_residual(children, p, q, coin):
    for child, x in children:
        if coin.accept(float(p[x]), float(q[x])):
            return child, x
    return None, coin.draw(p)


def cumulative_rule(children, p, q, coin):
    """SGLang's walk with one coin: right for distinct siblings, counts repeated ones twice."""
    each = torch.stack([p[x] for _, x in children])
    pick = coin.draw(torch.cat([each, (1 - each.sum()).clamp(min=0)[None]]))
    if pick < len(children):
        return children[pick]
    rest = p.clone()
    rest[[x for _, x in children]] = 0
    return None, coin.draw(rest)


class Grouped(Proposal):
    """Repeated trials tested together instead of in draw order: a rank and a count per node."""

    def draw(self, context, coin):
        drawn = super().draw(context, coin)
        return drawn._replace(trials=tuple(tuple(sorted(row, key=row.index)) for row in drawn.trials))


def test_independent_tests_are_wrong():
    """verification.md 5.2."""
    wrong = at_root(independent_tests)
    proposal = Proposal(q=A_Q, paths=siblings(2), kind=Kind.IID)
    law = emitted_law(A_P, proposal, wrong, 1)
    assert [law[x,] for x in range(5)] == pytest.approx([0.14, 0.28, 0.32, 0.15, 0.11])
    assert distance(proposal, wrong) == pytest.approx(0.14)
    assert distance(Proposal(q=A_Q, paths=siblings(3), kind=Kind.IID), wrong) == pytest.approx(0.196)
    assert distance(Proposal(q=A_Q, paths=siblings(1), kind=Kind.IID), wrong) < EXACT  # right for a chain


def test_skipping_the_residual_is_wrong():
    assert distance(Proposal(q=A_Q, paths=siblings(1), kind=Kind.IID), at_root(without_residual)) > 0.1


def test_a_deterministic_proposal_taken_for_a_draw_is_wrong():
    """bugs.md B06: the top token verified with the q it was not drawn from; right as a point mass."""
    p, q = table_target([0.5, 0.3, 0.2]), table_target([0.9, 0.06, 0.04])
    top = Proposal(q=q, paths=siblings(1), kind=Kind.POINT)
    drawn = SimpleNamespace(
        walk=lambda tree, law, coin: Lossless().walk(
            Candidates(tree.tokens, tree.parents, tree.trials, Kind.IID, lambda _: q.table), law, coin
        )
    )
    assert distance(top, drawn, p) > 0.05
    assert distance(top, Lossless(), p) < EXACT


def test_repeated_siblings_under_the_cumulative_rule_are_wrong():
    """verification.md 5.5: token 2 (the third) of vector A listed twice is emitted with .60 instead of .30."""
    wrong = at_root(cumulative_rule)
    twice = Candidates([0, 2, 2], [0, 0, 0], [[1, 2], [], []], Kind.POINT)
    law = enumerate_law(lambda coin: first_token(wrong.walk(twice, lambda _: A_P.table, coin), twice))
    assert law[2] == pytest.approx(0.6)
    assert total_variation(law, dict(enumerate(A_P.table.tolist()))) == pytest.approx(0.30)
    assert distance(Proposal(q=A_Q, paths=siblings(3), kind=Kind.POINT), wrong) < EXACT


@pytest.mark.parametrize(("count", "tv"), [(2, 0.0), (3, 0.019), (4, 0.046)])
def test_testing_repeated_draws_together_is_wrong(count, tv):
    """design.md 4.6: the order of trials is the order of drawing."""
    grouped = Grouped(q=A_Q, paths=siblings(count), kind=Kind.IID, merged=True)
    assert distance(grouped, Lossless()) == pytest.approx(tv, abs=5e-4)


def test_withholding_what_was_drawn_is_wrong():
    """verification.md 5.10: p=(.5,.5), q=(.9,.1), a draft with q(x) <= .5 is dropped: (.55,.45)."""
    p, q = torch.tensor([0.5, 0.5]).double(), torch.tensor([0.9, 0.1]).double()

    def first(kind, coin):
        (x,) = draws(q, 1, False, coin)
        tree = Candidates(
            [0, x], [0, 0], [[1] if q[x] > 0.5 else [], []], kind, lambda _: q if kind is Kind.IID else None
        )
        tree = tree if kind is Kind.IID else Candidates(tree.tokens, tree.parents, tree.trials, kind)
        return first_token(Lossless().walk(tree, lambda _: p, coin), tree)

    assert enumerate_law(lambda coin: first(Kind.IID, coin)) == pytest.approx({0: 0.55, 1: 0.45})
    assert enumerate_law(lambda coin: first(Kind.POINT, coin)) == pytest.approx({0: 0.5, 1: 0.5})


@pytest.mark.parametrize("paths", ([(0,), (2,)], [(1,)], [(1,), (2,)]))
def test_ranks_left_out_of_a_tree_withhold_draws(paths):
    """Without replacement a draw left out still shaped the later ones; i.i.d. draws do not notice."""
    assert distance(Proposal(q=A_Q, paths=paths, kind=Kind.WITHOUT_REPLACEMENT), Lossless()) > 0.02
    assert distance(Proposal(q=A_Q, paths=paths, kind=Kind.IID), Lossless()) < EXACT
    with pytest.raises(BadInput, match="without replacement"):
        hs.StaticTree(paths=paths, kind=Kind.WITHOUT_REPLACEMENT)
    hs.StaticTree(paths=paths, kind=Kind.IID)


# --- typical acceptance: lossy, but exactly the rule it states


def typical_block(p, tree, context, epsilon, delta):
    """medusa.md 6 (b) by brute force over nodes: longest accepted path, likelier among equals, argmax after it."""
    found = []
    for node in range(len(tree.tokens)):
        path, score = tree.path(node), 0.0
        for depth, x in enumerate(path):
            row = p.law([*context, *path[:depth]]).tolist()
            threshold = min(epsilon, delta * math.exp(sum(v * math.log(v) for v in row if v)))
            score += math.log(row[x]) if row[x] > threshold else -math.inf
        found.append((len(path), score, path))
    _, _, path = max(f for f in found if f[1] > -math.inf)
    return (*path, int(p.law([*context, *path]).argmax()))


@pytest.mark.parametrize("paths", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize(("epsilon", "delta"), [(0.09, 0.3), (0.3, 0.09), (0.2, 0.6), (0.5, 1.0)])
def test_typical_follows_its_own_rule(paths, epsilon, delta):
    p, q = LAWS["zeros in p"](4, 3)
    proposal = Proposal(q=q, paths=paths, kind=Kind.IID)
    lengths = set()
    for drawn in enumerate_law(lambda coin: proposal.draw((0,), coin)):
        tree = proposal.candidates((0,), drawn)
        (block,) = block_of(Typical(epsilon, delta), p, tree)
        assert block == typical_block(p, tree, (0,), epsilon, delta)
        lengths.add(len(block))
    assert {1, 2} <= lengths


def block_of(verifier, p, tree, context=(0,)):
    """Every block that can come out; one only where no randomness takes part."""

    def run(coin):
        walk = verifier.walk(tree, lambda node: p.law([*context, *tree.path(node)]), coin)
        return (*(tree.tokens[node] for node in walk.kept[1:]), walk.next)

    return list(enumerate_law(run))


def test_typical_threshold_is_strict():
    p = table_target([0.5, 0.25, 0.25])  # exp(-H) = 0.354, so epsilon decides
    tree = Candidates([0, 1], [0, 0], [[1], []], Kind.POINT)
    assert block_of(Typical(epsilon=0.25, delta=1.0), p, tree) == [(0,)]
    assert block_of(Typical(epsilon=0.2499, delta=1.0), p, tree) == [(1, 0)]
    assert block_of(Typical(epsilon=1.0, delta=0.7), p, tree) == [(1, 0)]  # 0.2475
    assert block_of(Typical(epsilon=1.0, delta=0.72), p, tree) == [(0,)]  # 0.2546


def test_typical_ties_go_to_the_likelier_path():
    p = table_target([0.2, 0.45, 0.35])
    for order in ([1, 2], [2, 1]):
        tree = Candidates([0, 1, 2], [0, 0, 0], [order, [], []], Kind.POINT)
        assert block_of(Typical(), p, tree) == [(1, 1)]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_s15_typical_sums_log_probabilities(dtype):
    """bugs.md S15: products of these probabilities underflow and would tie; the second path is likelier."""
    tiny = 1e-30 if dtype == torch.float32 else 1e-200
    p_V = torch.tensor([1.0, tiny, tiny * 10], dtype=dtype)
    chain = [1, 1, 1], [2, 2, 2]
    tree = Candidates(
        [0, *chain[0], *chain[1]], [0, 0, 1, 2, 0, 4, 5], [[1, 4], [2], [3], [], [5], [6], []], Kind.POINT
    )
    for trials in ([1, 4], [4, 1]):
        swapped = Candidates(tree.tokens, tree.parents, [trials, *tree.trials[1:]], Kind.POINT)
        walk = Typical(epsilon=1e-300).walk(swapped, lambda _: p_V, Coin(0))
        assert walk.kept == [0, 4, 5, 6]


def test_typical_is_lossy_and_says_so():
    assert "LOSSY" in Typical().name
    assert not Typical().lossless
    assert not Typical().exact_for
    assert distance(Proposal(q=A_Q, paths=siblings(1), kind=Kind.IID), Typical()) > 0.2


@pytest.mark.parametrize("bad", ({"epsilon": 0.0}, {"epsilon": 1.5}, {"delta": -1.0}, {"delta": 2.0}))
def test_typical_refuses_thresholds_outside_its_range(bad):
    with pytest.raises(BadInput, match=r"expected both in \(0, 1\]"):
        Typical(**bad)


# --- what is declared is checked


@KINDS
@pytest.mark.parametrize("shape", Shape, ids=lambda s: s.name)
def test_declared_pairs(kind, shape):
    everything = frozenset((k, s) for k in Kind for s in Shape)
    for verifier in EXACT_VERIFIERS:
        assert verifier.lossless
        assert verifier.exact_for == everything
        demand_valid(verifier, kind, shape)
    demand_valid(Typical(), kind, shape)  # promises nothing, so there is nothing to check
    for only in everything:
        picky = SimpleNamespace(name="picky", lossless=True, exact_for=frozenset({only}))
        if only == (kind, shape):
            demand_valid(picky, kind, shape)
            continue
        with pytest.raises(Unsupported, match=f"`picky` is not exact for a {shape.value} of {kind.value}.*Lossless"):
            demand_valid(picky, kind, shape)


def test_a_pair_that_is_not_exact_is_refused_before_any_work():
    picky = SimpleNamespace(name="picky", lossless=True, exact_for=frozenset({(Kind.IID, Shape.CHAIN)}))
    target = table_target([0.5, 0.5])
    tree = hs.DraftModel(target, hs.StaticTree(paths=siblings(2), kind=Kind.WITHOUT_REPLACEMENT))
    for drafter in (tree, hs.PromptLookup()):
        with pytest.raises(Unsupported, match="picky"):
            hs.generate(target, [0], drafter=drafter, verifier=picky)


# --- target-only draws as plain decoding does


@pytest.mark.parametrize(
    "sampling", ({"temperature": 0.7}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}), ids=str
)
def test_target_only_gives_the_text_of_plain_sampling(tiny, sampling):
    target, depth = tiny(), 4
    asked = prompts(10, seed=3, low=4, high=12)
    settings = [hs.Sampling(seed=seed, **sampling) for seed in range(10)]
    plain = hs.generate(target, asked, max_new_tokens=24, sampling=settings)
    seen = Coverage(depth)
    drafters = {
        "oracle": Oracle(target, depth),
        "oracle tree": Oracle(target, depth, width=3),
        "mixed": Mixed(target, depth, [0, 4, 2, 1]),
        "mixed tree": Mixed(target, depth, [[4, 0, 3], [1, 2, 4]], width=3),
        "lookup": hs.PromptLookup(depth=depth, min_ngram=1),
        "lookup tree": hs.PromptLookup(depth=depth, min_ngram=1, branches=3),
    }
    for name, drafter in drafters.items():
        outputs = hs.generate(
            target, asked, drafter=drafter, max_new_tokens=24, sampling=settings, verifier=TargetOnly()
        )
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain], name
        seen.see(*outputs)
    seen.demand()
