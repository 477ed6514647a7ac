"""Which backend serves which device: the one place that decides, logged once a device type.

The environment variable INGLE_KERNELS=reference|triton overrides the choice.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from kernels.errors import BackendUnavailable, UnknownBackend
from kernels.ops import Ops

if TYPE_CHECKING:
    import torch

OVERRIDE = "INGLE_KERNELS"
log = logging.getLogger(__name__)


def select(device: torch.device) -> Ops:
    """The operations that serve `device`.

    Raises UnknownBackend if INGLE_KERNELS names none of the backends, BackendUnavailable if the backend cannot run
    here or no backend serves the device.
    """
    return _select(device.type, os.environ.get(OVERRIDE))


@cache
def _select(device_type: str, override: str | None) -> Ops:
    name = override or _DEFAULTS.get(device_type)
    if name is None:
        raise BackendUnavailable(f"no kernels for device type {device_type!r}; set {OVERRIDE}=reference to run anyway")
    if name not in _BACKENDS:
        raise UnknownBackend(f"{OVERRIDE} is {name!r}; it must be one of: {', '.join(sorted(_BACKENDS))}")
    ops = _BACKENDS[name](device_type)
    log.info("kernels_selected", extra={"backend": ops.name, "device": device_type, "forced": bool(override)})
    return ops


def _reference(device_type: str) -> Ops:
    from kernels.reference import OPS

    return OPS


def _eager(device_type: str) -> Ops:
    from kernels.eager import OPS

    return OPS


def _triton(device_type: str) -> Ops:
    try:
        import triton
    except ImportError as error:
        raise BackendUnavailable("the triton backend needs the package triton, which is not installed") from error
    if device_type != "cuda" and not triton.knobs.runtime.interpret:
        raise BackendUnavailable(f"the triton backend serves cuda and hip devices, not {device_type}")
    from kernels.triton import OPS

    return OPS


_BACKENDS: dict[str, Callable[[str], Ops]] = {"reference": _reference, "eager": _eager, "triton": _triton}
_DEFAULTS = {"cpu": "eager", "cuda": "triton"}  # torch names HIP devices "cuda" too
