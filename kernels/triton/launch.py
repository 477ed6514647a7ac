"""How every kernel here is launched, and how a launch is recorded instead, for `kernels.compile`.

Recording makes the ahead-of-time compiler see the same kernels, constants and argument types as a real step does,
so that the two can't drift apart: an operation called on meta tensors leaves its launches and touches no device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

_record: ContextVar[list[Launch] | None] = ContextVar("kernels_triton_record", default=None)


@dataclass(frozen=True)
class Launch:
    """One kernel launch: positional arguments in the kernel's order, compile-time constants by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int = 4, num_stages: int = 1, **constants: Any
) -> None:
    """Run `kernel` over `grid` on the current device's current stream; an empty grid is no launch."""
    if 0 in grid:
        return
    record = _record.get()
    if record is None:
        kernel[grid](*arguments, **constants, num_warps=num_warps, num_stages=num_stages)
    else:
        record.append(Launch(kernel, grid, arguments, constants, num_warps, num_stages))


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect the launches made inside instead of running them."""
    launches: list[Launch] = []
    token = _record.set(launches)
    try:
        yield launches
    finally:
        _record.reset(token)
