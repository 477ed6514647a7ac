"""Tensor operations of the engine: one reference, several backends, chosen in `dispatch`.

`select(device)` gives the operations that serve a device. Importing this package loads neither torch nor triton.
"""

from kernels.dispatch import select
from kernels.errors import BackendUnavailable, InvalidInput, KernelError, UnknownBackend
from kernels.ops import Ops

__version__ = "0.0.0"  # a PyPI package of this name is probed for its version by transformers

__all__ = ["BackendUnavailable", "InvalidInput", "KernelError", "Ops", "UnknownBackend", "select"]
