"""Supervision by label (B21), padding and packing (S16), and: a trained row is the row that drafting drafts (S09)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import headstart as hs
from headstart.core import Budget, Committed, Draft, Features, Kind, Readout, Taps
from headstart.drafting import HeadDrafter
from headstart.errors import BadInput, Unsupported
from headstart.heads.base import Frontier, Head, Known
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.policies.base import Policy
from headstart.sampling import Coin, Sampling
from headstart.targets.hf import HFTarget
from headstart.testing import tiny_target
from headstart.unroll import Batch, Forced, Independent, Said, SelfFed, Unroll, supervised_counts, unroll
from headstart.vocab.full import Full
from headstart.vocab.trimmed import Trimmed

D, V = 48, 96  # those of the tiny target


# --- a recurrent head, as simple as can be -----------------------------------------------------------------


class Carry(NamedTuple):
    """What a row hands to the rows below it; two ranks, so that gathering has to cope with both."""

    hidden_BWD: Tensor
    age_BW: Tensor


class Rows(NamedTuple):
    """True rows `[n, D]` of each request."""

    of: list[Tensor]


class Toy(Head):
    """`alone`: a row begins from its anchor's feature; else from all features and tokens up to its root.

    `slots` of one step; it can go on for `limit` tokens.
    """

    needs = Taps(final=True)
    config = None

    def __init__(self, alone: bool, slots: int = 1, limit: int = 99, seed: int = 1) -> None:
        super().__init__()
        self.width, self.alone, self.slots, self.limit = D, alone, slots, limit
        self.sees = not alone
        self.embed, self.mix, self.out = nn.Embedding(V, D), nn.Linear(2 * D, D), nn.Linear(D, slots * D)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.parameters():
                weight.copy_(0.25 * torch.randn(weight.shape, generator=generator))

    def empty(self, n_requests: int) -> Rows:
        return Rows([torch.zeros(0, D)] * n_requests)

    def absorb(self, cache: Rows, new: Known) -> Rows:
        assert new.features.final is not None
        out = []
        for b, (old_ND, count) in enumerate(zip(cache.of, new.counts, strict=True)):
            feature_AD, next_A = new.features.final[b, :count], new.next_BA[b, :count]
            rows_AD = feature_AD
            if self.sees:
                last_1D = old_ND[-1:] if len(old_ND) else torch.zeros(1, D)
                rows_AD = last_1D + (feature_AD + self.embed(next_A)).cumsum(0)
            out.append(torch.cat([old_ND, rows_AD]))
        return Rows(out)

    def last(self, cache: Rows) -> Tensor:
        return torch.tensor([[len(rows_ND) - 1] for rows_ND in cache.of])

    def select(self, cache: Rows, requests: Sequence[int]) -> Rows:
        return Rows([cache.of[r] for r in requests])

    def rewind(self, cache: Rows, lengths: Sequence[int]) -> Rows:
        return Rows([rows_ND[:n] for rows_ND, n in zip(cache.of, lengths, strict=True)])

    def begin(self, cache: Rows, anchor_BW: Tensor) -> Carry:
        longest = max(len(rows_ND) for rows_ND in cache.of)
        padded = [nn.functional.pad(r, (0, 0, 0, longest - len(r))) for r in cache.of]
        rows_BWD = torch.stack([rows_ND[anchor_W] for rows_ND, anchor_W in zip(padded, anchor_BW, strict=True)])
        return Carry(torch.tanh(rows_BWD), torch.zeros(anchor_BW.shape))

    def horizon(self, depth: int, last: int | None) -> int:
        end = self.limit if last is None else min(self.limit, last)
        return max(0, min(self.slots, end - depth))

    def step(self, cache: Rows, state: Carry, frontier: Frontier) -> tuple[Tensor, Carry]:
        inner_BWD = torch.cat([state.hidden_BWD, self.embed(frontier.token_BW)], -1)
        hidden_BWD = torch.tanh(self.mix(inner_BWD))
        out_BWHD = self.out(hidden_BWD).unflatten(-1, (self.slots, D)) * (1 + state.age_BW)[:, :, None, None]
        return out_BWHD, Carry(hidden_BWD, state.age_BW + 1)


def medusa(heads: int = 3) -> Medusa:
    head = Medusa(MedusaConfig(heads=heads), D, V)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return head


@dataclass(frozen=True)
class Case:
    """A head and how it is unrolled."""

    make: Callable[[], Head]
    how: Unroll


CASES = {
    "medusa": Case(medusa, Independent()),
    "alone": Case(lambda: Toy(alone=True), SelfFed(steps=3)),
    "seeing": Case(lambda: Toy(alone=False), SelfFed(steps=3)),
    "detached": Case(lambda: Toy(alone=False), SelfFed(steps=3, detach=True)),
    "forced": Case(lambda: Toy(alone=True), Forced(steps=3)),
    "forced seeing": Case(lambda: Toy(alone=False), Forced(steps=3)),
    "two slots": Case(lambda: Toy(alone=False, slots=2), SelfFed(steps=None)),
}
EVERY = pytest.mark.parametrize("name", list(CASES))


def text(supervised: str, seed: int = 0) -> Batch:
    """One text, "1" where it is supervised; distinct random tokens and features."""
    generator = torch.Generator().manual_seed(100 + seed)
    n = len(supervised)
    token_T = torch.randperm(V, generator=generator)[:n]
    mask_T = torch.tensor([c == "1" for c in supervised], dtype=torch.bool)
    feature_TD = torch.randn(n, D, generator=generator)
    return Batch(token_T[None], mask_T[None], Features(feature_TD[None], ()), [n])


def side_by_side(texts: Sequence[Batch], fill: float = 0.0) -> Batch:
    """Right-padded; `fill` is what stands in the padding's features."""
    width = max(t.lengths[0] for t in texts)

    def rows(parts: list[Tensor], value: float) -> Tensor:
        out = [x[0].new_full((width, *x.shape[2:]), value) for x in parts]
        for row, x in zip(out, parts, strict=True):
            row[: x.shape[1]] = x[0]
        return torch.stack(out)

    finals = [t.features.final for t in texts if t.features.final is not None]
    return Batch(
        rows([t.token_BT for t in texts], 0),
        rows([t.supervised_BT for t in texts], False),
        Features(rows(finals, fill), ()),
        [t.lengths[0] for t in texts],
    )


READ_VD = torch.randn(V, D, generator=torch.Generator().manual_seed(3))


def total(said: Sequence[Said]) -> Tensor:
    """Summed cross-entropy, weighed by depth so that depths cannot be swapped."""
    parts = [s.depth * nn.functional.cross_entropy(s.feature_SF @ READ_VD.T, s.label_S, reduction="sum") for s in said]
    return torch.stack(parts).sum() if parts else torch.zeros(())


def gradients(head: Head, loss: Tensor) -> list[Tensor]:
    weights = list(head.parameters())
    return [w if g is None else g for w, g in zip(weights, torch.autograd.grad(loss, weights), strict=True)]


# --- the mask follows the label (B21) ----------------------------------------------------------------------

# 6 tokens, the answer is tokens 3 and 4. The row of anchor a at depth d guesses token a + 1 + d.
TABLE = {1: {1: 3, 2: 4}, 2: {0: 3, 1: 4}, 3: {0: 4}}


@EVERY
def test_the_rows_that_count_are_those_of_a_hand_made_table(name: str) -> None:
    batch, case = text("000110"), CASES[name]
    said = unroll(case.make(), case.how, batch, 3)
    assert [s.depth for s in said] == [1, 2, 3]
    for s in said:
        want = TABLE[s.depth]
        assert (s.position_S - 1 - s.depth).tolist() == list(want)
        assert s.position_S.tolist() == list(want.values())
        assert s.label_S.tolist() == [int(batch.token_BT[0, at]) for at in want.values()]
        assert s.row_S.tolist() == [0] * len(want)
        assert len(s.feature_SF) == len(want)
    assert supervised_counts(batch.supervised_BT, 3) == [2, 2, 1]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("name", ["medusa", "forced"])
def test_only_the_anchors_of_the_table_get_a_gradient(name: str, depth: int) -> None:
    """A row's own feature is all that these rows see: the one that `Forced` begins from is `depth - 1` further on."""
    batch, case = text("000110"), CASES[name]
    feature = batch.features.final
    assert feature is not None
    feature.requires_grad_()
    said = unroll(case.make(), case.how, batch, 3)[depth - 1]
    (grad,) = torch.autograd.grad(total([said]), feature)
    moved = grad[0].abs().sum(1).nonzero()[:, 0].tolist()
    shift = depth - 1 if name == "forced" else 0
    assert moved == [anchor + shift for anchor in TABLE[depth]]


@EVERY
def test_a_label_outside_the_span_is_no_label(name: str) -> None:
    batch, case = text("000110"), CASES[name]
    labels = torch.cat([s.label_S for s in unroll(case.make(), case.how, batch, 3)]).tolist()
    for at in range(6):
        token_BT = batch.token_BT.clone()
        token_BT[0, at] = 95 if 95 not in batch.token_BT else 94
        moved = torch.cat([s.label_S for s in unroll(case.make(), case.how, batch._replace(token_BT=token_BT), 3)])
        assert (moved.tolist() != labels) == (at in (3, 4))
        if name == "medusa":  # it does not read tokens, so its loss tells as much
            losses = [total(unroll(case.make(), case.how, b, 3)) for b in (batch, batch._replace(token_BT=token_BT))]
            assert (losses[0] != losses[1]) == (at in (3, 4))


@EVERY
def test_no_row_reads_what_drafting_would_not_know_yet(name: str) -> None:
    """A later token or feature changes no row of an anchor that drafts it."""
    batch, case = text("0001111111"), CASES[name]
    feature = batch.features.final
    assert feature is not None
    before = unroll(case.make(), case.how, batch, 3)
    kept = moved = 0
    for at in range(1, 10):
        later = batch._replace(token_BT=batch.token_BT.clone(), features=Features(feature.clone(), ()))
        later.token_BT[0, at:] = (later.token_BT[0, at:] + 1) % V
        assert later.features.final is not None
        later.features.final[0, at:] += 1
        for old, new in zip(before, unroll(case.make(), case.how, later, 3), strict=True):
            unread = old.position_S <= at  # guessing token `at` at the latest
            assert torch.equal(old.feature_SF[unread], new.feature_SF[unread])
            kept += int(unread.sum())
            moved += int((old.feature_SF != new.feature_SF).any(1).sum())
    assert min(kept, moved) > 20


@EVERY
@pytest.mark.parametrize("supervised", ["1", "11", "01", "00", "0000000", "0011", "001"])
def test_short_and_unsupervised_texts(name: str, supervised: str) -> None:
    """One and two tokens have no anchor with a label; three have one at depth 1 (B23)."""
    case, batch = CASES[name], text(supervised)
    said = unroll(case.make(), case.how, batch, 3)
    counts = supervised_counts(batch.supervised_BT, 3)
    assert counts == [supervised[d + 1 :].count("1") for d in (1, 2, 3)]
    assert [len(s.label_S) for s in said] == (counts if any(counts) else [])
    beside = side_by_side([batch, text("0001111", 7)])
    both = unroll(case.make(), case.how, beside, 3)
    assert [(s.row_S == 0).sum() for s in both] == counts
    assert all(torch.isfinite(s.feature_SF).all() for s in both)


@pytest.mark.parametrize("name", ["medusa", "forced", "seeing"])
def test_more_depths_than_tokens(name: str) -> None:
    case = CASES[name]
    head = medusa(9) if name == "medusa" else case.make()
    how = case.how if name == "medusa" else replace(case.how, steps=9)  # type: ignore[type-var]
    said = unroll(head, how, text("00111"), 9)
    assert [len(s.label_S) for s in said] == [3, 2, 1, 0, 0, 0, 0, 0, 0]


def test_depths_end_where_the_head_or_the_steps_do() -> None:
    batch = text("0001111111")

    def depths(head: Head, how: Unroll, asked: int) -> list[int]:
        return [s.depth for s in unroll(head, how, batch, asked)]

    assert depths(medusa(2), Independent(), 4) == [1, 2]
    assert depths(medusa(4), Independent(), 2) == [1, 2]
    assert depths(Toy(alone=True), SelfFed(steps=2), 4) == [1, 2]
    assert depths(Toy(alone=True), SelfFed(steps=None), 4) == [1, 2, 3, 4]
    assert depths(Toy(alone=True, limit=3), SelfFed(steps=None), 4) == [1, 2, 3]
    assert depths(Toy(alone=True, slots=2), SelfFed(steps=None), 5) == [1, 2, 3, 4, 5]
    assert depths(Toy(alone=True, slots=2), SelfFed(steps=2), 5) == [1, 2, 3, 4]
    assert depths(Toy(alone=True, slots=2), Independent(), 5) == [1, 2]


# --- company changes nothing (S16) -------------------------------------------------------------------------

TEXTS = [text(s, seed) for seed, s in enumerate(["0001111", "00111111111", "01", "0011", "000000"])]


@EVERY
def test_padded_and_alone_give_the_same_loss_and_gradient(name: str) -> None:
    case = CASES[name]
    head = case.make()
    losses = [total(unroll(head, case.how, t, 3)) for t in TEXTS]
    want = gradients(head, torch.stack(losses).sum())
    assert all(g.abs().sum() > 0 for g in want[-2:])
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0]):
        batch = side_by_side([TEXTS[i] for i in order], fill=5.0)  # a feature that leaked would be seen
        said = unroll(head, case.how, batch, 3)
        by_row = [total([_only(s, row) for s in said]) for row in range(len(order))]
        for row, i in enumerate(order):
            torch.testing.assert_close(by_row[row], losses[i], atol=1e-4, rtol=1e-5)
        for got, expected in zip(gradients(head, total(said)), want, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def _only(said: Said, row: int) -> Said:
    keep = said.row_S == row
    return Said(said.depth, said.feature_SF[keep], said.label_S[keep], said.row_S[keep], said.position_S[keep])


@pytest.mark.parametrize("how", [Independent(), SelfFed(steps=3), Forced(steps=3)], ids=lambda h: type(h).__name__)
def test_packed_is_padded(how: Unroll) -> None:
    """A head whose rows stand alone says the same when anchors are stepped request by request."""
    head = medusa() if isinstance(how, Independent) else Toy(alone=True)
    batch = side_by_side(TEXTS)
    packed = unroll(head, how, batch, 3)
    head.alone = False
    for one, other in zip(packed, unroll(head, how, batch, 3), strict=True):
        torch.testing.assert_close(one.feature_SF, other.feature_SF, atol=1e-6, rtol=1e-6)
        assert all(torch.equal(a, b) for a, b in zip(one[2:], other[2:], strict=True))


# --- trained as drafted (S09) ------------------------------------------------------------------------------


class Scripted(Full):
    """Drafts the tokens it is told to, and keeps the features that were to be read out."""

    def told(self, tokens: list[int]) -> None:
        object.__setattr__(self, "script", tokens)
        object.__setattr__(self, "read", [])

    def topk(self, readout: Any, feature_RF: Tensor, k: int) -> tuple[Tensor, Tensor]:
        self.read.append(feature_RF)  # type: ignore[attr-defined]
        depth = sum(map(len, self.read)) - len(feature_RF)  # type: ignore[attr-defined]
        out = torch.tensor(self.script[depth : depth + len(feature_RF)])[:, None]  # type: ignore[attr-defined]
        return out, torch.zeros(out.shape)


def forced_along(head: Head, target: HFTarget, batch: Batch, anchor: int, depth: int) -> Tensor:
    """`[depth, F]`: what HeadDrafter reads out when it drafts the data's own tokens below this anchor."""
    tokens, feature = batch.token_BT[0].tolist(), batch.features.final
    assert feature is not None
    vocab = Scripted(V)
    drafter = HeadDrafter(head, target, hs.Chain(depth=depth), vocab)
    vocab.told(tokens[anchor + 2 : anchor + 2 + depth])
    state = drafter.start(1)
    cut = max(1, anchor // 2)  # absorbed in two parts, as decoding does
    for start, end in ((0, cut), (cut, anchor + 1)):
        if start < end:
            part = Features(feature[:, start:end].detach(), ())
            state = drafter.absorb(state, Committed([tokens[start:end]], [tokens[end]], [[-1] * (end - start)], part))
    draft = drafter.draft(state, Budget([depth], 99), [Sampling()], [Coin(0)])
    assert draft.token_BN[0].tolist() == tokens[anchor + 1 : anchor + 2 + depth]
    return torch.cat(vocab.read)  # type: ignore[attr-defined]


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("alone", [False, True])
def test_the_rows_of_training_are_those_of_drafting(tiny: Any, alone: bool, slots: int) -> None:
    head, depths = Toy(alone, slots), 5
    batch = text("0111111111")
    said = unroll(head, SelfFed(steps=None), batch, depths)
    assert [s.depth for s in said] == [1, 2, 3, 4, 5]
    for anchor in range(10 - 1 - depths):
        drafted_NF = forced_along(head, tiny(), batch, anchor, depths)
        for s in said:
            at = (s.position_S - 1 - s.depth).tolist().index(anchor)
            torch.testing.assert_close(s.feature_SF[at], drafted_NF[s.depth - 1], atol=1e-5, rtol=1e-4)


def test_medusas_rows_of_training_are_those_of_drafting(tiny: Any) -> None:
    batch, head = text("0111111111"), medusa(4)
    said = unroll(head, Independent(), batch, 4)
    for anchor in range(5):
        drafted_NF = forced_along(head, tiny(), batch, anchor, 4)
        for s in said:
            at = (s.position_S - 1 - s.depth).tolist().index(anchor)
            torch.testing.assert_close(s.feature_SF[at], drafted_NF[s.depth - 1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("alone", [False, True])
def test_detaching_keeps_values_and_cuts_the_gradient(alone: bool) -> None:
    head, batch = Toy(alone), text("0001111111")
    feature = batch.features.final
    assert feature is not None
    feature.requires_grad_()
    joint, cut = (unroll(head, SelfFed(steps=3, detach=detach), batch, 3) for detach in (False, True))
    for one, other in zip(joint, cut, strict=True):
        assert torch.equal(one.feature_SF, other.feature_SF)
    for said, reaches in ((joint, [True, True, True]), (cut, [True, False, False])):
        grads = [torch.autograd.grad(total([s]), feature, allow_unused=True, retain_graph=True)[0] for s in said]
        assert [g is not None and bool(g.abs().sum() > 0) for g in grads] == reaches
    (deep,) = torch.autograd.grad(total([cut[2]]), head.mix.weight)  # the step itself still learns
    assert deep.abs().sum() > 0


@pytest.mark.parametrize("alone", [False, True])
def test_forced_begins_from_the_true_feature(alone: bool) -> None:
    """The row at depth d of anchor a is the first row of anchor a + d - 1: no state of the head's own enters."""
    head, batch = Toy(alone), text("0111111111")
    said = unroll(head, Forced(steps=3), batch, 3)
    first = unroll(head, SelfFed(steps=1), batch, 1)[0]
    at = {int(position): row for row, position in enumerate(first.position_S)}
    for s in said:
        rows = [at[int(position)] for position in s.position_S]
        torch.testing.assert_close(s.feature_SF, first.feature_SF[rows])
    fed = unroll(head, SelfFed(steps=3), batch, 3)
    assert torch.equal(fed[0].feature_SF, said[0].feature_SF)
    assert not torch.allclose(fed[1].feature_SF, said[1].feature_SF, atol=1e-2)


# --- a drafted tree is its paths, drafted one by one -------------------------------------------------------

PATHS = [(0,), (1,), (2,), (0, 0), (0, 2), (1, 0), (1, 1), (0, 0, 0), (0, 2, 0), (0, 2, 1), (1, 1, 0), (1, 1, 3)]
POLICIES: dict[str, Policy] = {
    "chain": hs.Chain(depth=3),
    "tree": hs.StaticTree(paths=PATHS),
    "deep": hs.StaticTree(paths=[*PATHS, (0, 2, 1, 0), (0, 2, 1, 1), (1, 1, 3, 0), (1, 1, 3, 0, 0), (0, 2, 1, 1, 2)]),
}


class Owner(Toy):
    """A read-out of its own at each depth."""

    def readout(self, depth: int) -> Readout:
        rows_VD = torch.randn(V, D, generator=torch.Generator().manual_seed(50 + depth))
        return Readout(lambda h: h @ rows_VD.T, V)


HEADS: dict[str, Callable[[], Head]] = {
    "medusa": lambda: medusa(5),
    "alone": lambda: Toy(alone=True),
    "seeing": lambda: Toy(alone=False),
    "two slots": lambda: Toy(alone=False, slots=2),
    "three slots": lambda: Toy(alone=True, slots=3),
    "own readouts": lambda: Owner(alone=False, slots=2),
}


def known(lengths: Sequence[int]) -> Committed:
    """Random tokens and features as a target would have committed them."""
    generator = torch.Generator().manual_seed(5)
    tokens = [torch.randint(0, V, (n,), generator=generator).tolist() for n in lengths]
    roots = torch.randint(0, V, (len(lengths),), generator=generator).tolist()
    features = Features(torch.randn(len(lengths), max(lengths), D, generator=generator), ())
    return Committed(tokens, roots, [[-1] * n for n in lengths], features)


def naive(head: Head, target: HFTarget, new: Committed, row: int, path: tuple[int, ...]) -> list[int]:
    """Tokens of one path of ranks, drafted alone: every step has one row, every read-out one logit vector."""
    borrowed, count = target.readout(), len(new.tokens[row])
    assert new.features.final is not None
    with torch.no_grad():
        next_BA = torch.tensor([[*new.tokens[row][1:], new.roots[row]]])
        features = Features(new.features.final[row : row + 1, :count], ())
        cache, anchor = head.absorb(head.empty(1), Known(next_BA, features, [count])), torch.tensor([[count - 1]])
        state, line, slots = head.begin(cache, anchor), [new.roots[row]], []
        for depth, rank in enumerate(path):
            if not slots:
                frontier = Frontier(torch.tensor([[line[-1]]]), anchor, depth)
                feature_BWHF, state = head.step(cache, state, frontier)
                slots = list(feature_BWHF[0, 0])
            logits_V = (head.readout(depth + 1) or borrowed).project(slots.pop(0)[None])[0]
            line.append(int(logits_V.sort(descending=True, stable=True).indices[rank]))
    return line[1:]


def paths_of(draft: Draft, row: int) -> list[list[int]]:
    """The tokens of the path to every node but the root, in node order."""
    lines: list[list[int]] = [[]]
    for token, parent in list(zip(draft.token_BN[row].tolist(), draft.parent_BN[row].tolist(), strict=True))[1:]:
        lines.append([*lines[parent], token])
    return lines[1:]


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("name", list(HEADS))
def test_a_tree_is_its_paths_drafted_one_by_one(tiny: Any, name: str, policy: str) -> None:
    head, target, grown = HEADS[name](), tiny(), POLICIES[policy]
    drafter = HeadDrafter(head, target, grown, Full(V))
    new = known([6, 3])
    state = drafter.absorb(drafter.start(2), new)
    draft = drafter.draft(state, Budget([9, 9], 99), [Sampling()] * 2, [Coin(0)] * 2)
    ranks = [(0,) * d for d in range(1, 4)] if policy == "chain" else list(grown.paths)  # type: ignore[attr-defined]
    assert bool(draft.valid_BN.all())
    assert draft.chain is (policy == "chain")
    seen = set()
    for row in range(2):
        want = [naive(head, target, new, row, path) for path in ranks]
        assert int(draft.token_BN[row, 0]) == new.roots[row]
        assert paths_of(draft, row) == want
        seen |= {tuple(line) for line in want}
    assert len(seen) > len(ranks)  # the two requests differ
    again = drafter.draft(drafter.select(state, [1]), Budget([9], 99), [Sampling()], [Coin(0)])
    assert torch.equal(again.token_BN[0], draft.token_BN[1])


@pytest.mark.parametrize("name", list(HEADS))
def test_a_budget_cuts_depth_and_nodes_and_nothing_else(tiny: Any, name: str) -> None:
    drafter = HeadDrafter(HEADS[name](), tiny(), POLICIES["deep"], Full(V))
    new = known([6, 3, 4])
    state = drafter.absorb(drafter.start(3), new)

    def drafted(depth: list[int], nodes: int) -> Draft:
        return drafter.draft(state, Budget(depth, nodes), [Sampling()] * 3, [Coin(0)] * 3)

    whole = drafted([9, 9, 9], 99)
    cut = drafted([0, 3, 1], 9)
    assert cut.token_BN.shape == (3, 9)
    assert torch.equal(cut.token_BN, whole.token_BN[:, :9])
    assert torch.equal(cut.parent_BN, whole.parent_BN[:, :9])
    depth_N = torch.tensor([0, 1, 1, 1, 2, 2, 2, 2, 3])
    assert torch.equal(cut.valid_BN, depth_N <= torch.tensor([[0], [3], [1]]))
    assert drafted([0, 0, 0], 99).token_BN.tolist() == [[root] for root in new.roots]


def test_a_trimmed_vocabulary_ranks_its_own_ids_only(tiny: Any) -> None:
    vocab, new = Trimmed([i for i in range(95, -1, -1) if i % 3], V), known([5])
    target, head = tiny(), medusa(3)
    draft = drafted(HeadDrafter(head, target, hs.StaticTree(paths=PATHS), vocab), new)
    ranked = [naive(head, target, new, 0, (rank,))[0] for rank in range(V)]
    assert draft.token_BN[0, 1:4].tolist() == [token for token in ranked if token % 3][:3]
    assert any(token % 3 == 0 for token in ranked[:3])
    assert all(token % 3 for token in draft.token_BN[0, 1:].tolist())


def drafted(drafter: HeadDrafter, new: Committed) -> Draft:
    return drafter.draft(drafter.absorb(drafter.start(1), new), Budget([9], 99), [Sampling()], [Coin(0)])


# --- what cannot be drafted is said when it is built -------------------------------------------------------


class Dwindling(Toy):
    """Three slots from the root, and nothing below them, although a step at depth 1 would have had one."""

    def horizon(self, depth: int, last: int | None) -> int:
        return {0: 3, 1: 1}.get(depth, 0)


@pytest.mark.parametrize(
    ("head", "policy", "size", "words"),
    [
        (medusa(3), hs.Chain(depth=4), V, "4 deep and the head guesses 3 tokens ahead"),
        (Toy(alone=True, limit=2), hs.StaticTree(paths=[(0,), (0, 0), (0, 0, 0)]), V, "3 deep and the head guesses 2"),
        (Toy(alone=True, slots=2, limit=3), hs.Chain(depth=4), V, "4 deep and the head guesses 3"),
        (Dwindling(alone=True, slots=3), hs.Chain(depth=4), V, "4 deep and the head guesses 3"),
        (medusa(3), hs.StaticTree(paths=[(0,), (4,)]), 4, "5 siblings; the draft vocabulary holds 4"),
    ],
)
def test_trees_that_cannot_be_filled_are_refused(tiny: Any, head: Head, policy: Policy, size: int, words: str) -> None:
    vocab = Full(V) if size == V else Trimmed(range(size), V)
    with pytest.raises(BadInput, match=words):
        HeadDrafter(head, tiny(), policy, vocab)


def test_as_deep_as_it_reaches_is_fine(tiny: Any) -> None:
    HeadDrafter(medusa(4), tiny(), hs.Chain(depth=4), Full(V))
    HeadDrafter(Toy(alone=True, slots=2, limit=3), tiny(), hs.Chain(depth=3), Full(V))
    HeadDrafter(Dwindling(alone=True, slots=3), tiny(), hs.Chain(depth=3), Full(V))


def test_a_head_that_fills_more_slots_than_the_tree_is_deep(tiny: Any) -> None:
    """Whether a head minds the policy's depth is its own choice: what stands beyond it is not read."""
    drafter = HeadDrafter(Dwindling(alone=True, slots=3), tiny(), hs.StaticTree(paths=[(0,), (0, 1)]), Full(V))
    draft = drafted(drafter, known([5]))
    assert draft.token_BN.shape == (1, 3)


@pytest.mark.parametrize("kind", [Kind.IID, Kind.WITHOUT_REPLACEMENT])
def test_policies_that_draw_are_refused(tiny: Any, kind: Kind) -> None:
    with pytest.raises(Unsupported, match=kind.value):
        HeadDrafter(medusa(3), tiny(), hs.StaticTree(paths=[(0,)], kind=kind), Full(V))


def test_another_targets_ids_are_refused(tiny: Any) -> None:
    drafter = HeadDrafter(medusa(3), tiny(), hs.Chain(depth=3), Full(V))
    drafter.check(tiny())
    with pytest.raises(BadInput, match="another vocabulary"):
        drafter.check(tiny_target(vocab_size=90))
