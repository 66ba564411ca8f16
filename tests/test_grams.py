"""Overlap by runs of words: by hand, and what must hold for any text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.train.grams import RUN, WORD, Diversity, Seen, diversity, grams

texts = st.one_of(
    st.text(max_size=60), st.lists(st.sampled_from(["ab", "cd", "é", "日本", "x_1", "7"]), max_size=14).map(" ".join)
)


def numbered(*words: int) -> str:
    return " ".join(f"w{i}" for i in words)


def test_runs_by_hand() -> None:
    assert grams("A b, c-D!", 3) == {("a", "b", "c"), ("b", "c", "d")}
    assert grams("A b", 3) == {("a", "b")}  # shorter than a run: the text itself
    assert grams("a b c", 3) == {("a", "b", "c")}
    assert grams("a a a a", 2) == {("a", "a")}
    assert grams("") == grams(" .,!\n") == set()
    assert grams(numbered(*range(9))) == {tuple(f"w{i}" for i in range(s, s + 8)) for s in (0, 1)}
    assert RUN == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It's 3.5 µm, naïve_x", ["It", "s", "3", "5", "µm", "naïve_x"]),
        ("请解释一下。ok", ["请", "解", "释", "一", "下", "ok"]),  # no blanks between words: each character counts
        ("カメラtest漢字", ["カ", "メ", "ラ", "test", "漢", "字"]),
        ("привет мир", ["привет", "мир"]),
        ("안녕 하세요", ["안녕", "하세요"]),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert WORD.findall(text) == words


def test_seven_words_in_common_are_none_eight_are_one() -> None:
    seen = Seen([numbered(*range(10))])
    assert seen.overlaps(numbered(90, *range(2, 10), 91))
    assert not seen.overlaps(numbered(90, *range(3, 10), 91))
    assert not seen.overlaps(numbered(*range(9, -1, -1)))  # order counts
    assert seen.overlaps(numbered(*range(10)).upper() + "!")  # case and punctuation do not
    assert not seen.overlaps(numbered(0, 1, 2))  # a short text is near to itself only
    seen.add(numbered(0, 1, 2))
    assert seen.overlaps(numbered(0, 1, 2)) and not seen.overlaps(numbered(0, 1)) and not seen.overlaps("")


@settings(max_examples=80, deadline=None)
@given(texts, texts, st.integers(1, 9))
def test_overlap_is_symmetric_and_never_needs_order_of_arrival(one: str, other: str, run: int) -> None:
    assert (
        Seen([one], run).overlaps(other)
        == Seen([other], run).overlaps(one)
        == bool(grams(one, run) & grams(other, run))
    )
    assert Seen([one], run).overlaps(one) == bool(WORD.search(one))
    both = Seen([one, other], run)
    assert both.overlaps(one) == bool(WORD.search(one)) and both.overlaps(other) == bool(WORD.search(other))


@settings(max_examples=80, deadline=None)
@given(st.lists(texts, max_size=6), st.integers(1, 9))
def test_diversity_counts(many: list[str], run: int) -> None:
    found = diversity(iter(many), run)
    each = [grams(text, run) for text in many]
    assert found.texts == len(many) and found.runs == sum(map(len, each))
    assert found.distinct == (len(set().union(*each)) / found.runs if found.runs else 0)
    near = sum(bool(each[i] & set().union(*each[:i])) for i in range(len(each)))
    assert found.near_duplicates == (near / len(many) if many else 0)


def test_diversity_by_hand() -> None:
    assert diversity([]) == Diversity(0, 0, 0.0, 0.0)
    assert diversity(["a b c", "x b c", "", "q"], 2) == Diversity(4, 5, 4 / 5, 1 / 4)
    assert diversity(["a b", "a b", "a b"], 2) == Diversity(3, 3, 1 / 3, 2 / 3)
