"""One real request through the gateway, timed."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import httpx
from pydantic import BaseModel

from control_plane.client import trust
from control_plane.errors import IngleError, NotFound, Unavailable

if TYPE_CHECKING:
    from control_plane.client import AdminClient

_KEY_SECONDS = 900.0


class Trial(BaseModel):
    endpoint: str
    status: str
    reply: str
    ttft_ms: float
    total_ms: float
    request_id: str


def try_endpoint(client: AdminClient, name: str, prompt: str, max_tokens: int) -> Trial:
    """Raises IngleError where the endpoint doesn't answer."""
    endpoint = client.endpoint(name)
    ca_file = client.status().ca_file
    key = client.create_key({"tenant": endpoint.tenant, "name": "endpoint-test", "expires_in": _KEY_SECONDS})
    try:
        return _ask(endpoint.url, ca_file, key.secret, name, prompt, max_tokens, endpoint.max_wait)
    finally:
        client.revoke_key(key.id)


def _ask(url: str, ca_file: str, key: str, name: str, prompt: str, max_tokens: int, max_wait: float) -> Trial:
    body = {
        "model": name,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "stream": True,
        "temperature": 0,
    }
    began = time.perf_counter()
    first: float | None = None
    text = []
    timeout = httpx.Timeout(10.0, read=max_wait + 60.0)
    try:
        with (
            httpx.Client(verify=trust(ca_file), timeout=timeout, trust_env=False) as http,
            http.stream(
                "POST", f"{url}/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
            ) as response,
        ):
            if response.status_code >= 400:
                raise _refusal(name, response.read())
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                frame = json.loads(line[6:])
                if "error" in frame:
                    raise Unavailable(f"{name} broke off: {frame['error']['message']}", code=frame["error"]["code"])
                for choice in frame.get("choices", []):
                    piece = choice.get("delta", {}).get("content")
                    if piece:
                        first = first or time.perf_counter()
                        text.append(piece)
            request_id = response.headers.get("x-request-id", "")
    except httpx.HTTPError as error:
        raise Unavailable(f"the gateway at {url} doesn't answer ({type(error).__name__})") from None
    ended = time.perf_counter()
    return Trial(
        endpoint=name,
        status="ok",
        reply="".join(text),
        ttft_ms=round(((first or ended) - began) * 1000, 1),
        total_ms=round((ended - began) * 1000, 1),
        request_id=request_id,
    )


def _refusal(name: str, content: bytes) -> IngleError:
    try:
        detail = json.loads(content)["error"]
        kind = NotFound if detail["code"] == "model_not_found" else Unavailable
        return kind(f"{name} doesn't answer: {detail['message']}", code=detail["code"])
    except (ValueError, KeyError, TypeError):
        return Unavailable(f"{name} doesn't answer, and the gateway doesn't say why")
