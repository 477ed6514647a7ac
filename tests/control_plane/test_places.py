"""What a region's provider offers, and what is refused for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from control_plane.api.places import Places
from control_plane.config import load_settings
from control_plane.domain import Offer, lack_of_accelerators
from control_plane.errors import ProviderError, Unprocessable


@pytest.mark.parametrize(
    ("gpu", "gpus", "lack"),
    [
        (None, 0, None),
        ("cpu", 0, None),
        ("L4", 4, None),
        ("cuda", 8, None),
        ("L4", 5, "region r offers 8 H100, 4 L4, cpu, not 5 L4"),
        ("cuda", 9, "region r offers 8 H100, 4 L4, cpu, not 9 cuda"),
        ("A100", 0, "region r offers 8 H100, 4 L4, cpu, not A100"),
    ],
)
def test_what_a_region_lacks_is_named(gpu: str | None, gpus: int, lack: str | None) -> None:
    assert lack_of_accelerators("r", {"L4": 4, "cpu": 1, "H100": 8}, gpu, gpus) == lack


async def test_only_what_never_comes_is_refused(tmp_path: Path) -> None:
    now = [Offer("r", "cpu", 1, 0.0, fixed=True)]

    async def offers(region: str) -> Sequence[Offer]:
        if not now:
            raise ProviderError("no answer")
        return now

    settings = load_settings({"home": tmp_path, "regions": [{"name": "r"}]}, {})
    await Places(settings, offers).require_offer("r", "cpu", 0)
    with pytest.raises(Unprocessable, match="region r offers cpu, not L4") as refused:
        await Places(settings, offers).require_offer("r", "L4", 1)
    assert (refused.value.code, refused.value.param) == ("accelerator_not_offered", "gpu")
    now[:] = [Offer("r", "cpu", 1, 0.0)]  # a node with one may come
    await Places(settings, offers).require_offer("r", "L4", 1)
    now.clear()  # nobody knows
    await Places(settings, offers).require_offer("r", "L4", 1)
