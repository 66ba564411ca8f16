"""Turn a GGUF file into a plain transformers directory: dense weights, config and tokenizer.

Everything heavy (torch, transformers, the `gguf` reader) is imported inside the functions, so that importing
this module costs nothing.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.errors import FetchError, Unsupported

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

_MAGIC = b"GGUF"

# `tokenizer.ggml.pre` names, for byte-level BPE, whose rule is "every digit alone, then the GPT-2 pattern".
_DIGITS_THEN_GPT2 = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})
# ... and those whose rule is the GPT-2 pattern alone.
_GPT2 = frozenset({"gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion"})


def dequantise(gguf: Path, out: Path, note: Callable[[str], None]) -> None:
    """Write config.json, generation_config.json, model*.safetensors and the tokenizer of `gguf` into `out`.

    The weights are stored in the smallest dtype that holds every dequantised value exactly; that is float32
    for all the block formats (pass `dtype=torch.float32` when loading, whatever the directory holds). The
    directory carries no quantisation settings: it loads like any other dense checkpoint.

    Raises FetchError if `gguf` is not a whole GGUF file, and Unsupported if its architecture, tokenizer or
    rotary scaling is one that transformers would load wrongly or not at all.
    """
    note("reading the GGUF file")
    metadata = _read_metadata(gguf)
    _require_plain_rope(metadata, gguf)
    note("dequantising the weights")
    model = _load_dense(gguf)
    note("building the tokenizer")
    tokenizer = _build_tokenizer(gguf, metadata, model.config.max_position_embeddings)
    note("writing the weights")
    _save(model, tokenizer, metadata, out)


def exact_dtype(tensors: Mapping[str, torch.Tensor]) -> torch.dtype:
    """The smallest of float16, bfloat16 and float32 into which all of `tensors` convert without rounding."""
    import torch

    for dtype in (torch.float16, torch.bfloat16):
        if all(torch.equal(tensor.to(dtype).to(tensor.dtype), tensor) for tensor in tensors.values()):
            return dtype
    return torch.float32


def _read_metadata(gguf: Path) -> dict[str, Any]:
    """The file's key-value section, plus `tensors`: the names of its tensors."""
    from gguf import GGUFReader

    with gguf.open("rb") as file:
        magic = file.read(len(_MAGIC))
    if magic != _MAGIC:
        raise FetchError(
            f"{gguf} is not a GGUF file: it starts with {magic!r}, expected {_MAGIC!r}. "
            "Fetch it again, or pass the path of a .gguf file."
        )
    try:
        reader = GGUFReader(gguf)
        metadata: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError) as error:
        raise FetchError(
            f"{gguf} ends early or is damaged ({error}); expected a whole GGUF file, "
            f"saw {gguf.stat().st_size} bytes. Fetch it again."
        ) from error
    metadata["tensors"] = [tensor.name for tensor in reader.tensors]
    return metadata


def _require_plain_rope(metadata: Mapping[str, Any], gguf: Path) -> None:
    """transformers drops the rotary scaling of most GGUF files without a word, so such a file is refused."""
    architecture = metadata.get("general.architecture", "")
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    factors = [name for name in metadata["tensors"] if name.startswith("rope_")]
    if scaling != "none" or factors:
        raise Unsupported(
            f"{gguf.name} uses rotary scaling (type {scaling!r}, tensors {factors}), which transformers does "
            "not read from every GGUF file; expected a file without it. "
            "Pass the model's safetensors directory or hub id instead."
        )


def _load_dense(gguf: Path) -> PreTrainedModel:
    """The model in float32 with ordinary parameters only, every one of them filled from the file."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    try:
        with _alone(gguf) as (directory, gguf_file), _quiet_bars():
            model, info = AutoModelForCausalLM.from_pretrained(
                directory,
                gguf_file=gguf_file,
                dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True,
            )
    except (ValueError, KeyError, NotImplementedError) as error:
        raise Unsupported(
            f"transformers cannot load {gguf.name}: {error}. Expected a GGUF of an architecture it knows; "
            "pass the model's safetensors directory or hub id instead."
        ) from error
    # transformers only warns about these and leaves the parameter random
    wrong = {kind: sorted(map(str, info[kind])) for kind in ("missing_keys", "mismatched_keys") if info[kind]}
    if wrong:
        raise Unsupported(
            f"{gguf.name} does not fill the whole model: {wrong}; expected a tensor for every parameter. "
            "Pass the model's safetensors directory or hub id instead."
        )
    return model


def _build_tokenizer(gguf: Path, metadata: Mapping[str, Any], context: int) -> PreTrainedTokenizerFast:
    """The file's tokenizer, rebuilt around its backend so that no GGUF loading option is saved with it."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        with _alone(gguf) as (directory, gguf_file):
            loaded = AutoTokenizer.from_pretrained(directory, gguf_file=gguf_file)
    except (ValueError, KeyError) as error:
        raise Unsupported(
            f"transformers cannot build the tokenizer of {gguf.name}: {error}. "
            "Pass the model's safetensors directory or hub id instead."
        ) from error
    backend = loaded.backend_tokenizer
    _set_pre_tokenizer(backend, metadata, gguf)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=context,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **{name: getattr(loaded, name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")},
    )
    expected = len(metadata["tokenizer.ggml.tokens"])
    if len(tokenizer) != expected:
        raise Unsupported(
            f"the tokenizer built from {gguf.name} has {len(tokenizer)} tokens, expected {expected} as in "
            "the file. Pass the model's safetensors directory or hub id instead."
        )
    return tokenizer


def _set_pre_tokenizer(backend: Tokenizer, metadata: Mapping[str, Any], gguf: Path) -> None:
    """Split text the way the file says.

    transformers falls back to GPT-2's pattern for every byte-level name it doesn't know, SmolLM's among them,
    and then gets the spaces before a number wrong. So the known names are set here and the others refused.
    """
    from tokenizers import pre_tokenizers

    if metadata.get("tokenizer.ggml.model") != "gpt2":
        return
    name = metadata.get("tokenizer.ggml.pre")
    fell_back = isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel)
    if name in _DIGITS_THEN_GPT2:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif fell_back and name not in _GPT2:
        raise Unsupported(
            f"{gguf.name} splits text by the rule {name!r}, which neither transformers nor headstart "
            f"knows; expected one that transformers knows, or one of {sorted(_DIGITS_THEN_GPT2 | _GPT2)}. "
            "Pass the model's safetensors directory or hub id instead."
        )


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, metadata: Mapping[str, Any], out: Path) -> None:
    """Write model and tokenizer without a trace of the GGUF loading, readable by whoever may read `out`."""
    # `_model_name_or_path` is the GGUF's title, and the quantisation is undone: neither applies any more
    for leftover in ("quantization_config", "_model_name_or_path"):
        if hasattr(model.config, leftover):
            delattr(model.config, leftover)
    model.generation_config = _generation_config(metadata)
    model.to(exact_dtype(dict(model.named_parameters())))
    with _quiet_bars():
        model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    mode = (out / "config.json").stat().st_mode  # safetensors makes its files private to their owner
    for weights in out.glob("*.safetensors"):
        weights.chmod(mode)


def _generation_config(metadata: Mapping[str, Any]) -> GenerationConfig:
    """The stop, start and padding ids that the file names; generation ends at any of its end-of-turn ids."""
    from transformers import GenerationConfig

    named = (metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    ends = list(dict.fromkeys(end for end in named if end is not None))
    return GenerationConfig(
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=ends[0] if len(ends) == 1 else (ends or None),
        pad_token_id=metadata.get("tokenizer.ggml.padding_token_id"),
    )


@contextlib.contextmanager
def _alone(gguf: Path) -> Iterator[tuple[str, str]]:
    """An empty directory and the file's absolute path, as `from_pretrained` takes them.

    Files that happen to lie beside the GGUF (a tokenizer_config.json, say) would be mixed in otherwise.
    """
    with tempfile.TemporaryDirectory(prefix="headstart-") as empty:
        yield empty, str(gguf.resolve())


@contextlib.contextmanager
def _quiet_bars() -> Iterator[None]:
    """Keep transformers' progress bars off the terminal; its warnings go through logging and stay visible."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield
