"""`python -m kernels.cpu`: compile the CPU backend now rather than at the first start."""

from __future__ import annotations

import sys

from kernels.cpu.build import CompilerMissing, library


def main() -> int:
    try:
        print(f"CPU backend: {library()._name}")
    except CompilerMissing as error:
        print(f"CPU backend: torch, because of {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
