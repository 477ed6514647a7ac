"""2,000 handshakes that never end, beside tenants who notice nothing of them."""

from __future__ import annotations

import resource
import select
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.control_plane.harness import Installation, chat, create, until

HALF_OPEN = 2000
BEGINNING_OF_A_HELLO = b"\x16\x03\x01\x02\x00"


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_half_open_handshakes_starve_nobody_and_are_ended(fresh: Installation) -> None:
    root = fresh.up().facts["gateways"]["local-eu"]
    with fresh.admin() as admin:
        create(admin, "steady", "fast", idle_timeout=600)
        key = admin.create_key({"name": "k"}).secret
    where = urlsplit(root)
    assert where.hostname
    assert where.port
    body = chat(model="steady", max_tokens=1)
    with fresh.tenant(f"{root}/v1", key) as tenant:
        assert tenant.post("/chat/completions", json=body).status_code == 200
        half_open = []
        for number in range(HALF_OPEN):
            one = socket.create_connection((where.hostname, where.port), timeout=10)
            if number % 2:
                one.sendall(BEGINNING_OF_A_HELLO)
            half_open.append(one)
            if number % 100 == 0:  # on the connection that it has, and on one of its own
                assert tenant.post("/chat/completions", json=body).status_code == 200
                with fresh.tenant(f"{root}/v1", key) as newcomer:
                    assert newcomer.post("/chat/completions", json=body).status_code == 200
        poller = select.poll()
        for one in half_open:
            poller.register(one, select.POLLIN | select.POLLHUP)
        until(lambda: len(poller.poll(0)) == HALF_OPEN, "the gateway ends every one of them")
        assert tenant.post("/chat/completions", json=body).status_code == 200
    for one in half_open:
        one.close()
