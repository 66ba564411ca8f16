"""Text piece by piece: bugs.md B24, and `TextStream` on random ids of several kinds of tokenizer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import headstart as hs
from headstart.core import Features
from headstart.stopping import Stop, TextStream
from headstart.targets.base import Capabilities, Rows, Vocabulary
from headstart.targets.tiny import tiny_tokenizer
from headstart.testing import Mixed
from helpers import Coverage

quick = settings(deadline=None, derandomize=True, max_examples=120)

BYTES = tiny_tokenizer(256)
# a skin tone, a joined family, CJK, two-byte letters, a variation selector
TEXT = "Go 👍🏽! 👩‍👩‍👧‍👦 漢字かな交じり文 é ü, ok 🏴‍☠️"
LEAD, TAIL = BYTES.encode("é")  # the two bytes of a letter
SCRIPT = [*BYTES.encode(TEXT), LEAD]  # and a lone broken byte at the end
PROMPT = BYTES.encode("say: ")


class Scripted:
    """A target that says SCRIPT whatever stands before: its logits depend on the position alone."""

    def __init__(self, script=SCRIPT):
        self.script = torch.tensor(script)
        self.tokenizer, self.vocabulary = BYTES, Vocabulary.of(256, list(map(str, range(256))))
        self.device, self.eos = torch.device("cpu"), ()
        self.can = Capabilities(
            tree=True, rollback=True, taps=False, gather_head_rows=False, trainable=False,
            max_positions=1000, max_nodes=64, max_batch=64, dtype=torch.float32,
        )  # fmt: skip

    def empty(self, n_requests):
        return SimpleNamespace(lengths=[0] * n_requests)

    def extend(self, cache, token_BN, tree, needs):
        position_BN = torch.tensor(cache.lengths)[:, None] + tree.depth_BN
        return Rows(position_BN[:, :, None].float(), self.project), Features(None, ())

    def project(self, hidden_R1):
        turn = (hidden_R1[:, 0].long() + 1 - len(PROMPT)).clamp(0, len(self.script) - 1)
        return 9 * torch.nn.functional.one_hot(self.script[turn], 256).float()

    def commit(self, cache, kept):
        cache.lengths = [n + len(nodes) for n, nodes in zip(cache.lengths, kept, strict=True)]
        return cache

    def select(self, cache, requests):
        cache.lengths = [cache.lengths[r] for r in requests]
        return cache

    def rewind(self, cache, lengths):
        cache.lengths = list(lengths)
        return cache


PATTERNS = {
    "none": [0],
    "one": [1],
    "two": [2],
    "three": [3],
    "all": [4],
    "mixed": [4, 0, 2, 1, 3],
    "other": [1, 4, 4, 0, 3, 2],
}
ACCEPTS = pytest.mark.parametrize("accepts", PATTERNS.values(), ids=PATTERNS)


def both_ways(target, drafter, count, sampling=None):
    """The pieces of a stream, and the answer without streaming."""
    asked = {"drafter": drafter(), "max_new_tokens": count, "sampling": sampling}
    pieces = list(hs.stream(target, PROMPT, **asked))
    out = hs.generate(target, PROMPT, **asked | {"drafter": drafter()})
    assert pieces[-1].output.text == out.text
    assert pieces[-1].output.token_ids == out.token_ids == [token for piece in pieces for token in piece.token_ids]
    return pieces, out


# --- B24


@ACCEPTS
@pytest.mark.parametrize("width", (1, 2))
def test_b24_deltas_are_the_text(accepts, width):
    target = Scripted()
    pieces, out = both_ways(target, lambda: Mixed(target, 4, accepts, width), len(SCRIPT))
    assert out.token_ids == SCRIPT
    assert "".join(piece.text for piece in pieces) == out.text == BYTES.decode(SCRIPT) == TEXT + "\ufffd"
    assert not any("\ufffd" in piece.text for piece in pieces[:-1])
    shown = [piece.text for piece in pieces if piece.text]
    assert len(shown) > len(TEXT) / 6  # as soon as a character is complete, not all at the end
    if len(accepts) == 1:
        assert set(out.stats.accepted) <= {*accepts, (len(SCRIPT) - 1) % (accepts[0] + 1) - 1}


def test_b24_saw_every_accept_length():
    target, seen = Scripted(), Coverage(4)
    for accepts in PATTERNS.values():
        seen.see(hs.generate(target, PROMPT, drafter=Mixed(target, 4, accepts), max_new_tokens=len(SCRIPT)))
    seen.demand()
    assert seen.accepted == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("count", range(1, len(SCRIPT)))
def test_b24_a_limit_inside_a_character(count):
    target = Scripted()
    accepts = list(PATTERNS.values())[count % len(PATTERNS)]
    pieces, out = both_ways(target, lambda: Mixed(target, 4, accepts), count)
    assert out.finish_reason == "length"
    assert "".join(piece.text for piece in pieces) == out.text == BYTES.decode(SCRIPT[:count])


@ACCEPTS
@pytest.mark.parametrize(
    ("stop", "left"),
    [
        (["👧"], TEXT[: TEXT.index("👧")]),  # inside a joined family
        (["\u200d☠"], TEXT[: TEXT.index("\u200d☠")]),
        (["字か", "な交"], TEXT[: TEXT.index("字か")]),
        (["字x", "漢字かな?"], TEXT + "\ufffd"),  # begins again and again, never completed
        (["é", "か", " 漢"], TEXT[: TEXT.index(" 漢")]),
        (["ok 🏴‍☠️\ufffd"], TEXT[: TEXT.index("ok")]),  # completed by the broken byte, when nothing more comes
        (["ok 🏴‍☠️\ufffd!"], TEXT + "\ufffd"),
        (["G"], ""),
    ],
    ids=str,
)
def test_b24_stop_strings_are_held_back(accepts, stop, left):
    target = Scripted()
    how = hs.Sampling(stop=stop)
    pieces, out = both_ways(target, lambda: Mixed(target, 4, accepts), len(SCRIPT), how)
    assert "".join(piece.text for piece in pieces) == out.text == left
    assert out.finish_reason == ("length" if left.endswith("\ufffd") else "stop")
    assert BYTES.decode(out.token_ids).startswith(left)


def test_b24_batches_stream_row_by_row():
    target = Scripted()
    drafter = Mixed(target, 4, [[0], [4, 1], [2]])
    texts = ["", "", ""]
    for piece in hs.stream(target, [PROMPT] * 3, drafter=drafter, max_new_tokens=len(SCRIPT)):
        texts[piece.request] += piece.text
    assert texts == [TEXT + "\ufffd"] * 3


# --- TextStream on random ids


def wrapped(tokenizer):
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def merging():
    """Byte-level BPE whose merges end inside characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    first = [BYTES.convert_ids_to_tokens(i) for i in (LEAD, TAIL, *BYTES.encode("漢"), *BYTES.encode("a "))]
    pairs = [(first[0], first[1]), (first[2], first[3]), (first[5], first[6]), (first[6], first[0])]
    vocabulary = {c: i for i, c in enumerate([*alphabet, *(a + b for a, b in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.decoder = decoders.ByteLevel()
    return wrapped(tokenizer)


WORDS = ["▁", "▁the", "▁cat", "s", "▁▁", ",", "漢", "é", "▁é"]


def sentencepiece():
    """Words with a leading-space mark, and bytes for what has no token of its own."""
    vocabulary = {word: i for i, word in enumerate(WORDS + [f"<0x{b:02X}>" for b in range(256)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrapped(tokenizer)


def wordpiece():
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(["[UNK]", "play", "##ing", "##s", ".", "a"])}))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return wrapped(tokenizer)


def with_special():
    tokenizer = sentencepiece()
    tokenizer.add_special_tokens({"eos_token": "<end>", "additional_special_tokens": ["<pad>", "<turn>"]})
    return tokenizer


MERGED, PIECES, SPECIAL, PARTS = merging(), sentencepiece(), with_special(), wordpiece()
SMALL, WIDE, BEYOND = tiny_tokenizer(96), tiny_tokenizer(200), tiny_tokenizer(300)


def ids_below(size):
    return st.lists(st.integers(0, size - 1), max_size=24)


@st.composite
def fallback_ids(draw, specials=()):
    """Words and whole characters in bytes; a broken one only behind a word, because a fallback decoder reads a run
    of bytes as a whole: what follows a good character could still spoil it."""
    out = []
    for part in draw(st.lists(st.one_of(st.sampled_from(WORDS), st.sampled_from("é漢👍")), max_size=12)):
        whole = part in WORDS
        out += [WORDS.index(part)] if whole else [len(WORDS) + b for b in part.encode()]
        if specials and draw(st.booleans()):
            out.append(draw(st.sampled_from(specials)))
    if draw(st.booleans()):
        out += [1, len(WORDS) + 0xE6, len(WORDS) + 0xBC]
    return out


SPLIT = [*range(256, 260), LEAD, TAIL, *BYTES.encode("漢a ")]
STREAMS = {
    "bytes": (BYTES, ids_below(256)),
    "bytes of few characters": (BYTES, st.lists(st.sampled_from(BYTES.encode("é漢👍a")), max_size=24)),
    "ids beyond the vocabulary": (BEYOND, ids_below(300)),
    "merged bytes": (MERGED, st.lists(st.sampled_from(SPLIT), max_size=24)),
    "letters": (SMALL, ids_below(96)),
    "accents": (WIDE, ids_below(200)),
    "leading-space marks and byte fallback": (PIECES, fallback_ids()),
    "special tokens": (SPECIAL, fallback_ids(SPECIAL.convert_tokens_to_ids(["<end>", "<pad>", "<turn>"]))),
    "word pieces": (PARTS, ids_below(6)),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_text_stream_gives_the_text(name):
    tokenizer, ids_strategy = STREAMS[name]

    @quick
    @given(ids_strategy)
    def check(ids):
        stream = TextStream(tokenizer)
        pieces = [stream.push(token) for token in ids]
        whole = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert whole.startswith("".join(pieces))
        assert not any(piece.endswith("\ufffd") for piece in pieces)
        assert "".join([*pieces, stream.flush()]) == whole == stream.text
        assert stream.flush() == ""

    check()


@quick
@given(st.text("ab ", max_size=20), st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_finds_the_first_completed_string(text, stops, data):
    """Against a plain search in every prefix, for any split into blocks and any limit."""
    ids = SMALL.encode(text)
    limit = data.draw(st.integers(1, 25))
    stop = Stop((), stops, limit, SMALL)
    pieces, rest = [], list(ids)
    while rest and stop.reason is None:
        block = rest[: data.draw(st.integers(1, 6))]
        count = stop.cut(block)
        pieces.append(stop.piece())
        rest = rest[count:] if stop.reason is None else []
    expected, reason, emitted = text[:limit], "length" if len(text) >= limit else None, min(limit, len(text))
    for end in range(1, len(expected) + 1):
        found = [expected[:end].find(s) for s in stops if s in expected[:end]]
        if found:
            expected, reason, emitted = expected[: min(found)], "stop", end
            break
    assert (stop.text, stop.reason, stop.emitted) == (expected, reason, emitted)
    assert stop.text.startswith("".join(pieces))
    if stop.reason:
        assert "".join(pieces) == stop.text
