"""Draft vocabularies: maps that invert each other, the law of a top-k, and which ids are chosen."""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headstart.core import Readout
from headstart.errors import BadInput
from headstart.targets.resolve import resolve
from headstart.targets.tiny import tiny_tokenizer
from headstart.vocab import base, build
from headstart.vocab.base import DraftVocab, first_best
from headstart.vocab.build import count_tokens, coverage, forced_ids, single_bytes
from headstart.vocab.full import Full
from headstart.vocab.trimmed import Trimmed

quick = settings(deadline=None, derandomize=True, max_examples=100)
F = 6


@st.composite
def trimmed(draw: st.DrawFn) -> Trimmed:
    """Any ids in any order."""
    size = draw(st.integers(1, 60))
    return Trimmed(draw(st.lists(st.integers(0, size - 1), min_size=1, unique=True)), size)


@st.composite
def vocabularies(draw: st.DrawFn) -> DraftVocab:
    return draw(st.one_of(trimmed(), st.builds(Full, st.integers(1, 60))))


def target_size(vocab: DraftVocab) -> int:
    return vocab.target_size if isinstance(vocab, Trimmed) else vocab.size


def ids_of(vocab: DraftVocab) -> list[int]:
    return list(vocab.ids) if isinstance(vocab, Trimmed) else list(range(vocab.size))


def rows(seed: int, *shape: int, tied: bool = False) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.round() if tied else x


# --- maps


@quick
@given(vocabularies())
def test_labels_and_to_target_invert_each_other(vocab: DraftVocab) -> None:
    index_U = torch.arange(vocab.size)
    token_U = vocab.to_target(index_U)
    assert token_U.tolist() == ids_of(vocab)
    back_U, known_U = vocab.labels(token_U)
    assert torch.equal(back_U, index_U) and known_U.all()
    assert torch.equal(index_U if vocab.ids_U is None else vocab.ids_U, token_U)


@quick
@given(vocabularies(), st.lists(st.integers(-200, 200), min_size=1))
def test_unknown_labels_are_flagged_and_zero(vocab: DraftVocab, tokens: list[int]) -> None:
    index_S, known_S = vocab.labels(torch.tensor(tokens))
    ids = ids_of(vocab)
    assert known_S.dtype == torch.bool and index_S.dtype == torch.long
    assert known_S.tolist() == [token in ids for token in tokens]
    assert index_S.tolist() == [ids.index(token) if token in ids else 0 for token in tokens]


@pytest.mark.parametrize("vocab", (Full(9), Trimmed([8, 2, 0], 9)))
def test_labels_take_any_shape_and_ids_outside_are_not_bent_into_it(vocab: DraftVocab) -> None:
    """-100 marks ignored labels. Counted from the end, -7 is id 2; cut to the range, -1 is id 0 and 9 is id 8."""
    index_S, known_S = vocab.labels(torch.tensor([[2, -100, -7], [-1, 9, 8]], dtype=torch.int32))
    assert known_S.tolist() == [[True, False, False], [False, False, True]]
    assert vocab.to_target(index_S)[known_S].tolist() == [2, 8]


def test_an_index_outside_the_draft_vocabulary_is_no_token() -> None:
    for index in (-1, 3):
        with pytest.raises(IndexError):
            Trimmed([7, 2, 5], 9).to_target(torch.tensor([[index]]))
    assert Trimmed([7, 2, 5], 9).to_target(torch.tensor([[2, 0]])).tolist() == [[5, 7]]


@quick
@given(trimmed())
def test_every_layout_round_trips(vocab: Trimmed) -> None:
    assert Trimmed.from_token_map(vocab.token_map, vocab.target_size) == vocab
    assert Trimmed.from_token_map(vocab.token_map.tolist(), vocab.target_size) == vocab
    rising = vocab.sorted()
    assert rising.ids == tuple(sorted(vocab.ids)) and rising.target_size == vocab.target_size
    assert Trimmed.from_d2t(rising.d2t, rising.t2d) == rising
    assert Trimmed.from_d2t(rising.d2t.int(), rising.t2d) == rising  # as TensorRT-LLM stores it


def test_layouts_by_hand() -> None:
    vocab = Trimmed([1, 2, 5, 7], 9)
    assert vocab.token_map.tolist() == [1, 2, 5, 7]
    assert vocab.d2t.tolist() == [1, 1, 3, 4]
    assert vocab.t2d.tolist() == [False, True, True, False, False, True, False, True, False]
    assert vocab.token_map.dtype == vocab.d2t.dtype == torch.long
    vocab.token_map.zero_()  # the caller's own copy
    assert vocab.to_target(torch.arange(4)).tolist() == [1, 2, 5, 7]


def test_frequency_order_is_kept_and_has_no_d2t() -> None:
    vocab = Trimmed((7, 2, 5), 9)
    assert vocab.ids == (7, 2, 5)
    assert vocab.token_map.tolist() == [7, 2, 5]
    with pytest.raises(BadInput, match=r"id 7 stands before 2.*sorted"):
        _ = vocab.d2t


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "at least one"),
        ([3, 9], r"Id 9 .* outside 0\.\.8"),
        ([-1], "Id -1"),
        ([4, 1, 4], "Id 4 stands 2 times"),
        ([1.0], "must be integers"),
        (3, "must be integers"),
    ],
)
def test_impossible_ids_are_refused(ids: list[int], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Trimmed(ids, 9)


def test_ids_of_any_integer_type_are_kept_as_plain_ones() -> None:
    for ids in (torch.tensor([5, 3]), torch.tensor([5, 3]).numpy(), iter([5, 3])):
        vocab = Trimmed(ids, 9)
        assert vocab == Trimmed([5, 3], 9) and hash(vocab) == hash(Trimmed([5, 3], 9))
        assert [type(i) for i in vocab.ids] == [int, int]


GOOD = Trimmed([1, 2, 5], 7)


@pytest.mark.parametrize(
    ("d2t", "t2d", "message"),
    [
        (GOOD.d2t[:2], GOOD.t2d, r"2 ids.*3 ids set"),
        (GOOD.d2t + 1, GOOD.t2d, "disagree"),
        (GOOD.token_map, GOOD.t2d, "from_token_map"),
        (torch.tensor([2, 0, 3]), GOOD.t2d, "ascending"),  # ids 2, 1, 5
        (GOOD.d2t, GOOD.t2d.long(), "one bool per target id"),
        (GOOD.d2t, GOOD.t2d[None], "one bool per target id"),
        (GOOD.d2t.float(), GOOD.t2d, "expected integers"),
        (GOOD.d2t[None], GOOD.t2d, "expected integers"),
        (GOOD.t2d, GOOD.t2d, "expected integers"),
        (GOOD.d2t[:0], torch.zeros(7, dtype=torch.bool), "at least one"),
    ],
)
def test_maps_that_contradict_each_other_are_refused(d2t: torch.Tensor, t2d: torch.Tensor, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Trimmed.from_d2t(d2t, t2d)


def test_a_token_map_of_offsets_or_floats_is_refused() -> None:
    with pytest.raises(BadInput, match="expected every id once"):
        Trimmed.from_token_map(GOOD.d2t, 7)
    with pytest.raises(BadInput, match="expected integers"):
        Trimmed.from_token_map(GOOD.token_map.float(), 7)


def test_the_digest_is_that_of_the_content() -> None:
    """The first one is written down: a digest that changes between versions or processes would orphan caches."""
    vocab = Trimmed([1, 2, 5, 7], 9)
    assert vocab.digest == Trimmed(torch.tensor([1, 2, 5, 7]), 9).digest == "956447067dd2c7ac"
    others = [
        Trimmed(*a)
        for a in (([1, 2, 5, 8], 9), ([1, 2, 7, 5], 9), ([1, 2, 5], 9), ([1, 2, 5, 7], 10), ([12, 5, 7], 99))
    ]
    assert len({vocab.digest, *(other.digest for other in others)}) == 6
    assert vocab.digest in repr(vocab) and len(repr(Trimmed(range(1000), 1000))) < 80


# --- laws


@quick
@given(vocabularies(), st.data())
def test_topk_is_softmax_and_sort_of_the_chosen_logits(vocab: DraftVocab, data: st.DataObject) -> None:
    """By read-outs over all ids and over the chosen ones; half of the logits are whole numbers, full of ties."""
    k, count = data.draw(st.integers(1, vocab.size)), data.draw(st.integers(0, 4))
    seed, tied = data.draw(st.integers(0, 999)), data.draw(st.booleans())
    weight_VF, feature_RF = rows(seed, target_size(vocab), F, tied=tied), rows(seed + 1, count, F, tied=tied)
    ids = torch.tensor(ids_of(vocab))
    law_RU = torch.softmax((feature_RF @ weight_VF.T)[:, ids], 1)
    order_RK = (feature_RF @ weight_VF.T)[:, ids].sort(dim=1, descending=True, stable=True).indices[:, :k]
    readouts = [Readout(lambda x: x @ weight_VF.T, target_size(vocab))]
    if vocab.ids_U is not None:
        readouts.append(Readout(lambda x: x @ weight_VF[ids].T, vocab.size, ids))
    for readout in readouts:
        token_RK, logp_RK = vocab.topk(readout, feature_RF, k)
        assert logp_RK.dtype == torch.float32 and logp_RK.shape == (count, k)
        torch.testing.assert_close(logp_RK, law_RU.gather(1, order_RK).log(), atol=1e-4, rtol=1e-4)
        if tied:  # the products are whole numbers, so all ways to compute them agree to the bit
            assert torch.equal(token_RK, ids[order_RK])
        else:
            torch.testing.assert_close(law_RU.gather(1, order_RK), law_RU.gather(1, vocab.labels(token_RK)[0]))


def identity(vocab: DraftVocab) -> Readout:
    """Features are the logits."""
    return Readout(lambda x: x, vocab.size, vocab.ids_U)


def test_equal_logits_come_in_draft_order() -> None:
    logits = torch.tensor([[1.0, 3.0, -torch.inf, 3.0, 0.0, -0.0, 3.0, 1.0]])
    vocab = Trimmed([30, 10, 50, 20, 60, 40, 70, 0], 80)
    tokens, logp = vocab.topk(identity(vocab), logits, 8)
    assert tokens.tolist() == [[10, 20, 70, 30, 0, 60, 40, 50]]
    assert logp[0, -1] == -torch.inf and logp.exp().sum().item() == pytest.approx(1)
    assert Full(8).topk(identity(Full(8)), logits, 4)[0].tolist() == [[1, 3, 6, 0]]
    assert Full(8).topk(identity(Full(8)), logits, 1)[0].tolist() == [[int(logits.argmax())]]


@pytest.mark.parametrize("width", (1, base.BLOCK - 1, base.BLOCK, base.BLOCK + 1, 20 * base.BLOCK + 3))
@pytest.mark.parametrize("values", ("bf16", "few", "equal", "mostly -inf", "distinct"))
def test_the_search_by_blocks_is_a_stable_sort(width: int, values: str) -> None:
    score = {
        "bf16": rows(0, 5, width).bfloat16().float(),
        "few": 1e-3 * rows(1, 5, width, tied=True),
        "equal": torch.full((5, width), -7.5),
        "mostly -inf": rows(2, 5, width).where(rows(3, 5, width) > 1.5, -torch.inf),
        "distinct": 1e20 * rows(4, 5, width),
    }[values]
    expected = score.sort(dim=1, descending=True, stable=True).indices
    for k in {1, min(2, width), min(10, width), min(300, width), width}:
        assert torch.equal(first_best(score, k), expected[:, :k])


def test_bf16_logits_give_an_fp32_law() -> None:
    logits = rows(5, 3, 500).bfloat16()
    _, logp = Full(500).topk(identity(Full(500)), logits, 5)
    exact = torch.log_softmax(logits.double(), 1).sort(dim=1, descending=True).values[:, :5]
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp.double(), exact, atol=1e-5, rtol=0)


def test_wide_frontiers_are_projected_in_parts() -> None:
    seen: list[int] = []

    def project(x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return x

    feature = rows(6, 2 * base.TOPK_ROWS + 7, 5)
    token, logp = Full(5).topk(Readout(project, 5), feature, 2)
    assert max(seen) == base.TOPK_ROWS and sum(seen) == len(feature)
    torch.testing.assert_close(logp, feature.log_softmax(1).topk(2).values)
    assert torch.equal(token, feature.topk(2).indices)


@pytest.mark.parametrize("vocab", (Full(3), Trimmed([7, 2, 5], 9)))
@pytest.mark.parametrize("k", (0, 4, -1))
def test_more_candidates_than_ids_are_refused(vocab: DraftVocab, k: int) -> None:
    with pytest.raises(BadInput, match=rf"{k} candidates .* ask for 1 to 3"):
        vocab.topk(identity(vocab), torch.zeros(1, 3), k)


@pytest.mark.parametrize(
    ("vocab", "readout"),
    [
        (Full(9), Readout(lambda x: x, 8)),
        (Full(3), Readout(lambda x: x, 3, torch.tensor([0, 1, 2]))),
        (Trimmed([7, 2, 5], 9), Readout(lambda x: x, 3)),
        (Trimmed([7, 2, 5], 9), Readout(lambda x: x, 10)),
        (Trimmed([7, 2, 5], 9), Readout(lambda x: x, 3, torch.tensor([2, 5, 7]))),
        (Trimmed([7, 2, 5], 9), Readout(lambda x: x, 2, torch.tensor([7, 2]))),
    ],
)
def test_a_readout_with_other_columns_is_refused(vocab: DraftVocab, readout: Readout) -> None:
    for _ in range(2):
        with pytest.raises(BadInput, match="read-out"):
            vocab.topk(readout, torch.zeros(1, readout.size), 1)


def test_ids_are_compared_once_per_tensor_and_in_any_integer_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison waits for the device, and drafting has one wait per step only."""
    vocab, compared = Trimmed([7, 2, 5], 9), []
    equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda a, b: compared.append(a) or equal(a, b))
    ids = torch.tensor([7, 2, 5], dtype=torch.int32)
    for _ in range(4):
        assert vocab.topk(Readout(lambda x: x, 3, ids), torch.eye(3), 1)[0].tolist() == [[7], [2], [5]]
    assert len(compared) == 1
    with pytest.raises(BadInput):
        vocab.topk(Readout(lambda x: x, 3, torch.tensor([2, 7, 5])), torch.eye(3), 1)


def test_a_readout_that_is_being_trained_can_be_drafted_from() -> None:
    weight = rows(7, 9, F).requires_grad_()
    token, _ = Trimmed([7, 2, 5], 9).topk(Readout(lambda x: x @ weight.T, 9), rows(8, 4, F), 2)
    assert not token.requires_grad and set(token.flatten().tolist()) <= {7, 2, 5}


def test_no_device_tensor_is_read_in_a_step() -> None:
    """The rule of tests/test_sync.py, for the functions that a draft runs."""
    for function in (
        base.best,
        base.first_best,
        base._rank,
        Trimmed.topk,
        Trimmed.to_target,
        Trimmed.labels,
        Full.topk,
    ):
        source = inspect.getsource(function)
        assert not [name for name in (".item(", ".tolist(", ".cpu(", ".numpy(") if name in source]


@quick
@given(vocabularies(), st.integers(0, 999), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_restricted_laws_are_conditional_laws(vocab: DraftVocab, seed: int, dtype: torch.dtype) -> None:
    law_SV = torch.softmax(3 * rows(seed, 4, target_size(vocab)).double(), 1).to(dtype)
    got_SU, known_S = vocab.restrict(law_SV)
    inside_SU = law_SV[:, ids_of(vocab)].double()
    assert known_S.all() and got_SU.shape == (4, vocab.size)
    if isinstance(vocab, Full):
        assert got_SU is law_SV
    else:
        assert got_SU.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(got_SU.double(), inside_SU / inside_SU.sum(1, keepdim=True), atol=1e-6, rtol=1e-5)


def test_rows_without_mass_inside_are_zero_and_reported() -> None:
    law_SV = torch.tensor([[0.5, 0.0, 0.5, 0.0], [0.2, 0.2, 0.3, 0.3], [0.0, 1e-42, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    law_SU, known_S = Trimmed([3, 1], 4).restrict(law_SV)
    assert known_S.tolist() == [False, True, True, False]
    torch.testing.assert_close(law_SU, torch.tensor([[0, 0], [0.6, 0.4], [0, 1], [0, 0]]))
    assert Full(4).restrict(law_SV)[1].tolist() == [True, True, True, False]


@pytest.mark.parametrize("vocab", (Full(4), Trimmed([3, 1], 4)))
def test_a_law_of_another_width_is_refused(vocab: DraftVocab) -> None:
    for width in (2, 5):
        with pytest.raises(BadInput, match=f"law of {width} ids.*for 4"):
            vocab.restrict(torch.full((1, width), 1 / width))


def test_a_full_vocabulary_has_ids() -> None:
    with pytest.raises(BadInput, match="size=0"):
        Full(0)


# --- counts


def test_counts_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    text = [[3, 1, 3], [], [0, 3], (1,)]
    for pending in (1, 4, build.PENDING):
        monkeypatch.setattr(build, "PENDING", pending)
        count_V = count_tokens(iter(text), 5)
        assert count_V.tolist() == [1, 2, 0, 3, 0] and count_V.dtype == torch.long
    assert count_tokens([], 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize("token", (-1, 5))
def test_ids_of_another_tokenizer_are_not_counted(token: int) -> None:
    with pytest.raises(BadInput, match=r"0\.\.4"):
        count_tokens([[1, token, 2]], 5)


def test_coverage_by_hand() -> None:
    count_V = torch.tensor([10, 0, 5, 3, 2])
    assert coverage(count_V, Trimmed([3, 0], 5)) == 13 / 20
    assert coverage(count_V, Trimmed([1], 5)) == 0
    assert coverage(count_V, Full(5)) == 1
    with pytest.raises(BadInput, match="No token"):
        coverage(torch.zeros(5, dtype=torch.long), Full(5))


# --- the choice


@st.composite
def choices(draw: st.DrawFn) -> tuple[torch.Tensor, int, list[int], int]:
    """Counts with many zeros and ties, padding rows that occur as often as any, and forced ids."""
    real = draw(st.integers(1, 40))
    padding = draw(st.integers(0, 8))
    count_V = draw(st.lists(st.integers(0, 4), min_size=real + padding, max_size=real + padding))
    forced = draw(st.lists(st.integers(0, real - 1), max_size=real))
    return torch.tensor(count_V), draw(st.integers(max(1, len(set(forced))), real)), forced, real


@quick
@given(choices())
def test_forced_ids_then_the_most_frequent(choice: tuple[torch.Tensor, int, list[int], int]) -> None:
    count_V, size, forced, real = choice
    before = count_V.clone()
    vocab = build.build(count_V, size, forced, real)
    chosen = set(vocab.ids)
    assert vocab.ids == tuple(sorted(chosen)) and len(chosen) == size
    assert vocab.target_size == len(count_V) and set(forced) <= chosen
    assert max(chosen) < real  # bugs.md B17: padding rows mean nothing
    left = [i for i in range(real) if i not in chosen]
    free = chosen - set(forced)
    if left and free:  # nothing left out is better than anything that was free to be chosen
        worst = max(free, key=lambda i: (-int(count_V[i]), i))
        assert all((-int(count_V[worst]), worst) < (-int(count_V[i]), i) for i in left)
    again = build.build(count_V, size, list(reversed(forced)), real)
    assert again == vocab and again.digest == vocab.digest and torch.equal(count_V, before)


def test_a_choice_by_hand() -> None:
    count_V = torch.tensor([0, 5, 2, 2, 9, 0, 1, 99])
    assert build.build(count_V, 4, [6], 7).ids == (1, 2, 4, 6)
    assert build.build(count_V, 4, [6, 6], None).ids == (1, 4, 6, 7)


def test_a_corpus_with_fewer_tokens_than_the_vocabulary_is_padded() -> None:
    """field.md, vocabulary row 13: a small corpus must not shorten the list or crash."""
    count_V = count_tokens([[8, 8, 5]], 12)
    assert build.build(count_V, 6, [9], 10).ids == (0, 1, 2, 5, 8, 9)
    assert build.build(count_tokens([], 12), 3, [], 10).ids == (0, 1, 2)
    assert build.build(count_V, 10, [], 10).ids == tuple(range(10))


@pytest.mark.parametrize(
    ("size", "forced", "real", "message"),
    [
        (2, [1, 2, 3], 10, "3 forced ids.*choose 3 to 10"),
        (11, [1], 10, "11 ids.*choose 1 to 10"),
        (0, [], 10, "choose 1 to 10"),
        (5, [10], 10, "Forced id 10"),
        (5, [-1], 10, "Forced id -1"),
        (5, [], 13, "real_ids is 13"),
        (5, [], 0, "real_ids is 0"),
    ],
)
def test_impossible_choices_are_refused(size: int, forced: list[int], real: int, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        build.build(torch.ones(12, dtype=torch.long), size, forced, real)


# --- forced ids


def test_all_bytes_in_both_spellings() -> None:
    """The 256 bytes of GPT-2's table as the tokenizers library has it, and those of SentencePiece."""
    texts = single_bytes()
    assert len(texts) == len(set(texts)) == 512
    assert set(texts[:256]) == set(pre_tokenizers.ByteLevel.alphabet())
    assert texts[256] == "<0x00>" and texts[-1] == "<0xFF>" and texts[256 + 10] == "<0x0A>"


def tokenizer(vocab: list[str], template: str | dict[str, str] | None) -> PreTrainedTokenizerFast:
    """The given words, then three special tokens and two added ones that are not flagged as special."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE({w: i for i, w in enumerate(vocab)}, [])), eos_token="<eos>"
    )
    fast.add_tokens([AddedToken(text, special=True) for text in ("<turn>", "<unused>")])
    fast.add_tokens([AddedToken(text, special=False) for text in ("<think>", "<rare>")])
    fast.chat_template = template
    return fast


TEMPLATE = "<turn>{{ messages[0].content }}<think>"


@pytest.mark.parametrize("template", (TEMPLATE, {"default": "none", "tool_use": TEMPLATE}))
def test_byte_level_tokenizers_keep_bytes_specials_and_template_tokens(template: str | dict[str, str]) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["Ġthe", *alphabet[:100], "ing", *alphabet[100:], "er"]
    made = tokenizer(words, template)
    vocab = made.get_vocab()
    expected = [i for i, w in enumerate(words) if len(w) == 1]
    expected += [vocab[text] for text in ("<eos>", "<turn>", "<unused>", "<think>")]
    assert len(expected) == 260
    assert forced_ids(made, [vocab["<eos>"]]) == sorted(expected)
    assert forced_ids(made, [0, vocab["<eos>"]]) == sorted([0, *expected])  # a stop id that is nothing else


def test_byte_fallback_tokenizers_keep_their_bytes() -> None:
    words = ["▁the", "<0x1G>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁of", "<0xab>", "é", "世"]
    made = tokenizer(words, None)
    forced = forced_ids(made, ())
    named = {"<eos>", "<turn>", "<unused>"}
    assert forced == sorted([*range(2, 258), words.index("é"), *(made.get_vocab()[text] for text in named)])


def test_tokenizers_without_bytes_or_without_anything() -> None:
    assert forced_ids(None, [5, 2, 5]) == [2, 5]
    byte_level = tiny_tokenizer(256)
    assert forced_ids(byte_level, ()) == list(range(256))
    characters = tiny_tokenizer(96)
    visible = {t: i for t, i in characters.get_vocab().items() if "!" <= t <= "~"}
    assert len(visible) == 94
    assert forced_ids(characters, [95]) == [*sorted(visible.values()), 95]


@pytest.mark.real
def test_the_forced_ids_of_smollm2() -> None:
    """Its vocabulary holds 235 single bytes: the others occur in no UTF-8 text that it was trained on."""
    from transformers import AutoTokenizer

    real = AutoTokenizer.from_pretrained(resolve("smollm2-135m"), local_files_only=True)
    forced = forced_ids(real, [2])
    assert forced[:17] == list(range(17))  # <|endoftext|> to <empty_output>
    assert len(forced) == 17 + 235
    text = "def f(x):\n\treturn x ** 2  # naïve, 世界, \U0001f600"
    count_V = count_tokens([real.encode(text)], 49152)
    vocab = build.build(count_V, 512, forced, len(real))
    assert set(forced) < set(vocab.ids) and vocab.size == 512
    assert coverage(count_V, vocab) == 1
    assert coverage(count_tokens([real.encode("unforeseeable circumstances")], 49152), vocab) < 1
    assert vocab == Trimmed.from_d2t(vocab.d2t, vocab.t2d)
