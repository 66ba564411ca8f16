"""Caches, positions, masks, taps (bugs.md B10, B12 to B14, S10, S12, S14, S16, S17): what a pass leaves and returns."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import headstart as hs
from headstart.core import Kind, Taps
from headstart.decode import Step, decode
from headstart.errors import BadInput
from headstart.sampling import Sampling
from headstart.targets.base import prefill
from headstart.targets.hf import HFTarget
from headstart.targets.hf_cache import TreeCache
from headstart.testing import Mixed, Oracle, tiny_target
from headstart.tree import chain, from_parents
from headstart.verify.lossless import Lossless
from headstart.verify.target_only import TargetOnly
from helpers import FAMILIES, Coverage, blurred, causal_logits, prompts, request, stock

NOTHING = Taps()


# --- B10, S14: contents of the caches after every step ----------------------------------------------------------------


def demand_fresh(model: Any, cache: TreeCache, row: int, committed: list[int]) -> None:
    """Cached keys and values equal those of one stock pass over the committed tokens."""
    assert cache.lengths[row] == len(committed)
    with torch.no_grad():
        fresh = model(input_ids=torch.tensor([committed]), use_cache=True).past_key_values
    assert len(fresh.layers) == cache.n_layers
    for number, layer in enumerate(fresh.layers):
        for which, expected in enumerate((layer.keys[0], layer.values[0])):
            ours = cache.buffer[which, number, row, :, : len(committed)]
            ours = ours[:, -expected.shape[1] :]  # a stock sliding layer keeps its window only
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


def demand_committed(target: Any, requests: list[Any], step: Step) -> None:
    for row, number in enumerate(step.alive):
        history = requests[number].history
        demand_fresh(target.model, step.state.cache, row, [*history.prompt, *history.output[:-1]])
        assert step.state.roots[row] == history.output[-1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("width", [1, 3])
def test_b10_target_cache_after_every_accept_length(tiny, family, width):
    target, depth, coverage = tiny(family, dtype=torch.float64), 4, Coverage(4)
    script = [0, depth, depth, 1, depth, 0, 3, 2]
    for ids in prompts(4, seed=1, low=3):
        one = request(target, ids, 27)
        taken = []
        for step in decode(target, [one], Mixed(target, depth, script, width), Lossless()):
            demand_committed(target, [one], step)
            taken += [len(step.emissions[0].kept) - 1] if step.drafted else []
        assert taken[: len(script)] == script
        coverage.accepted |= set(taken)
        coverage.tokens |= set(one.history.output)
    coverage.demand()


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("width", [1, 2])
def test_b10_target_cache_of_a_ragged_batch(tiny, family, width):
    """Rows of other lengths, other accept lengths, and rows that leave the batch."""
    target, coverage = tiny(family, dtype=torch.float64), Coverage(3)
    requests = [request(target, ids, 9 * n + 5) for n, ids in enumerate(prompts(4, seed=2))]
    drafter = Mixed(target, 3, [[0, 3, 1], [3], [2, 0], [1, 3, 3, 0]], width)
    alive = set()
    for step in decode(target, requests, drafter, Lossless()):
        demand_committed(target, requests, step)
        alive.add(len(step.alive))
        lengths = [len(e.kept) - 1 for e in step.emissions if step.drafted]
        coverage.accepted |= set(lengths)
        coverage.ragged |= len(set(lengths)) > 1
    coverage.tokens = {token for one in requests for token in one.history.output}
    assert len(alive) > 2, "no row left early"
    coverage.demand(ragged=True)


TREE = hs.StaticTree(paths=[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)])


@pytest.mark.parametrize("policy", [hs.Chain(depth=4), TREE], ids=["chain", "tree"])
def test_b10_both_caches_with_a_draft_model(tiny, policy):
    """The draft model's cache holds the committed tokens and nothing else, whatever was accepted."""
    target, coverage = tiny(dtype=torch.float64), Coverage(4)
    drafter = hs.DraftModel(blurred(0.05, dtype=torch.float64), policy)
    requests = [request(target, ids, 30) for ids in prompts(3, seed=3)]
    for step in decode(target, requests, drafter, TargetOnly()):
        demand_committed(target, requests, step)
        for row, number in enumerate(step.alive):
            history = requests[number].history
            committed = [*history.prompt, *history.output[:-1]]
            demand_fresh(drafter.model.model, step.state.drafter_state.cache, row, committed)
        coverage.accepted |= {len(e.kept) - 1 for e in step.emissions if step.drafted}
    coverage.tokens = {token for one in requests for token in one.history.output}
    coverage.demand()


def test_s14_sampling_leaves_the_same_caches(tiny):
    target = tiny(dtype=torch.float64)
    drafter = hs.DraftModel(blurred(0.05, dtype=torch.float64), hs.Chain(depth=3, kind=Kind.IID))
    requests = [request(target, ids, 30, Sampling(temperature=0.7, seed=4)) for ids in prompts(3, seed=3)]
    taken = set()
    for step in decode(target, requests, drafter, Lossless()):
        demand_committed(target, requests, step)
        taken |= {len(e.kept) - 1 for e in step.emissions if step.drafted}
    assert {0, 3} < taken


@pytest.mark.parametrize("family", FAMILIES)
def test_b10_requests_that_take_the_places_of_others(tiny, family):
    target = tiny(family, dtype=torch.float64)
    first, second = prompts(4, seed=8, low=3), prompts(2, seed=9, low=3)
    second[1] = [*second[1], *(i % 90 for i in range(300))]  # longer than the buffer so far
    cache, _, _ = prefill(target, target.empty(4), first, NOTHING)
    fresh, _, _ = prefill(target, target.empty(2), second, NOTHING)
    cache = target.replace(cache, [2, 0], fresh)
    held = [second[1], first[1], second[0], first[3]]
    for row, ids in enumerate(held):
        demand_fresh(target.model, cache, row, ids)
    token_B1 = torch.tensor([[5], [6], [7], [8]])
    rows, _ = target.extend(cache, token_B1, chain(4, 1, target.device), NOTHING)
    for row, ids in enumerate(held):
        expected = causal_logits(target, [*ids, int(token_B1[row])])[-1]
        torch.testing.assert_close(rows.logits_RNV([row])[0, 0], expected, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="2 requests to put in 1 places"):
        target.replace(cache, [1], fresh)


# --- B12: positions ---------------------------------------------------------------------------------------------------


def positions(target: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Position ids of every pass of the model."""
    seen: list[list[int]] = []
    forward = target.base.forward

    def call(**kwargs: Any) -> Any:
        seen.append(kwargs["position_ids"][0].tolist())
        return forward(**kwargs)

    monkeypatch.setattr(target.base, "forward", call)
    return seen


def test_b12_positions_of_a_chain(tiny, monkeypatch):
    """Prompt of 7, K = 3, accept lengths 0, 2, 3."""
    target, twin = tiny(), tiny(seed=0)
    assert twin is not target  # the stub looks ahead with a model of its own
    seen = positions(target, monkeypatch)
    out = hs.generate(target, [9, 8, 7, 6, 5, 4, 3], drafter=Mixed(twin, 3, [0, 2, 3]), max_new_tokens=10)
    assert out.stats.accepted == {0: 2, 2: 1, 3: 1}
    assert seen == [
        [0, 1, 2, 3, 4, 5, 6],
        [7, 8, 9, 10],  # all refused: the root alone stays
        [8, 9, 10, 11],  # root and two
        [11, 12, 13, 14],  # root and three
        [15],  # one token is left: no draft
    ]


def test_b12_positions_of_a_two_level_tree(tiny, monkeypatch):
    """Siblings share the position behind their parent."""
    target, twin = tiny(), tiny(seed=0)
    seen = positions(target, monkeypatch)
    hs.generate(target, [9, 8, 7, 6, 5, 4, 3], drafter=Mixed(twin, 2, [0, 1, 2], width=2), max_new_tokens=8)
    assert seen == [
        [0, 1, 2, 3, 4, 5, 6],
        [7, 8, 8, 9, 9],
        [8, 9, 9, 10, 10],
        [10, 11, 11, 12, 12],
        [13],
    ]


def test_b12_positions_of_a_draft_model(tiny, monkeypatch):
    """The first drafted token is computed at position n, right behind the prompt; no gap and no repetition."""
    target = tiny()
    model = tiny(seed=0)  # the same weights: everything is accepted
    seen = positions(model, monkeypatch)
    drafter = hs.DraftModel(model, hs.Chain(depth=3))
    out = hs.generate(target, [9, 8, 7, 6, 5, 4, 3], drafter=drafter, max_new_tokens=7)
    assert out.stats.accepted == {1: 1, 3: 1}
    prompt, drafted, absorbed = [0, 1, 2, 3, 4, 5, 6], [[7], [7, 8], [7, 8, 9]], [7, 8, 9, 10]
    assert seen == [prompt, *drafted, absorbed, [11], [11, 12]]


@pytest.mark.parametrize("family", FAMILIES)
def test_b12_drafting_step_by_step_equals_one_pass(tiny, family):
    """Rotary or learned positions: stepwise logits are those of a teacher-forced pass."""
    target = tiny(family)
    ids = prompts(1, seed=6, low=30, high=30)[0]
    expected = causal_logits(target, ids)
    cache, _, _ = prefill(target, target.empty(1), [ids[:7]], NOTHING)
    for at in range(7, len(ids)):
        rows, _ = target.extend(cache, torch.tensor([[ids[at]]]), chain(1, 1), NOTHING)
        cache = target.commit(cache, [[0]])
        torch.testing.assert_close(rows.logits_RNV([0])[0, 0], expected[at], atol=2e-4, rtol=0)


# --- B13: sliding windows ---------------------------------------------------------------------------------------------


def mistral(attention: str) -> HFTarget:
    """Sliding windows in every layer, named by no layer type."""
    import transformers

    from headstart.targets.tiny import tiny_tokenizer

    config = transformers.MistralConfig(
        vocab_size=96, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=8, initializer_range=0.6, max_position_embeddings=512,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return HFTarget(model, tiny_tokenizer(96))


WINDOWED = {
    "gemma3": lambda attention: tiny_target("gemma3", attention=attention),
    "gemma3, all sliding": lambda attention: tiny_target(
        "gemma3", attention=attention, layer_types=["sliding_attention"] * 4
    ),
    "qwen2": lambda attention: tiny_target(
        "qwen2", attention=attention, use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "mistral": mistral,
}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", WINDOWED)
def test_b13_across_the_window_border(name, attention):
    """Window 8, prompts inside and beyond it, drafts refused before, at and behind the border."""
    target, coverage = WINDOWED[name](attention), Coverage(4)
    for length in (5, 20):
        ids = prompts(1, seed=length, low=length, high=length)[0]
        reference = stock(target, ids, 40)
        assert hs.generate(target, ids, max_new_tokens=40).token_ids == reference
        # behind a prompt of 5, node 3 of the first block stands on position 8
        for first in range(5 if length == 5 else 2):
            drafter = Mixed(target, 4, [first, 4, 0, 3, 1], width=1 if (first + length) % 2 else 3)
            out = hs.generate(target, ids, drafter=drafter, max_new_tokens=40)
            assert out.token_ids == reference
            coverage.see(out)
    coverage.demand()


def test_b13_a_ragged_batch_across_the_window_border():
    target, coverage = tiny_target("gemma3"), Coverage(4)
    batch = prompts(6, seed=4, low=2, high=24)
    for width in (1, 3):
        drafter = Mixed(target, 4, [[3, 4, 0], [0, 1], [4], [2, 0, 4], [1], [0, 4]], width)
        outputs = coverage.see_steps(hs.stream(target, batch, drafter=drafter, max_new_tokens=30))
        assert [out.token_ids for out in outputs] == [stock(target, ids, 30) for ids in batch]
    coverage.demand(ragged=True)


@pytest.mark.parametrize("name", WINDOWED)
def test_b13_a_tree_deeper_than_the_window(name):
    """What a node sees is bounded by positions; the slots of a tree run ahead of them."""
    target, coverage = WINDOWED[name]("sdpa"), Coverage(11)
    for ids in prompts(4, seed=15, low=3):
        out = hs.generate(target, ids, drafter=Mixed(target, 11, [11, 0, 10, 3], width=2), max_new_tokens=30)
        assert out.token_ids == stock(target, ids, 30)
        coverage.see(out)
    coverage.demand()


# --- B14: the end of the context --------------------------------------------------------------------------------------

CONTEXT = 64


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_b14_the_last_block_fits_into_the_context(tiny, family):
    """A tree of 26 nodes and depth 5, everything accepted, from every distance to the limit."""
    target, coverage = tiny(family, max_positions=CONTEXT), Coverage(5)
    text = prompts(1, seed=7, low=CONTEXT, high=CONTEXT)[0]
    for length in range(40, CONTEXT):
        ids = text[:length]
        reference = stock(target, ids, CONTEXT - length)
        for drafter in (Oracle(target, 5, width=5), Mixed(target, 5, [5, 0, 2]))[: 1 + (length % 4 == 0)]:
            out = hs.generate(target, ids, drafter=drafter, max_new_tokens=100)
            assert (out.token_ids, out.finish_reason) == (reference, "length")
            assert length + len(out.token_ids) == CONTEXT
            coverage.see(out)
    coverage.demand()


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 3 * CONTEXT])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_b14_a_prompt_that_fills_the_context_is_refused(tiny, family, length):
    with pytest.raises(BadInput, match=f"{length} tokens.*{CONTEXT}"):
        hs.generate(tiny(family, max_positions=CONTEXT), [5] * length)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("width", [1, 5])
def test_b14_rows_of_a_batch_at_different_distances_to_the_limit(tiny, family, width):
    """A row without room sits beside rows that draft: its padding must not reach beyond the last position."""
    target, coverage = tiny(family, max_positions=CONTEXT), Coverage(5)
    batch = [[(7 * i + n) % 96 for i in range(n)] for n in (63, 40, 61, 5, 58)]
    drafter = Mixed(target, 5, [[5], [5, 0, 2], [0], [1, 5], [3]], width)
    outputs = coverage.see_steps(hs.stream(target, batch, drafter=drafter, max_new_tokens=100))
    for ids, out in zip(batch, outputs, strict=True):
        assert (out.token_ids, out.finish_reason) == (stock(target, ids, CONTEXT - len(ids)), "length")
    coverage.demand(ragged=True)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("policy", [hs.Chain(depth=4), TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("room", [20, CONTEXT])
def test_b14_a_draft_model_whose_context_ends(tiny, family, policy, room):
    """It drafts while it has room (and, in a shorter context, stops drafting): the answer stays the target's."""
    target = tiny(family, max_positions=CONTEXT)
    drafter = hs.DraftModel(tiny(family, max_positions=room), policy)
    batch = [[(7 * i + n) % 96 for i in range(n)] for n in (5, 12, 30, 60)]
    outputs = hs.generate(target, batch, drafter=drafter, max_new_tokens=100)
    for ids, out in zip(batch, outputs, strict=True):
        assert out.token_ids == stock(target, ids, CONTEXT - len(ids))
    assert [out.stats.drafted > 0 for out in outputs] == [True, True, room > 30, room > 60]


# --- S16 and path logits: the target itself ---------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_s16_padding_does_not_change_the_target(tiny, family, attention):
    """Rows of a ragged batch, in the prompt and behind it, have the logits they have alone."""
    target = tiny(family, attention=attention)
    batch = [ids[:n] for ids, n in zip(prompts(4, low=17, high=17), (0, 1, 9, 17), strict=True)]
    more = prompts(4, seed=1, low=4, high=4)
    longest = max(map(len, batch))
    padded = torch.tensor([ids + [95] * (longest - len(ids)) for ids in batch])
    cache = target.empty(4)
    first, _ = target.extend(cache, padded, chain(4, longest), NOTHING)
    cache = target.commit(cache, [range(len(ids)) for ids in batch])
    then, _ = target.extend(cache, torch.tensor(more), chain(4, 4), NOTHING)
    for row, (ids, new) in enumerate(zip(batch, more, strict=True)):
        expected = causal_logits(target, ids + new)
        found = torch.cat([first.logits_RNV([row])[0, : len(ids)], then.logits_RNV([row])[0]])
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def random_tree(rng: random.Random, nodes: int) -> list[int]:
    return [0] + [rng.randrange(max(0, node - 4), node) for node in range(1, nodes)]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_on_every_path_of_a_tree_equal_a_causal_pass(tiny, family, attention):
    """Kept or not, before and after a path was kept, in a ragged batch: every node's row is that of its path."""
    target, rng = tiny(family, attention=attention), random.Random(3)
    texts = prompts(3, seed=11, low=3)
    cache, _, _ = prefill(target, target.empty(3), texts, NOTHING)
    deepest = 0
    for _ in range(3):
        parents = [random_tree(rng, 14) for _ in texts]
        tokens = [[rng.randrange(96) for _ in range(14)] for _ in texts]
        rows, _ = target.extend(cache, torch.tensor(tokens), from_parents(torch.tensor(parents)), NOTHING)
        logits = rows.logits_RNV(range(3))
        kept = []
        for row, text in enumerate(texts):
            paths = []
            for node, parent in enumerate(parents[row]):
                paths.append([*paths[parent], node] if node else [0])
                path = [tokens[row][i] for i in paths[node]]
                expected = causal_logits(target, text + path)[-1]
                torch.testing.assert_close(logits[row, node], expected, atol=1e-4, rtol=0)
            kept.append(rng.choice(paths))
            deepest = max(deepest, len(kept[-1]))
        cache = target.commit(cache, kept)
        texts = [text + [tokens[row][i] for i in kept[row]] for row, text in enumerate(texts)]
    assert deepest > 3 and len(set(map(len, texts))) == 3


# --- S12, S17: taps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(1, 7))
@pytest.mark.parametrize("family", FAMILIES)
def test_s12_taps_are_the_hidden_states_of_transformers(family, count):
    config = {"layer_types": (["sliding_attention", "full_attention"] * 3)[:count]} if family == "gemma3" else {}
    target = tiny_target(family, **{"n_layer" if family == "gpt2" else "num_hidden_layers": count}, **config)
    ids = prompts(1, seed=count, low=12, high=12)[0]
    layers = tuple(range(count + 1))
    _, features = target.extend(target.empty(1), torch.tensor([ids]), chain(1, 12), Taps(final=True, layers=layers))
    with torch.no_grad():
        expected = target.model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    assert len(features.layers) == len(expected) == count + 1
    for ours, theirs in zip(features.layers[:-1], expected[:-1], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(features.final, expected[-1], atol=1e-5, rtol=1e-5)  # theirs is normalised, too
    norm = target.base.ln_f if family == "gpt2" else target.base.norm
    with torch.no_grad():
        torch.testing.assert_close(norm(features.layers[-1]), features.final, atol=1e-5, rtol=1e-5)


def test_s12_taps_come_in_the_order_asked_for_and_may_repeat(tiny):
    target = tiny()
    ids = torch.tensor([[4, 5, 6]])
    _, every = target.extend(target.empty(1), ids, chain(1, 3), Taps(layers=(0, 1, 2, 3)))
    _, some = target.extend(target.empty(1), ids, chain(1, 3), Taps(layers=(3, 0, 0, 2)))
    assert some.final is None
    for layer, ours in zip((3, 0, 0, 2), some.layers, strict=True):
        assert torch.equal(ours, every.layers[layer])


@pytest.mark.parametrize("layers", [(-1,), (4,), (0, 17), (2, -3)])
def test_s12_taps_out_of_range_are_refused(tiny, layers):
    target = tiny()

    def hooks() -> int:  # transformers leaves some of its own once hidden states were asked for
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in target.model.modules())

    before = hooks()
    with pytest.raises(BadInput, match=r"0\.\.3"):
        target.extend(target.empty(1), torch.tensor([[4]]), chain(1, 1), Taps(layers=layers))
    assert hooks() == before


@pytest.mark.parametrize("family", FAMILIES)
def test_s17_the_head_on_the_final_tap_is_the_model(tiny, family):
    """On every position of prompt and answer, through prefill and through drafted steps."""
    target = tiny(family)

    class Listening(Mixed):
        needs = Taps(final=True)
        heard: list[torch.Tensor]

        def absorb(self, state: Any, new: Any) -> Any:
            self.heard.append(new.features.final[0, : len(new.tokens[0])])
            return super().absorb(state, new)

    for ids in prompts(3, seed=12, low=5):
        drafter = Listening(target, 3, [0, 3, 1, 2], width=2)
        drafter.heard = []
        out = hs.generate(target, ids, drafter=drafter, max_new_tokens=20)
        logits = target.model.get_output_embeddings()(torch.cat(drafter.heard))
        if target.cap is not None:
            logits = torch.tanh(logits / target.cap) * target.cap
        expected = causal_logits(target, [*ids, *out.token_ids[:-1]])
        assert len(logits) == len(expected)
        assert logits.argmax(-1).tolist() == expected.argmax(-1).tolist()
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


# --- S10: scaled embeddings, soft-capped logits -----------------------------------------------------------------------


def test_s10_embed_is_what_the_first_layer_is_fed():
    target = tiny_target("gemma3")
    ids = torch.tensor([[4, 50, 95, 0]])
    _, features = target.extend(target.empty(1), ids, chain(1, 4), Taps(layers=(0,)))
    torch.testing.assert_close(target.embed(ids), features.layers[0])
    plain = torch.nn.functional.embedding(ids, target.model.get_input_embeddings().weight)
    assert not torch.allclose(target.embed(ids), plain), "this family was to scale its embeddings"


def test_s10_final_logits_are_capped_once():
    target, coverage = tiny_target("gemma3", final_logit_softcapping=3.0), Coverage(3)
    assert target.cap == 3.0
    for ids in prompts(4, seed=13, low=3):
        reference = stock(target, ids, 20)
        _, rows, _ = prefill(target, target.empty(1), [ids], NOTHING)
        own = causal_logits(target, ids)[-1]
        assert own.abs().max() <= 3
        torch.testing.assert_close(rows.logits_RNV([0])[0, 0], own, atol=1e-5, rtol=0)
        out = hs.generate(target, ids, drafter=Mixed(target, 3, [0, 3, 1]), max_new_tokens=20)
        assert out.token_ids == reference
        coverage.see(out)
    coverage.demand()
