"""How much memory there is in use, and how fast it can be read: what the replica's metrics say of it."""

from __future__ import annotations

import ctypes
import os
import time
from functools import cache
from pathlib import Path

_BANDWIDTH = "INGLE_MEMORY_BANDWIDTH"
_COPIED = 32 << 20
_TRIES = 3


@cache
def bandwidth() -> float:
    """Bytes a second that memory moves: `INGLE_MEMORY_BANDWIDTH` where it is set, else what a copy reaches here.

    A copy of 32 MB reads and writes them. It measures this machine's memory: for an accelerator, set the variable.
    """
    given = os.environ.get(_BANDWIDTH)
    if given:
        return max(float(given), 1.0)
    source, target = bytearray(_COPIED), bytearray(_COPIED)
    best = float("inf")
    for _ in range(_TRIES):
        started = time.perf_counter()
        target[:] = source
        best = min(best, time.perf_counter() - started)
    return 2 * _COPIED / best


def memory_used() -> dict[str, int]:
    """Bytes by kind: `resident` of this process and its children, `accelerator` where NVIDIA's library is there."""
    used = {"resident": sum(_resident(pid) for pid in (os.getpid(), *_children()))}
    accelerator = _accelerator()
    return used if accelerator is None else {**used, "accelerator": accelerator}


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _children() -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except (OSError, ValueError):
        return []


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        return library if library.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


def _accelerator() -> int | None:
    library = _library()
    if library is None:
        return None
    device, memory = ctypes.c_void_p(), _Memory()
    if library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)):
        return None
    if library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
        return None
    return int(memory.used)
