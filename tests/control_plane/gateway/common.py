"""What the tests of the gateway share."""

from __future__ import annotations

from typing import Any

import httpx

from control_plane.client import AdminClient

CHAT = "/v1/chat/completions"


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert body.keys() == {"error"}
    detail: dict[str, Any] = body["error"]
    assert detail.keys() == {"message", "type", "param", "code"}
    assert detail["message"]
    assert "x-request-id" in response.headers
    return detail


def replica_address(admin: AdminClient, name: str) -> str:
    (address,) = [r.address for r in admin.endpoint(name).replicas if r.state == "ready"]
    assert address
    return address
