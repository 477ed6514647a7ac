from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.triton_backend import INTERPRETED


@pytest.fixture(autouse=True, scope="package")
def interpretation() -> Iterator[None]:
    """Triton also looks at the environment while it interprets."""
    with pytest.MonkeyPatch.context() as environment:
        if INTERPRETED:
            environment.setenv("TRITON_INTERPRET", "1")
        yield
