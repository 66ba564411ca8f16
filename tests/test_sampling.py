"""From logits to tokens: processors against transformers, and bugs.md B04 to B09, S07, S11."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as theirs

import headstart as hs
from headstart import requests
from headstart.core import Budget, Committed, Features, Kind, Taps
from headstart.errors import BadInput
from headstart.sampling import Coin, History, Sampling, at_least_fp32, draws, law, scores, truncated_softmax
from headstart.targets.base import Rows
from headstart.testing import Mixed, Oracle, table_target, tiny_target
from headstart.testing.exact import enumerate_law, loop_law, random_table, total_variation
from headstart.tree import chain
from headstart.verify import base as verify_base
from helpers import Coverage, blurred, prompts, stock

quick = settings(deadline=None, derandomize=True, max_examples=100)

# --- the chain against transformers' own processors

PROMPT, OUTPUT, PATH = [3, 5, 5, 9, 2], [7, 3, 11], [4, 7]
EOS = [6, 13]
V = 40

ALONE = {
    "logit bias": (
        Sampling(logit_bias={3: -2.5, 8: 4.0}),
        lambda: [theirs.SequenceBiasLogitsProcessor({(3,): -2.5, (8,): 4.0})],
    ),
    "bad words": (
        Sampling(bad_words=[[8], [4, 7, 9], [11, 4, 7, 1], [5, 2]]),
        lambda: [theirs.NoBadWordsLogitsProcessor([[8], [4, 7, 9], [11, 4, 7, 1], [5, 2]])],
    ),
    "minimum not reached": (
        Sampling(min_new_tokens=6, eos=EOS),
        lambda: [theirs.MinNewTokensLengthLogitsProcessor(len(PROMPT), 6, EOS)],
    ),
    "minimum reached": (
        Sampling(min_new_tokens=5, eos=EOS),
        lambda: [theirs.MinNewTokensLengthLogitsProcessor(len(PROMPT), 5, EOS)],
    ),
    "repetition": (Sampling(repetition_penalty=1.3), lambda: [theirs.RepetitionPenaltyLogitsProcessor(1.3)]),
    "repetition below 1": (Sampling(repetition_penalty=0.8), lambda: [theirs.RepetitionPenaltyLogitsProcessor(0.8)]),
    "temperature": (Sampling(temperature=0.7), lambda: [theirs.TemperatureLogitsWarper(0.7)]),
    "top-k": (Sampling(top_k=5), lambda: [theirs.TopKLogitsWarper(5)]),
    "top-p": (Sampling(top_p=0.8), lambda: [theirs.TopPLogitsWarper(0.8)]),
    "tiny top-p": (Sampling(top_p=1e-6), lambda: [theirs.TopPLogitsWarper(1e-6)]),
    "min-p": (Sampling(min_p=0.15), lambda: [theirs.MinPLogitsWarper(0.15)]),
}
EVERYTHING = Sampling(
    temperature=0.8, top_k=12, top_p=0.9, min_p=0.05, repetition_penalty=1.2, logit_bias={3: 1.5, 20: 3.0},
    bad_words=[[8], [7, 9]], min_new_tokens=9, eos=EOS,
)  # fmt: skip
IN_ORDER = [
    theirs.SequenceBiasLogitsProcessor({(3,): 1.5, (20,): 3.0}),
    theirs.NoBadWordsLogitsProcessor([[8], [7, 9]]),
    theirs.MinNewTokensLengthLogitsProcessor(len(PROMPT), 9, EOS),
    theirs.RepetitionPenaltyLogitsProcessor(1.2),
    theirs.TemperatureLogitsWarper(0.8),
    theirs.TopKLogitsWarper(12),
    theirs.TopPLogitsWarper(0.9),
    theirs.MinPLogitsWarper(0.05),
]


def history(prompt=PROMPT, output=OUTPUT):
    past = History(prompt)
    for token in output:
        past.emit(token)
    return past


def rows(tied, count=20):
    """Random logits; half-integer ones have many ties."""
    logits = 3 * torch.randn(count, V, generator=torch.Generator().manual_seed(1))
    return (2 * logits).round() / 2 if tied else logits


def reference(logits, processors):
    ids = torch.tensor([[*PROMPT, *OUTPUT, *PATH]])
    return torch.softmax(LogitsProcessorList(processors)(ids, logits[None].clone())[0], 0)


def hot(sampling):
    return sampling if sampling.temperature else Sampling(**{**vars(sampling), "temperature": 1.0})


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("tied", (False, True))
def test_each_processor_equals_that_of_transformers(name, tied):
    sampling, processors = ALONE[name]
    touched = False
    for logits in rows(tied):
        ours, other = law(logits, hot(sampling), history(), PATH), reference(logits, processors())
        if tied and "top-p" in name:  # which of equal tokens is dropped is anyone's choice
            ours, other = ours.sort().values, other.sort().values
        torch.testing.assert_close(ours, other, atol=1e-6, rtol=0)
        touched |= not torch.allclose(ours, torch.softmax(logits, 0), atol=1e-3)
    assert touched or name == "minimum reached"


def test_the_whole_chain_equals_theirs_in_the_same_order():
    for logits in rows(False):
        torch.testing.assert_close(
            law(logits, EVERYTHING, history(), PATH), reference(logits, IN_ORDER), atol=1e-6, rtol=0
        )


@pytest.mark.parametrize("swap", [(0, 3), (4, 6), (5, 6), (4, 7)])
def test_another_order_gives_another_law(swap):
    """So the test above does see the order (but for repetition and temperature, which commute)."""
    first, second = swap
    order = list(IN_ORDER)
    order[first], order[second] = order[second], order[first]
    different = [
        (law(logits, EVERYTHING, history(), PATH) - reference(logits, order)).abs().max() > 1e-4
        for logits in rows(False)
    ]
    assert any(different)


def test_presence_and_frequency_count_output_and_path_only():
    logits = torch.zeros(V)
    # output 7, 3, 11 and path 4, 7: token 7 twice; 5 and 9 stand in the prompt only
    got = scores(logits, Sampling(presence_penalty=0.5, frequency_penalty=0.25), history(), PATH)
    expected = {7: -1.0, 3: -0.75, 11: -0.75, 4: -0.75}
    assert got.tolist() == [expected.get(x, 0.0) for x in range(V)]
    assert scores(logits, Sampling(frequency_penalty=-2.0), history(), PATH)[7] == 4.0
    assert scores(logits, Sampling(presence_penalty=0.5), history(output=[]), []).tolist() == logits.tolist()


def test_a_row_is_not_changed_in_place():
    logits = rows(False)[0]
    before = logits.clone()
    law(logits, EVERYTHING, history(), PATH)
    assert torch.equal(logits, before)


def test_laws_are_fp32_and_fp64_stays():
    for dtype, kept in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
    ):
        for sampling in (EVERYTHING, Sampling(), Sampling(temperature=1.0)):
            assert law(rows(False)[0].to(dtype), sampling, history(), PATH).dtype == kept


def test_processors_that_leave_nothing_are_refused():
    nothing = Sampling(temperature=1.0, logit_bias=dict.fromkeys(range(V), float("-inf")))
    with pytest.raises(BadInput, match="leave no token"):
        law(rows(False)[0], nothing, history(), PATH)


# --- properties

ROW = st.lists(st.one_of(st.floats(-30, 30, width=32), st.just(float("-inf"))), min_size=1, max_size=80).filter(
    lambda row: max(row) > float("-inf")
)


@quick
@given(ROW, st.integers(0, 90), st.floats(0.01, 1), st.floats(0, 0.99))
def test_truncation_is_a_law_on_the_best_tokens(row, top_k, top_p, min_p):
    score_V = torch.tensor(row)
    p_V = truncated_softmax(score_V, Sampling(top_k=top_k, top_p=top_p, min_p=min_p))
    full_V = torch.softmax(score_V, 0)
    kept = p_V > 0
    assert float(p_V.sum()) == pytest.approx(1, abs=1e-5)
    assert (p_V >= 0).all()
    assert full_V[kept].max() == full_V.max()
    assert not kept[score_V == float("-inf")].any()
    if not kept.all():  # nothing kept is less likely than anything dropped
        assert full_V[kept].min() >= full_V[~kept].max()
    if top_k:
        assert kept.sum() <= max(top_k, int((score_V >= score_V.topk(min(top_k, len(row))).values[-1]).sum()))
    torch.testing.assert_close(p_V, torch.where(kept, full_V, 0) / full_V[kept].sum(), atol=1e-6, rtol=1e-4)


def test_top_p_beyond_the_first_64_tokens():
    """The most likely tokens are looked at in growing prefixes; every prefix length gives the same answer."""
    generator = torch.Generator().manual_seed(2)
    for size, scale in ((50, 1.0), (3000, 0.1), (3000, 1.0), (3000, 4.0)):
        score_V = scale * torch.randn(size, generator=generator)
        for top_p in (0.3, 0.9, 0.999):
            other = theirs.TopPLogitsWarper(top_p)(torch.zeros(1, 1, dtype=torch.long), score_V[None])[0]
            ours = truncated_softmax(score_V, Sampling(top_p=top_p))
            torch.testing.assert_close(ours, torch.softmax(other, 0), atol=1e-6, rtol=0)


def coin_showing(u):
    coin = Coin(0)
    coin._rng = SimpleNamespace(random=lambda: u)
    return coin


UNIFORM = st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 5e-324, 1 - 2**-53, 0.5]))
LAW = st.lists(st.one_of(st.just(0.0), st.floats(1e-30, 1)), min_size=1, max_size=50).filter(any)


@quick
@given(LAW, UNIFORM, st.sampled_from([torch.float32, torch.float64]))
def test_a_draw_has_mass_and_inverts_the_cumulative_law(weights, u, dtype):
    law_V = torch.tensor(weights, dtype=dtype)
    token = coin_showing(u).draw(law_V)
    assert law_V[token] > 0
    cumulative = law_V.double().cumsum(0)
    slack = 1e-9 * float(cumulative[-1])
    assert (
        float(cumulative[token] - law_V[token]) - slack <= u * float(cumulative[-1]) <= float(cumulative[token]) + slack
    )


@quick
@given(UNIFORM, st.floats(0, 2), st.floats(0, 2))
def test_accept_compares_without_dividing(u, numerator, denominator):
    assert coin_showing(u).accept(numerator, denominator) is (u * denominator < numerator)
    assert not coin_showing(u).accept(0.0, denominator)


@quick
@given(LAW, st.integers(0, 2**32), st.data())
def test_draws_without_replacement_are_distinct_and_use_up_the_mass_first(weights, seed, data):
    q_V = torch.tensor(weights, dtype=torch.float64)
    k = data.draw(st.integers(1, len(weights)))
    drawn = draws(q_V, k, True, Coin(seed))
    assert len(set(drawn)) == k
    assert all(q_V[x] > 0 for x in drawn[: int((q_V > 0).sum())])
    assert torch.equal(q_V, torch.tensor(weights, dtype=torch.float64))


# --- B04: minimum length


class Foreseen(Mixed):
    """Drafts the answer it was told, so that whole drafts are accepted under any processors."""

    def __init__(self, target, depth, answer, prompt_length, pattern):
        super().__init__(target, depth, pattern)
        self.answer, self.prompt_length = answer, prompt_length

    def _sprout(self, number, sight, depth, nodes):
        done = len(sight.tokens) - self.prompt_length
        sight.ahead = lambda count: self.answer[done : done + count]
        return super()._sprout(number, sight, depth, nodes)


def test_b04_minimum_length_on_every_row(tiny):
    """EOS declared at position 3, so a minimum up to 3 stops there and a larger one moves on."""
    target, seen = tiny(), Coverage(1, 3, 6)
    free = {tuple(ids): stock(target, ids, 14) for ids in prompts(7, seed=2, low=3)}
    fresh = [ids for ids, text in free.items() if text[3] not in text[:3]]
    assert len(fresh) >= 4
    for minimum in (0, 2, 3, 4, 5, 8):
        for ids in fresh[:3]:
            eos = [free[ids][3], 90]
            how = Sampling(eos=eos, min_new_tokens=minimum)
            expected = stock(target, list(ids), 14, eos_token_id=eos, min_new_tokens=minimum)
            assert (len(expected) == 4) == (minimum <= 3)
            assert hs.generate(target, list(ids), max_new_tokens=14, sampling=how).token_ids == expected
            for depth in (1, 3, 6):
                for pattern, width in (([depth], 3), ([0, depth, depth // 2], 1)):
                    for drafter in (
                        Mixed(target, depth, pattern, width),
                        Foreseen(target, depth, expected, len(ids), pattern),
                    ):
                        out = hs.generate(target, list(ids), drafter=drafter, max_new_tokens=14, sampling=how)
                        assert out.token_ids == expected
                        seen.see(out)
    seen.demand()


# --- B05: q is the law that was drawn from


class Rounded:
    """A table target whose logits come in bf16."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def extend(self, cache, token_BN, tree, needs):
        rows, features = self.inner.extend(cache, token_BN, tree, needs)
        return Rows(rows.hidden_BND, lambda hidden: rows.project(hidden).bfloat16()), features


WARPS = (
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.5, "top_k": 2, "top_p": 0.9},
)


@pytest.mark.parametrize("warp", WARPS, ids=str)
@pytest.mark.parametrize("bf16", (False, True))
def test_b05_the_reported_q_is_the_law_of_the_draws(warp, bf16):
    q = random_table(8, 1, 3)
    model = Rounded(q) if bf16 else q
    trees = {
        Kind.IID: hs.StaticTree(paths=[(0,), (1,)], kind=Kind.IID),
        Kind.WITHOUT_REPLACEMENT: hs.StaticTree(paths=[(0,), (1,)], kind=Kind.WITHOUT_REPLACEMENT),
    }
    for kind, policy in trees.items():
        reported = []

        def pair(coin, policy=policy, reported=reported):
            drafter = hs.DraftModel(model, policy)
            state = drafter.absorb(drafter.start(1), Committed([[4]], [5], [[-1]], Features(None, ())))
            draft = drafter.draft(state, Budget([1], 64), [Sampling(**warp)], [coin])
            reported.append(draft.q_BRV[0, int(draft.q_row_BN[0, 0])])
            return tuple(draft.token_BN[0, 1:].tolist())

        drawn = enumerate_law(pair)
        row = reported[0]
        assert row.dtype == (torch.float32 if bf16 else torch.float64)
        assert all(torch.equal(row, other) for other in reported)
        expected = truncated_softmax(model_logits(model, 5) / warp["temperature"], Sampling(**warp))
        close = 1e-6 if bf16 else 1e-14
        torch.testing.assert_close(row, expected, atol=close, rtol=close)
        assert int((row > 0).sum()) >= 2
        again = row if kind is Kind.IID else 1 - row[:, None]
        joint = row[:, None] * (again[None] if kind is Kind.IID else row[None] / again)
        if kind is Kind.WITHOUT_REPLACEMENT:
            joint.fill_diagonal_(0)
        law_of_pairs = {(a, b): float(joint[a, b]) for a in range(8) for b in range(8) if joint[a, b] > 0}
        assert total_variation(drawn, law_of_pairs) < 1e-6


def model_logits(model, token):
    rows, _ = model.extend(model.empty(1), torch.tensor([[token]]), chain(1, 1), Taps())
    return at_least_fp32(rows.logits_RNV([0])[0, 0])


@pytest.mark.parametrize("warp", WARPS, ids=str)
@pytest.mark.parametrize("kind", (Kind.IID, Kind.WITHOUT_REPLACEMENT), ids=lambda k: k.name)
@pytest.mark.parametrize("bf16", (False, True))
def test_b05_the_emitted_law_is_the_target_s(warp, kind, bf16):
    """Both sides truncated and tempered, the drafter's logits in bf16: the answer's second token, drafted."""
    p, q = random_table(8, 1, 4), random_table(8, 1, 3)
    p.table[0] = torch.nn.functional.one_hot(torch.tensor(5), 8)
    policy = hs.StaticTree(paths=[(0,), (1,)], kind=kind)
    found = loop_law(p, hs.DraftModel(Rounded(q) if bf16 else q, policy), hs.Lossless(), Sampling(**warp), [0], 3)
    plain = loop_law(p, hs.PromptLookup(min_ngram=3), hs.Lossless(), Sampling(**warp), [0], 3)
    assert total_variation(found, plain) < (1e-6 if bf16 else 1e-12)


# --- B06: deterministic proposals


@pytest.mark.parametrize("beams", (1, 3))
def test_b06_argmax_and_beams_are_point_masses(beams):
    """p = (.5, .3, .2) with a drafter that always proposes its best: the law stays p, at every temperature."""
    p, q = table_target([0.5, 0.3, 0.2]), table_target([0.9, 0.06, 0.04])
    drafter = hs.DraftModel(q, hs.StaticTree(paths=[(rank,) for rank in range(beams)]))
    assert drafter.kind is Kind.POINT
    law = loop_law(p, drafter, hs.Lossless(), Sampling(temperature=1.0), [0], 3)
    expected = {(a, b, c): x * y * z for a, x in enumerate((0.5, 0.3, 0.2)) for b, y in enumerate((0.5, 0.3, 0.2))
                for c, z in enumerate((0.5, 0.3, 0.2))}  # fmt: skip
    assert total_variation(law, expected) < 1e-12


# --- B07: several siblings (the general case is in test_exact.py)


@pytest.mark.parametrize("kind", Kind, ids=lambda k: k.name)
def test_b07_three_siblings_then_two(kind):
    """p with a zero and a 0.99; siblings that cover the support, and i.i.d. ones that repeat."""
    p = table_target([[0.0, 0.99, 0.01], [0.3, 0.7, 0.0], [0.2, 0.2, 0.6]])
    q = random_table(3, 1, 8)
    policy = hs.StaticTree(paths=[(0,), (1,), (2,), (0, 0), (0, 1)], kind=kind)
    found = loop_law(p, hs.DraftModel(q, policy), hs.Lossless(), Sampling(temperature=1.0), [1, 2], 3)
    plain = loop_law(p, hs.PromptLookup(min_ngram=3), hs.Lossless(), Sampling(temperature=1.0), [1, 2], 3)
    assert total_variation(found, plain) < 1e-12


# --- B08: processors on drafted rows


class Frequency(LogitsProcessor):
    """transformers has none: minus `presence + frequency * count` over the output."""

    def __init__(self, skip, presence, frequency):
        self.skip, self.presence, self.frequency = skip, presence, frequency

    def __call__(self, input_ids, scores):
        count = torch.bincount(input_ids[0, self.skip :], minlength=scores.shape[1]).to(scores)
        return scores - self.presence * (count > 0) - self.frequency * count


def greedy_options(target, ids):
    """name: (our settings, what transformers takes)"""
    second = stock(target, ids, 2)[1]
    words = [stock(target, ids, 6)[1:3], stock(target, ids, 6)[4:5]]
    return {
        "bias": (Sampling(logit_bias={second: -100.0}), {"sequence_bias": {(second,): -100.0}}),
        "repetition": (Sampling(repetition_penalty=1.3), {"repetition_penalty": 1.3}),
        "frequency": (Sampling(frequency_penalty=2.0), Frequency(len(ids), 0, 2.0)),
        "frequency below 0": (Sampling(frequency_penalty=-2.0), Frequency(len(ids), 0, -2.0)),
        "presence": (Sampling(presence_penalty=1.5), Frequency(len(ids), 1.5, 0)),
        "bad words": (Sampling(bad_words=words), {"bad_words_ids": words}),
        "all": (
            Sampling(logit_bias={second: -100.0}, repetition_penalty=1.3, bad_words=words),
            {"sequence_bias": {(second,): -100.0}, "repetition_penalty": 1.3, "bad_words_ids": words},
        ),
    }


OPTIONS = ("bias", "repetition", "frequency", "frequency below 0", "presence", "bad words", "all")


@pytest.mark.parametrize("option", OPTIONS)
def test_b08_processors_on_drafted_rows(tiny, option):
    target = tiny()
    seen, moved = Coverage(1, 4), 0
    for number, ids in enumerate(prompts(3, seed=4, low=4, high=10)):
        how, other = greedy_options(target, ids)[option]
        settings = other if isinstance(other, dict) else {"logits_processor": LogitsProcessorList([other])}
        expected = stock(target, ids, 24, **settings)
        moved += expected != stock(target, ids, 24)
        assert hs.generate(target, ids, max_new_tokens=24, sampling=how).token_ids == expected
        for depth in (1, 4):
            for drafter in (
                Mixed(target, depth, [depth, 0, depth // 2], width=1 + number % 2),
                Foreseen(target, depth, expected, len(ids), [depth, 0, depth // 2]),
                hs.PromptLookup(depth=depth, min_ngram=1, branches=1 + 2 * (number % 2)),
            ):
                out = hs.generate(target, ids, drafter=drafter, max_new_tokens=24, sampling=how)
                assert out.token_ids == expected
                seen.see(out)
    assert moved >= 2
    seen.demand()


def test_b08_bad_words_as_text(tiny):
    """A word is banned as it stands and after a space; what begins like it is not."""
    target = tiny()
    ids = prompts(1, seed=4, low=8)[0]
    word = target.tokenizer.decode(stock(target, ids, 12)[4:6])
    out = hs.generate(target, ids, max_new_tokens=24, sampling=Sampling(bad_words=[word]))
    assert word in hs.generate(target, ids, max_new_tokens=24).text
    assert word not in out.text
    drafted = hs.generate(
        target, ids, drafter=Mixed(target, 4, [4, 2, 0]), max_new_tokens=24, sampling=Sampling(bad_words=[word])
    )
    assert drafted.token_ids == out.token_ids


def test_b08_sampled_rows_too():
    """Exact law of the loop with every processor on, against plain decoding's, which transformers vouches for above."""
    p, q = random_table(4, 1, 7, concentration=2), random_table(4, 1, 8)
    how = Sampling(
        temperature=0.8, top_p=0.95, min_p=0.02, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=-0.3,
        logit_bias={2: 0.7}, bad_words=[[1, 2], [2, 2]], min_new_tokens=2, eos=0,
    )  # fmt: skip
    plain = loop_law(p, hs.PromptLookup(min_ngram=9), hs.Lossless(), how, [3, 2], 3)
    assert len(plain) > 10
    for out in plain:
        assert 0 not in out[:2] and not {(1, 2), (2, 2)} & set(pairwise((2, *out)))
    for kind in Kind:
        policy = hs.StaticTree(paths=[(0,), (1,)], kind=kind)
        for verifier in (hs.Lossless(), hs.TargetOnly()):
            assert total_variation(loop_law(p, hs.DraftModel(q, policy), verifier, how, [3, 2], 3), plain) < 1e-12


# --- B09: seeds


def methods(target, model):
    tree = [(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]
    return {
        "plain": (None, None),
        "lookup": (hs.PromptLookup(depth=3, min_ngram=1), None),
        "lookup tree": (hs.PromptLookup(depth=3, min_ngram=1, branches=3), hs.Lossless()),
        "oracle": (Oracle(target, 3), None),
        "mixed tree": (Mixed(target, 3, [3, 1, 0], width=2), hs.Lossless()),
        "model, point chain": (hs.DraftModel(model, hs.Chain(depth=3)), hs.TargetOnly()),
        "model, iid chain": (hs.DraftModel(model, hs.Chain(depth=3, kind=Kind.IID)), None),
        "model, iid tree": (hs.DraftModel(model, hs.StaticTree(paths=tree, kind=Kind.IID)), hs.TargetOnly()),
        "model, without replacement": (
            hs.DraftModel(model, hs.StaticTree(paths=tree, kind=Kind.WITHOUT_REPLACEMENT)),
            None,
        ),
        "typical": (Oracle(target, 3), hs.Typical()),
    }


METHODS = list(methods(table_target([1.0]), None))
TABLES = (random_table(12, 2, 21), random_table(12, 2, 22))


@pytest.mark.parametrize("method", METHODS)
def test_b09_a_seed_is_honoured(method):
    drafter, verifier = methods(*TABLES)[method]

    def texts(batch, seeds):
        how = [Sampling(temperature=1.0, seed=seed) for seed in seeds]
        outputs = hs.generate(TABLES[0], batch, drafter=drafter, max_new_tokens=20, sampling=how, verifier=verifier)
        return [out.token_ids for out in outputs]

    alone = texts([[5, 1]], [7])[0]
    assert alone == texts([[5, 1]], [7])[0] == texts([[2], [5, 1], [9, 9, 4]], [1, 7, 2])[1]
    many = texts([[5, 1]] * 50, range(1, 51))
    assert many[6] == alone
    if method != "typical":  # draws the first token only; the lossy walk after it is an argmax
        assert len({tuple(text) for text in many}) >= 10
    assert [texts([[5, 1]], [seed])[0] for seed in range(1, 9)] == many[:8]


@pytest.mark.parametrize("method", METHODS)
def test_b09_temperature_0_ignores_the_seed(method):
    drafter, verifier = methods(*TABLES)[method]
    texts = {
        tuple(
            hs.generate(
                TABLES[0], [5], drafter=drafter, max_new_tokens=20, sampling=Sampling(seed=seed), verifier=verifier
            ).token_ids
        )
        for seed in (1, 2, None)
    }
    assert texts == {tuple(hs.generate(TABLES[0], [5], max_new_tokens=20).token_ids)}


def test_b09_without_a_seed_texts_differ():
    texts = {tuple(hs.generate(TABLES[0], [5], max_new_tokens=20, sampling=Sampling(temperature=1.0)).token_ids)
             for _ in range(5)}  # fmt: skip
    assert len(texts) == 5


def test_b09_accept_tests_of_all_steps_use_fresh_uniforms(monkeypatch):
    """A generator that is made anew every step shows the same numbers in each of them."""
    shown = []

    class Watched(Coin):
        def accept(self, numerator, denominator):
            u = float(self._rng.random())
            shown.append(u)
            return u * denominator < numerator

    monkeypatch.setattr(requests, "Coin", Watched)
    drafter, _ = methods(*TABLES)["model, iid chain"]
    hs.generate(TABLES[0], [5], drafter=drafter, max_new_tokens=1500, sampling=Sampling(temperature=1.0, seed=3))
    assert len(shown) > 1000
    assert len(set(shown)) == len(shown)
    due = len(shown) / 20
    statistic = float(((torch.histc(torch.tensor(shown), 20, 0, 1) - due) ** 2 / due).sum())
    assert float(torch.special.gammaincc(torch.tensor(19 / 2), torch.tensor(statistic / 2))) > 1e-3
    lag = torch.corrcoef(torch.tensor([shown[:-1], shown[1:]]))[0, 1]
    assert abs(float(lag)) < 4 / len(shown) ** 0.5


# --- S07, S11: every method at every temperature, and temperature means something


@pytest.mark.parametrize("temperature", (0.0, 0.5, 1.0))
@pytest.mark.parametrize("method", METHODS)
def test_s07_every_method_at_every_temperature(tiny, method, temperature):
    target = tiny()
    drafter, verifier = methods(target, blurred(0.05))[method]
    how = Sampling(temperature=temperature, seed=1)
    texts = prompts(2, seed=7)
    outputs = hs.generate(target, texts, drafter=drafter, max_new_tokens=12, sampling=how, verifier=verifier)
    assert all(len(out.token_ids) == 12 and set(out.token_ids) <= set(range(96)) for out in outputs)
    if not temperature:
        assert [out.token_ids for out in outputs] == [stock(target, ids, 12) for ids in texts]


@pytest.mark.parametrize("method", [m for m in METHODS if m != "typical"])
def test_s11_sampled_requests_are_sampled(method):
    drafter, verifier = methods(*TABLES)[method]

    def texts(**how):
        how = Sampling(seed=1, n=8, **how)
        out = hs.generate(TABLES[0], [5], drafter=drafter, max_new_tokens=20, sampling=how, verifier=verifier)
        return {tuple(sample.token_ids) for sample in out.samples}

    greedy = {tuple(hs.generate(TABLES[0], [5], max_new_tokens=20).token_ids)}
    assert len(texts(temperature=1.0)) == 8
    assert texts(temperature=1.0, top_k=1) == texts(temperature=1.0, top_p=1e-9) == greedy
    assert texts(temperature=1.0, min_p=0.99) == texts(temperature=1e-4) == greedy
    assert len(texts(temperature=1.0, top_k=3)) > 1


# --- cost: processors run where the walk goes


@pytest.mark.parametrize(
    "how", (Sampling(temperature=1.0, seed=1), Sampling(repetition_penalty=1.2)), ids=("law", "scores")
)
@pytest.mark.parametrize("verifier", (hs.Lossless(), hs.TargetOnly()), ids=lambda v: v.name)
def test_processors_run_on_visited_rows_only(tiny, monkeypatch, how, verifier):
    target, calls = tiny(), []
    name = "scores" if how.greedy else "law"
    real = getattr(verify_base, name)
    monkeypatch.setattr(verify_base, name, lambda *args: calls.append(args) or real(*args))
    drafter = Mixed(target, 4, [4, 2, 0], width=5)
    out = hs.generate(target, prompts(1)[0], drafter=drafter, max_new_tokens=30, sampling=how, verifier=verifier)
    visited = 1 + sum((taken + 1) * count for taken, count in out.stats.accepted.items())
    assert len(calls) == visited
    assert out.stats.drafted > 3 * visited


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-3])
def test_a_tiny_temperature_is_the_argmax(temperature: float) -> None:
    logits = torch.tensor([3.0, 90.0, -50.0, 89.0])
    p = law(logits, Sampling(temperature=temperature), History([1]), [])
    assert p.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_that_bans_everything_is_an_error_at_any_temperature(temperature: float) -> None:
    target = tiny_target(vocab_size=20)
    how = Sampling(temperature=temperature, logit_bias=dict.fromkeys(range(20), float("-inf")))
    with pytest.raises(BadInput, match="leave no token"):
        hs.generate(target, [1, 2, 3], sampling=how, max_new_tokens=4)
