from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch

import headstart as hs
from headstart.core import Draft, Features, Taps
from headstart.drafting import HeadDrafter
from headstart.errors import BadInput
from headstart.heads.base import Frontier, Known
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.objectives.base import CrossEntropy, Predicted, Wanted, reduce
from headstart.policies.base import Policy
from headstart.targets.base import Target, prefill
from headstart.testing import tiny_target
from headstart.unroll import Batch, Independent, unroll
from headstart.vocab.base import DraftVocab
from headstart.vocab.full import Full
from headstart.vocab.trimmed import Trimmed
from helpers import Coverage, prompts

HEADS, NEW = 3, 40
PROMPTS = prompts(4, seed=3, low=2, high=12)
POLICIES: dict[str, Policy] = {
    "chain": hs.Chain(depth=HEADS),
    "tree": hs.StaticTree(paths=[(0,), (1,), (0, 0), (2,), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)]),
}
VOCABS: dict[str, DraftVocab] = {"full": Full(96), "trimmed": Trimmed([i for i in range(95, -1, -1) if i % 5], 96)}


def random_head(width: int = 48, scale: float = 0.2, **config: Any) -> Medusa:
    head = Medusa(MedusaConfig(**{"heads": HEADS, **config}), width, 96)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(scale * torch.randn(weight.shape, generator=generator))
    return head.eval()


@cache
def spoken(family: str) -> tuple[Target, list[list[int]]]:
    """A target and its own greedy answers."""
    target = tiny_target(family)
    return target, [o.token_ids for o in hs.generate(target, PROMPTS, max_new_tokens=NEW)]


@cache
def taught(family: str, vocab: DraftVocab) -> Medusa:
    """A head that has seen half of every answer often: right at times. Trained by the calls that drafting makes."""
    target, answers = spoken(family)
    texts = [prompt + answer[: NEW // 2] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    _, _, features = prefill(target, target.empty(len(texts)), texts, Taps(final=True))
    token_BT = torch.nn.utils.rnn.pad_sequence([torch.tensor(t) for t in texts], batch_first=True)
    inside_BT = torch.arange(token_BT.shape[1]) < torch.tensor([[len(t)] for t in texts])
    known_BT = vocab.labels(token_BT.flatten())[1].view_as(token_BT)
    assert features.final is not None
    batch = Batch(token_BT, inside_BT & known_BT, Features(features.final.clone(), ()), [len(t) for t in texts])
    head = Medusa(MedusaConfig(heads=HEADS), target.width, vocab.size)
    readout, optimiser = target.readout(vocab.ids_U), torch.optim.Adam(head.parameters(), 0.02)
    for _ in range(25):
        said = unroll(head, Independent(), batch, HEADS)
        wanted = [Wanted(vocab.labels(s.label_S)[0]) for s in said]
        losses = CrossEntropy()([Predicted(s.depth, s.feature_SF, readout) for s in said], wanted)
        optimiser.zero_grad()
        reduce(losses, [1.0] * HEADS, [len(x) for x in losses]).backward()
        optimiser.step()
    return head


def stepped(head: Medusa, feature_BAD: torch.Tensor, counts: list[int], anchor_BW: torch.Tensor) -> torch.Tensor:
    """`[B, W, K, D]` from these anchors."""
    next_BA = torch.zeros(feature_BAD.shape[:2], dtype=torch.long)
    cache = head.absorb(head.empty(len(counts)), Known(next_BA, Features(feature_BAD, ()), counts))
    state = head.begin(cache, anchor_BW)
    return head.step(cache, state, Frontier(torch.zeros_like(anchor_BW), anchor_BW, 0))[0]


# --- the formula -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_a_fresh_head_is_the_targets_own_head_at_every_depth(family: str) -> None:
    target, _ = spoken(family)
    _, rows, features = prefill(target, target.empty(1), [PROMPTS[0]], Taps(final=True))
    assert features.final is not None
    head = Medusa(MedusaConfig(heads=HEADS, layers=2), target.width, 96)
    anchor = torch.tensor([[len(PROMPTS[0]) - 1]])
    z_BWKD = stepped(head, features.final, [len(PROMPTS[0])], anchor)
    own_1V = rows.logits_RNV([0])[0]
    assert head.readout(1) is None
    for k in range(HEADS):
        assert torch.equal(target.readout().project(z_BWKD[:, 0, k]), own_1V)


@pytest.mark.parametrize("n_requests", [1, 2])
@pytest.mark.parametrize("n_rows", [1, 3])
def test_every_row_is_the_formula_of_its_own_anchor(n_requests: int, n_rows: int) -> None:
    head = random_head(width=8, layers=2)
    counts = [5, 3][:n_requests]
    feature_BAD = torch.randn(n_requests, 5, 8, generator=torch.Generator().manual_seed(2))
    anchor_BW = torch.tensor([[4, 0, 2], [1, 2, 2]])[:n_requests, :n_rows]
    z_BWKD = stepped(head, feature_BAD, counts, anchor_BW)
    assert z_BWKD.shape == (n_requests, n_rows, HEADS, 8)
    for b in range(n_requests):
        for w in range(n_rows):
            for k in range(HEADS):
                z_D = feature_BAD[b, anchor_BW[b, w]]
                for weight_KDD, bias_KD in zip(head.weights, head.biases, strict=True):
                    y_D = weight_KDD[k] @ z_D + bias_KD[k]
                    z_D = z_D + y_D * torch.sigmoid(y_D)
                torch.testing.assert_close(z_BWKD[b, w, k], z_D, atol=1e-5, rtol=1e-4)


def test_the_last_row_of_each_request_is_the_anchor() -> None:
    head = random_head(width=8)
    known = Known(torch.zeros(2, 5, dtype=torch.long), Features(torch.zeros(2, 5, 8), ()), [5, 3])
    cache = head.absorb(head.empty(2), known)
    assert head.last(cache).tolist() == [[4], [2]]
    assert head.last(head.select(cache, [1])).tolist() == [[2]]


def test_requests_that_go_on_keep_their_own_rows() -> None:
    head, feature_BAD = random_head(width=8), torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(2))
    cache = head.absorb(head.empty(3), Known(torch.zeros(3, 2, dtype=torch.long), Features(feature_BAD, ()), [2, 1, 2]))
    kept = head.select(cache, [1, 2])
    anchor_BW = head.last(kept)
    assert torch.equal(
        head.begin(kept, anchor_BW).anchor_BWD[:, 0], torch.stack([feature_BAD[1, 0], feature_BAD[2, 1]])
    )


def test_it_fills_as_many_slots_as_the_policy_asks_and_goes_on_nowhere() -> None:
    head = random_head(width=8)
    assert [head.horizon(0, last) for last in (None, 1, 3, 9)] == [3, 1, 3, 3]
    assert [head.horizon(depth, None) for depth in (1, 2)] == [0, 0]


# --- every head is its own (S01) ---------------------------------------------------------------------------


def test_every_block_is_storage_of_its_own() -> None:
    feature_BAD, anchor = torch.ones(1, 1, 8), torch.tensor([[0]])
    before = stepped(random_head(width=8, layers=2), feature_BAD, [1], anchor)
    for part, layer, k in itertools.product(("weights", "biases"), range(2), range(HEADS)):
        head = random_head(width=8, layers=2)
        assert len({p.data_ptr() for p in head.parameters()}) == 4
        with torch.no_grad():
            getattr(head, part)[layer][k] += 0.5
        moved = (stepped(head, feature_BAD, [1], anchor) != before).any(-1)[0, 0]
        assert moved.tolist() == [slot == k for slot in range(HEADS)]


def synthetic(n_tokens: int = 24) -> Batch:
    """One text of distinct tokens, so that a wrong shift is a wrong label, with random features."""
    feature = torch.randn(1, n_tokens, 48, generator=torch.Generator().manual_seed(4))
    token_BT = torch.randperm(96, generator=torch.Generator().manual_seed(5))[None, :n_tokens]
    return Batch(token_BT, torch.ones(1, n_tokens, dtype=torch.bool), Features(feature, ()), [n_tokens])


def loss_at(head: Medusa, batch: Batch, rows_VD: torch.Tensor, depths: list[int]) -> torch.Tensor:
    said = [s for s in unroll(head, Independent(), batch, HEADS) if s.depth in depths]
    return torch.stack([torch.nn.functional.cross_entropy(s.feature_SF @ rows_VD.T, s.label_S) for s in said]).sum()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_each_head_learns_from_its_own_shift_only(depth: int) -> None:
    head, batch = random_head(layers=2), synthetic()
    loss_at(head, batch, torch.eye(96, 48), [depth]).backward()
    for weight in head.parameters():
        assert weight.grad is not None
        touched = weight.grad.flatten(1).abs().sum(1) > 0
        assert touched.tolist() == [k + 1 == depth for k in range(HEADS)]


def test_what_training_calls_depth_d_drafting_drafts_at_depth_d() -> None:
    head, batch = random_head(), synthetic()
    rows_VD = torch.randn(96, 48, generator=torch.Generator().manual_seed(6))
    optimiser = torch.optim.Adam(head.parameters(), 0.01)
    for _ in range(60):
        optimiser.zero_grad()
        loss_at(head, batch, rows_VD, [1, 2, 3]).backward()
        optimiser.step()
    assert batch.features.final is not None
    anchors = torch.arange(20)[None]
    guess_WK = (stepped(head, batch.features.final, [24], anchors) @ rows_VD.T).argmax(-1)[0]
    for slot in range(HEADS):  # x_{t+k+1}: the root is t + 1, the first head guesses the token after it
        assert torch.equal(guess_WK[:, slot], batch.token_BT[0, 2 + slot : 22 + slot])


# --- drafting with it --------------------------------------------------------------------------------------


class Watched(HeadDrafter):
    """Remembers what it drafted."""

    seen: set[int]

    def draft(self, *args: Any) -> Draft:
        out = super().draft(*args)
        self.seen |= set(out.token_BN[:, 1:][out.valid_BN[:, 1:]].tolist())
        return out


def watched(head: Medusa, target: Target, policy: str, vocab: DraftVocab) -> Watched:
    drafter = Watched(head, target, POLICIES[policy], vocab)
    drafter.seen = set()
    return drafter


@pytest.mark.parametrize("vocab", list(VOCABS))
@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_greedy_text_is_that_of_plain_decoding(family: str, policy: str, vocab: str) -> None:
    target, plain = spoken(family)
    coverage, allowed = Coverage(HEADS), VOCABS[vocab].labels(torch.arange(96))[1]
    for head in (taught(family, VOCABS[vocab]), random_head()):
        drafter = watched(head, target, policy, VOCABS[vocab])
        outputs = coverage.see_steps(hs.stream(target, PROMPTS, drafter=drafter, max_new_tokens=NEW))
        assert [o.token_ids for o in outputs] == plain
        assert all(allowed[token] for token in drafter.seen)
        assert len(drafter.seen) > 20
    coverage.demand(ragged=True)
    if vocab == "trimmed":
        assert any(not allowed[token] for answer in plain for token in answer), "no token was out of the draft's reach"


def test_alone_or_in_a_batch_a_request_takes_the_same_steps() -> None:
    target, _ = spoken("llama")
    drafter = HeadDrafter(taught("llama", VOCABS["full"]), target, POLICIES["tree"], VOCABS["full"])
    together = hs.generate(target, PROMPTS, drafter=drafter, max_new_tokens=NEW)
    alone = [hs.generate(target, prompt, drafter=drafter, max_new_tokens=NEW) for prompt in PROMPTS]
    assert [o.stats.accepted for o in together] == [o.stats.accepted for o in alone]
    assert len({tuple(o.stats.accepted.items()) for o in alone}) > 1


@pytest.mark.parametrize("vocab", list(VOCABS))
@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_seed_keeps_its_text(policy: str, vocab: str) -> None:
    target, _ = spoken("llama")
    coverage = Coverage(HEADS)
    how = [hs.Sampling(temperature=0.5, top_p=0.9, seed=seed) for seed in range(len(PROMPTS))]
    plain = hs.generate(target, PROMPTS, sampling=how, max_new_tokens=NEW)
    drafter = HeadDrafter(taught("llama", VOCABS[vocab]), target, POLICIES[policy], VOCABS[vocab])
    fast = coverage.see_steps(hs.stream(target, PROMPTS, drafter=drafter, sampling=how, max_new_tokens=NEW))
    assert [o.token_ids for o in fast] == [o.token_ids for o in plain]
    assert [o.token_ids for o in fast] != spoken("llama")[1]
    coverage.demand()


@pytest.mark.parametrize(
    "settings", [{"heads": 0}, {"layers": 0}, {"own_ids": True}, {"shared_lm_head": True}], ids=lambda s: next(iter(s))
)
def test_settings_that_make_no_head_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=next(iter(settings))):
        MedusaConfig(**settings)


def test_a_tree_deeper_than_the_heads_reach_is_refused() -> None:
    with pytest.raises(BadInput, match="4 deep and the head guesses 3"):
        HeadDrafter(random_head(), spoken("llama")[0], hs.Chain(depth=4), VOCABS["full"])
