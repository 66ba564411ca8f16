from __future__ import annotations

from typing import Any

import pytest
import torch

import headstart as hs
from headstart.core import Budget, Committed, Features
from headstart.errors import BadInput
from headstart.testing import tiny_target


def drafted(
    drafter: hs.PromptLookup, tokens: list[int], depth: int = 99, nodes: int = 99
) -> tuple[list[int], list[int]]:
    """Tokens and parents drafted after a text whose last token is the root."""
    state = drafter.start(1)
    none = Features(None, ())
    state = drafter.absorb(state, Committed([tokens[:-1]], [tokens[-1]], [[-1] * (len(tokens) - 1)], none))
    draft = drafter.draft(state, Budget([depth], nodes), [], [])
    assert draft.valid_BN.all()
    return draft.token_BN[0].tolist(), draft.parent_BN[0].tolist()


def test_the_longest_match_wins_over_a_recent_one() -> None:
    text = [1, 2, 3, 4, 50, 9, 9, 3, 4, 60, 8, 1, 2, 3, 4]
    assert drafted(hs.PromptLookup(depth=1), text)[0] == [4, 50]
    assert drafted(hs.PromptLookup(depth=1, min_ngram=2, max_ngram=2), text)[0] == [4, 60]  # equals: the recent one


def test_several_continuations_share_prefixes_in_a_tree() -> None:
    text = [5, 6, 70, 71, 1, 5, 6, 70, 72, 2, 5, 6, 80, 81, 3, 5, 6]
    tokens, parents = drafted(hs.PromptLookup(depth=2, branches=3), text)
    paths = {tuple(path(tokens, parents, n)) for n in range(1, len(tokens))}
    assert paths == {(70,), (70, 71), (70, 72), (80,), (80, 81)}
    assert len(drafted(hs.PromptLookup(depth=2, branches=3, nodes=4), text)[0]) == 4
    assert len(drafted(hs.PromptLookup(depth=2, branches=3), text, nodes=3)[0]) == 3


def path(tokens: list[int], parents: list[int], node: int) -> list[int]:
    return [*path(tokens, parents, parents[node]), tokens[node]] if node else []


def test_a_loop_is_continued_periodically() -> None:
    assert drafted(hs.PromptLookup(depth=6), [1, 2, 3, 1, 2, 3, 1, 2])[0] == [2, 3, 1, 2, 3, 1, 2]


def test_no_match_and_no_budget_mean_the_root_alone() -> None:
    assert drafted(hs.PromptLookup(), [1, 2, 3, 4])[0] == [4]
    assert drafted(hs.PromptLookup(), [1, 2, 1, 2], depth=0)[0] == [2]
    assert drafted(hs.PromptLookup(), [7])[0] == [7]


def test_a_rewound_state_drafts_as_a_fresh_one() -> None:
    drafter, none = hs.PromptLookup(depth=3), Features(None, ())
    state = drafter.absorb(drafter.start(1), Committed([[1, 2, 3, 4, 1, 2]], [9], [[-1] * 6], none))
    state = drafter.rewind(state, [4])
    state = drafter.absorb(state, Committed([[1]], [2], [[-1]], none))
    again = drafter.draft(state, Budget([9], 99), [], []).token_BN[0].tolist()
    assert again == drafted(drafter, [1, 2, 3, 4, 1, 2])[0] == [2, 3, 4, 1]


@pytest.mark.parametrize(
    "settings", [{"depth": 0}, {"min_ngram": 0}, {"branches": 0}, {"min_ngram": 5, "max_ngram": 4}]
)
def test_settings_that_cannot_draft_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=next(iter(settings))):
        hs.PromptLookup(**settings)


@pytest.mark.parametrize("branches", [1, 4])
def test_it_accepts_on_repetitive_text_and_changes_nothing(branches: int) -> None:
    target = tiny_target("gemma3", tie_word_embeddings=True)  # a tied random model repeats itself
    plain = hs.generate(target, "abcabcabcabc", max_new_tokens=60)
    fast = hs.generate(target, "abcabcabcabc", drafter=hs.PromptLookup(branches=branches), max_new_tokens=60)
    assert fast.token_ids == plain.token_ids
    assert fast.stats.tokens_per_step > 2


def test_its_cost_does_not_grow_with_a_frequent_ngram() -> None:
    drafter = hs.PromptLookup(min_ngram=1)
    state = drafter.absorb(drafter.start(1), Committed([[0] * 3000], [0], [[-1] * 3000], Features(None, ())))
    assert len(state[0].matches(4)) <= 65
    assert torch.equal(drafter.draft(state, Budget([2], 9), [], []).token_BN, torch.tensor([[0, 0, 0]]))
