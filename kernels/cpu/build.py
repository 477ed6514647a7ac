"""Compiles the C sources of this folder for the machine at hand, once, into the cache folder.

The cache is `$INGLE_CACHE/kernels` (default `~/.cache/ingle/kernels`). The file's name is a hash of the sources, the
flags, the compiler's version and the processor's abilities, so a stale one is never loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from kernels.errors import KernelError

# contraction is off and products are fused by hand, so that every row variant of a loop rounds alike
FLAGS = (
    "-O3",
    "-march=native",
    "-std=gnu11",
    "-D_GNU_SOURCE",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-shared",
    "-fPIC",
    "-pthread",
)
_COMPILE_SECONDS = 120


class CompilerMissing(KernelError):
    """No C compiler, or it failed: the caller falls back to torch."""


@cache
def library() -> ctypes.CDLL:
    """The compiled library. Raises CompilerMissing with the reason; INGLE_CC names a compiler, or `none` forbids it."""
    compiler = os.environ.get("INGLE_CC") or "cc"
    found = shutil.which(compiler)
    if found is None or compiler == "none":
        raise CompilerMissing("no C compiler on this machine (cc); install gcc or clang for the faster CPU backend")
    target = _folder() / f"decoder-{_fingerprint(found)}.so"
    if not target.exists():
        compile_library(found, target)
    return load_library(target)


def load_library(target: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise CompilerMissing(f"cannot load {target}: {error}") from error


def _folder() -> Path:
    root = os.environ.get("INGLE_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "ingle") / "kernels"


def _sources() -> list[Path]:
    folder = Path(__file__).parent
    return sorted([*folder.glob("*.c"), *folder.glob("*.h")])


def _fingerprint(compiler: str) -> str:
    digest = hashlib.sha256()
    for part in (*FLAGS, compiler, _version(compiler), platform.machine(), _processor()):
        digest.update(part.encode() + b"\0")
    for source in _sources():
        digest.update(source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _version(compiler: str) -> str:
    stat = Path(compiler).resolve().stat()
    return f"{stat.st_size} {stat.st_mtime_ns}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        return platform.processor()


def compile_library(compiler: str, target: Path, flags: tuple[str, ...] = FLAGS) -> None:
    """Compile into `target`, which appears whole or not at all. Raises CompilerMissing."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            part = Path(scratch) / target.name
            command = [compiler, *flags, "-o", str(part), str(Path(__file__).parent / "decoder.c"), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
            if done.returncode:
                reason = next((line for line in done.stderr.splitlines() if "error" in line), "it failed")
                raise CompilerMissing(f"{compiler} could not compile the CPU backend: {reason}")
            part.replace(target)
    except subprocess.TimeoutExpired as error:
        raise CompilerMissing(f"{compiler} took over {_COMPILE_SECONDS} s") from error
    except OSError as error:
        raise CompilerMissing(f"cannot write {target.parent}: {error.strerror}; set INGLE_CACHE") from error
