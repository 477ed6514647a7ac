"""The Triton kernels as this machine can run them: on its GPU, or interpreted on the CPU.

Triton decides to interpret when it is imported. Whoever imported it before, compiled, keeps those modules; here they
are imported again, interpreted, and the environment is left as it was.
"""

from __future__ import annotations

import sys

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = DEVICE == "cpu"
DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)

if INTERPRETED:
    for name in list(sys.modules):
        compiled = name == "triton" or name.startswith(("triton.", "kernels.triton"))
        if compiled and not name.startswith("triton._C"):  # the native part exists once a process
            del sys.modules[name]

with pytest.MonkeyPatch.context() as environment:
    if INTERPRETED:
        environment.setenv("TRITON_INTERPRET", "1")
    from kernels.triton import OPS as TRITON
    from kernels.triton.launch import recording

__all__ = ["DEVICE", "DTYPES", "INTERPRETED", "TRITON", "recording"]
