"""What can go wrong here.

KernelError
├── InvalidInput          a tensor's shape, dtype or layout is not what the operation takes (also a ValueError)
├── UnknownBackend        a backend was asked for by a name that does not exist
├── BackendUnavailable    a known backend cannot run on this machine or device
└── CompileError          kernels cannot be compiled ahead of time in this environment
"""


class KernelError(Exception):
    """Root of every error that this package raises on purpose."""


class InvalidInput(KernelError, ValueError):
    """A tensor's shape, dtype or layout is not what the operation takes; the message names the argument."""


class UnknownBackend(KernelError):
    """A backend was asked for by a name that does not exist."""


class BackendUnavailable(KernelError):
    """A known backend cannot run on this machine or device."""


class CompileError(KernelError):
    """Kernels cannot be compiled ahead of time in this environment."""
