"""Compiles the kernels, once per machine, into the user cache; where that cannot be done their plain twins serve."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from importlib.resources import files
from pathlib import Path

from headstart.targets.resolve import cache_dir

FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
SECONDS = 60  # a compiler that takes longer than that is broken


@functools.cache
def library(source: str) -> ctypes.CDLL | str:
    """The compiled kernels of a file of this package, or the reason why there are none."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return "no C compiler was found (cc, or what CC names)"
    if platform.system() != "Linux":
        return f"kernels are built on Linux only, not on {platform.system()}"
    text = files("headstart").joinpath(f"targets/kernels/{source}").read_bytes()
    made_of = hashlib.sha256(text + repr((compiler, FLAGS, _cpu())).encode()).hexdigest()[:16]
    path = cache_dir() / "native" / f"{source.removesuffix('.c')}-{made_of}.so"
    if not path.exists() and (fault := _compile(compiler, text, path)):
        return fault
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        return f"{path} cannot be loaded: {error}"


def _compile(compiler: str, text: bytes, path: Path) -> str:
    """Writes the library whole; says what went wrong."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as place:
        source, made = Path(place) / "kernel.c", Path(place) / "kernel.so"
        source.write_bytes(text)
        try:
            command = [compiler, *FLAGS, "-o", str(made), str(source), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{compiler} does not run: {error}"
        if done.returncode:
            return f"{compiler} fails: {done.stderr.strip()[-400:]}"
        made.replace(path)
    return ""


def _cpu() -> str:
    """What `-march=native` looks at: a cache that moves to another CPU must not be used there."""
    return next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
