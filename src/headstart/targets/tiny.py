"""A seeded random transformer of a real family, small enough for unit tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from headstart.errors import BadInput
from headstart.targets.hf import HFTarget

SMALL = {
    "tie_word_embeddings": False,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}
GQA = SMALL | {"num_key_value_heads": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GQA),
    "qwen2": ("Qwen2Config", GQA),
    "qwen3": ("Qwen3Config", GQA | {"head_dim": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        GQA | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 4}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "gpt2": ("GPT2Config", {"tie_word_embeddings": False, "n_embd": 48, "n_layer": 3, "n_head": 4}),
    "mamba": ("MambaConfig", {"hidden_size": 48, "num_hidden_layers": 2, "state_size": 8}),
}  # fmt: skip
SPREAD = 0.6  # large initial weights: greedy text wanders instead of repeating one token


def tiny_target(
    family: str = "llama",
    seed: int = 0,
    vocab_size: int = 96,
    max_positions: int = 512,
    eos: int | Sequence[int] | None = None,
    *,
    attention: str | None = None,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> HFTarget:
    """A random model with a character (below 256 ids) or byte tokenizer; `config` overrides the family's fields.

    The same arguments give the same weights. Raises BadInput for a family that has no tiny configuration.
    """
    import transformers

    if family not in FAMILIES:
        raise BadInput(f"No tiny target of family {family!r}; there are {', '.join(FAMILIES)}.")
    name, fields = FAMILIES[family]
    settings = fields | {"vocab_size": vocab_size, "max_position_embeddings": max_positions} | config
    ids = None if eos is None else [eos] if isinstance(eos, int) else list(eos)
    settings |= {"bos_token_id": None, "eos_token_id": ids, "pad_token_id": None, "initializer_range": SPREAD}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, name)(**settings | config), attn_implementation=attention, dtype=dtype
        )
    model.generation_config.eos_token_id = ids
    return HFTarget(model, tiny_tokenizer(vocab_size), None)


def tiny_tokenizer(vocab_size: int) -> Any:
    """One id per character (printable ASCII, newline, then further letters), or per byte from 256 ids on."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if vocab_size >= 256:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        letters = [chr(c) for c in range(32, 127)] + ["\n"] + [chr(c) for c in range(0xC0, 0xC0 + 160)]
        tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(letters[:vocab_size])}, letters[0]))
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + ' | ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    return fast
