"""No prompt, reply or secret in anything that the platform wrote or said about a request, on any path, at DEBUG."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.control_plane.harness import Installation, chat, create, until

CHAT = "/v1/chat/completions"
SECRET, PROMPT = "sk-CANARY-1f3a9c77", "CANARY-2b7c"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """An OTLP collector that keeps what it is sent."""
    got: list[bytes] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", got
    server.shutdown()
    thread.join()
    server.server_close()


def bodies(model: str) -> list[dict[str, Any]]:
    tool = {"type": "function", "function": {"name": "f", "description": PROMPT, "parameters": {}}}
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PROMPT}"}}
    return [
        chat(PROMPT, model=model, max_tokens=2),
        chat(PROMPT, model=model, stream=True, max_tokens=2, user=PROMPT, metadata={"a": PROMPT}, tools=[tool]),
        {"model": model, "messages": [{"role": "user", "content": [image]}], "max_tokens": 1},
        {"model": model, "messages": 7, "x": PROMPT},
    ]


def test_canaries_appear_nowhere(fresh: Installation, collector: tuple[str, list[bytes]]) -> None:
    where, traces = collector
    fresh.more = {
        "INGLE_LOG_LEVEL": "debug",
        "INGLE_LIMITS__MAX_BODY_BYTES": "20000",
        "OTEL_EXPORTER_OTLP_ENDPOINT": where,
    }
    program = fresh.up()
    root = program.facts["gateways"]["local-eu"]
    said: list[bytes] = []
    with fresh.admin() as admin:
        create(admin, "chat", idle_timeout=600)
        for name in ("early", "fault", "cut"):
            create(admin, name, name, idle_timeout=600)
        admin.create_endpoint({"name": "broken", "region": "local-eu", "model": "bad"})
        good = admin.create_key({"name": "good"})
        ended = admin.create_key({"name": "ended"})
        limited = admin.create_key({"name": "limited", "requests_per_minute": 1})
        narrow = admin.create_key({"name": "narrow", "routes": ["/v1/completions"]})
        rotated = admin.rotate_key(admin.create_key({"name": "old"}).id, 60.0)
        admin.revoke_key(ended.id)
        secrets = [made.secret for made in (good, ended, limited, narrow, rotated)]
        seen: set[int] = set()

        def ask(key: str, path: str = CHAT, **more: Any) -> None:
            headers = {
                "Authorization": f"Bearer {key}",
                "X-Api-Key": SECRET,
                "Cookie": SECRET,
                **more.pop("headers", {}),
            }
            with fresh.tenant(root, "none", timeout=30) as client:
                try:
                    reply = client.request(more.pop("method", "POST"), path, headers=headers, **more)
                except httpx.RemoteProtocolError:
                    return
            seen.add(reply.status_code)
            if reply.status_code >= 400:
                said.append(reply.content)
            said.append(repr(reply.headers).encode())

        for body in bodies("chat"):
            ask(good.secret, json=body)
        for name in ("early", "fault", "cut", "broken", "absent", PROMPT):
            ask(good.secret, json=chat(PROMPT, model=name, stream=name == "cut"), headers={"x-ingle-wait": "0.2"})
        for content in (
            PROMPT.encode(),
            b'{"model": "chat", "messages": "' + PROMPT.encode(),
            b"[" * 50 + b'"CANARY-2b7c"',
        ):
            ask(good.secret, content=content)
        ask(good.secret, content=PROMPT.encode() * 5000)
        ask(good.secret, method="GET")
        ask(good.secret, f"/v1/models?api_key={SECRET}&q={PROMPT}", method="GET")
        ask(good.secret, json=chat(PROMPT, model="chat"), headers={"x-ingle-wait": PROMPT})
        for key in (
            ended.secret,
            SECRET,
            f"{good.secret}x",
            good.secret[:-1],
            "x",
            *[limited.secret] * 2,
            narrow.secret,
        ):
            ask(key, f"{CHAT}?api_key={SECRET}", json=chat(PROMPT, model="chat"))
        assert {200, 400, 401, 403, 404, 405, 413, 429, 500, 502, 503} <= seen
        with fresh.tenant(root, good.secret) as client:
            with client.stream("POST", CHAT, json=chat(PROMPT, model="chat", stream=True, max_tokens=900)) as reply:
                chunks = reply.iter_raw()
                next(chunks)
            said.append(client.get("/metrics").content)
        until(lambda: sum(row.requests for row in admin.usage()) >= 8, "metered")
        said.append(json.dumps([item.model_dump() for item in admin.audit(100)]).encode())
    assert program.stop() == 0
    token = fresh.home.joinpath("profile.toml").read_text().split('token = "')[1].split('"')[0]
    canaries = [text.encode() for text in (SECRET, PROMPT, token, *(key.split("_", 2)[2][:-4] for key in secrets))]
    paths = [path for path in fresh.home.rglob("*") if path.is_file() and path.name != "profile.toml"]
    written = {str(path): path.read_bytes() for path in [*paths, program.errors]}
    written |= {f"said {number}": content for number, content in enumerate(said)}
    written |= {f"trace {number}": content for number, content in enumerate(traces)}
    assert {path.name for path in paths if path.stat().st_mode & 0o077} == {"ca.pem"}
    assert traces
    assert b"ingle.db" in "".join(written).encode()
    for name, content in written.items():
        for canary in canaries:
            if canary == PROMPT.encode() and b"does not exist or you do not have access" in content:
                continue  # the name of a model that was asked for, told to who asked
            assert canary not in content, (name, canary, content[max(0, content.find(canary) - 200) :][:400])
