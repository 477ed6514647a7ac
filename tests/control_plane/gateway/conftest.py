"""A tenant with a key before the platform's gateways."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from control_plane.client import AdminClient
from tests.control_plane.harness import Installation, create


@pytest.fixture(scope="session")
def gateways(platform: Installation) -> dict[str, str]:
    found: dict[str, str] = platform.programs[0].facts["gateways"]
    return found


@pytest.fixture(scope="session")
def eu(gateways: dict[str, str]) -> str:
    return gateways["local-eu"]


@pytest.fixture(scope="session")
def key(admin: AdminClient) -> str:
    return admin.create_key({"name": "gateway-tests"}).secret


@pytest.fixture(scope="session")
def endpoint(admin: AdminClient) -> str:
    create(admin, "gw", "fast+pace-5ms")
    return "gw"


@pytest.fixture
def tenant(platform: Installation, eu: str, key: str) -> Iterator[httpx.Client]:
    with platform.tenant(eu, key) as client:
        yield client
