"""bf16 on CPUs with bf16 units: a chain of nodes is computed bit for bit as its tokens one by one.

So greedy text in bf16 is that of plain decoding for chains at batch 1, where the linear layers keep to it as well:
that is tried when a model is loaded (`target.can.same_bits`). Elsewhere (other hardware, trees, batches) rounding may
differ, and `test_bugs_identity.py` bounds it.
"""

from __future__ import annotations

import pytest
import torch

import headstart as hs
from headstart.prompts import packaged
from headstart.targets import hf_attention
from headstart.testing import Mixed, tiny_target

CPU = torch.device("cpu")
UNITS = pytest.mark.skipif(not hf_attention.wanted(torch.bfloat16, CPU), reason="no bf16 units on this CPU")


@pytest.mark.parametrize("keys", [48, 320, 528, 1040])
def test_attention_of_a_node_does_not_depend_on_the_others(keys: int) -> None:
    torch.manual_seed(keys)
    query, key, value = (torch.randn(1, h, n, 64).bfloat16() for h, n in ((9, 33), (3, keys), (3, keys)))
    visible = torch.rand(33, keys) < 0.7
    full, _ = hf_attention.per_node(torch.nn.Module(), query, key, value, visible[None, None], scaling=0.125)
    for n in (1, 2, 9, 17):
        some, _ = hf_attention.per_node(
            torch.nn.Module(), query[:, :, :n], key, value, visible[None, None, :n], scaling=0.125
        )
        assert torch.equal(some, full[:, :n])
    alike = torch.nn.functional.scaled_dot_product_attention(
        query.float(), *(x.repeat_interleave(3, 1).float() for x in (key, value)), attn_mask=visible, scale=0.125
    )
    torch.testing.assert_close(full.float(), alike.transpose(1, 2), atol=0.02, rtol=0.02)


@UNITS
def test_padding_keys_changes_nothing() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, h, n, 64).bfloat16() for h, n in ((9, 5), (3, 640), (3, 640)))
    visible = torch.zeros(5, 640, dtype=torch.bool)
    visible[:, :300] = True
    outs = [
        hf_attention.per_node(
            torch.nn.Module(), query, key[:, :, :n], value[:, :, :n], visible[None, None, :, :n], scaling=0.125
        )[0]
        for n in (304, 320, 512, 640)
    ]
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_fp32_makes_no_such_claim_and_says_what_it_found() -> None:
    target = tiny_target()
    assert isinstance(target.can.same_bits, bool)
    assert target.model.config._attn_implementation == hf_attention.GROUPED


@UNITS
@pytest.mark.real
def test_greedy_text_in_bf16_is_that_of_plain_decoding() -> None:
    target = hs.load_target("smollm2-135m", dtype="bf16")
    if not target.can.same_bits:
        pytest.skip("this CPU's kernels round a row differently in company")
    taken: set[int] = set()
    for prompt in packaged()[::12]:
        plain = hs.generate(target, prompt.messages, max_new_tokens=64)
        for drafter in (hs.PromptLookup(), Mixed(target, 5, [0, 5, 3])):
            fast = hs.generate(target, prompt.messages, drafter=drafter, max_new_tokens=64)
            assert fast.token_ids == plain.token_ids
            taken |= set(fast.stats.accepted)
    assert taken >= {0, 1, 2, 3, 5}
