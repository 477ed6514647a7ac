"""Endpoints by their own host names, over TLS with SNI, and whose names a gateway answers to."""

from __future__ import annotations

import ssl
from urllib.parse import urlsplit

import httpx
import pytest

from control_plane.errors import IngleError
from control_plane.gateway.hosts import endpoint_of
from tests.control_plane.harness import Installation, chat, create

DOMAIN = "ingle.test"


@pytest.mark.parametrize(
    ("host", "found"),
    [
        ("chat.local-eu.ingle.test", "chat"),
        ("Chat.Local-EU.ingle.test.:8443", "chat"),
        ("local-eu.ingle.test", None),
        ("127.0.0.1:8443", None),
        ("[::1]:8443", None),
        ("chat.local-eu.ingle.test.evil.org", None),
        ("notingle.test", None),
        (None, None),
    ],
)
def test_the_endpoint_that_a_host_names(host: str | None, found: str | None) -> None:
    assert endpoint_of(host, "local-eu", DOMAIN) == found
    assert endpoint_of(host, "local-eu", None) is None


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("chat.local-me.ingle.test", "residency_mismatch"),
        ("local-me.ingle.test", "residency_mismatch"),
        ("a.b.local-eu.ingle.test", "unknown_url"),
        ("ingle.test", "unknown_url"),
    ],
)
def test_names_that_are_not_this_gateways(host: str, code: str) -> None:
    with pytest.raises(IngleError) as refused:
        endpoint_of(host, "local-eu", DOMAIN)
    assert refused.value.code == code


def test_an_endpoint_has_a_host_name_of_its_own(fresh: Installation) -> None:
    fresh.more = {"INGLE_DOMAIN": DOMAIN}
    root = fresh.up().facts["gateways"]["local-eu"]
    with fresh.admin() as admin:
        create(admin, "one", "fast")
        create(admin, "two", "fast")
        assert admin.endpoint("one").url == f"https://one.local-eu.{DOMAIN}:{urlsplit(root).port}/v1"
        key = admin.create_key({"name": "k"}).secret

    def ask(host: str, path: str = "/v1/chat/completions", model: str = "any") -> tuple[int, str | None]:
        with fresh.tenant(root, key) as tenant:
            request = tenant.build_request("POST", path, json=chat(model=model), headers={"Host": host})
            request.extensions["sni_hostname"] = host.partition(":")[0]
            response = tenant.send(request)
            return response.status_code, None if response.status_code == 200 else response.json()["error"]["code"]

    assert ask("one.local-eu.ingle.test") == (200, None)
    assert ask("two.local-eu.ingle.test:8443") == (200, None)
    assert ask("one.local-eu.ingle.test", "/e/one/v1/chat/completions") == (200, None)
    assert ask("one.local-eu.ingle.test", "/e/two/v1/chat/completions") == (404, "model_not_found")
    assert ask("none.local-eu.ingle.test") == (404, "model_not_found")
    assert ask("local-eu.ingle.test") == (404, "model_not_found")  # the body names the endpoint here
    assert ask("local-eu.ingle.test", model="two") == (200, None)
    # Its certificate doesn't cover another region's names, and who doesn't look is refused all the same.
    with pytest.raises(httpx.ConnectError, match="certificate"):
        ask("one.local-me.ingle.test")
    context = ssl.create_default_context(cafile=fresh.ca_file)
    context.check_hostname = False
    with httpx.Client(verify=context, trust_env=False, headers={"Authorization": f"Bearer {key}"}) as careless:
        headers = {"Host": "one.local-me.ingle.test"}
        refused = careless.post(f"{root}/v1/chat/completions", json=chat(model="one"), headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "residency_mismatch")
