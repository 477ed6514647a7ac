"""A replica as its users have it: a process, reached over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx

T = TypeVar("T")
PATIENCE = 60.0


class Replica:
    """`python -m data_plane serve MODEL --port 0 …`, past its ready line."""

    def __init__(self, process: subprocess.Popen[str], ready: dict[str, Any], log: Path) -> None:
        self.process = process
        self.ready = ready
        self.log = log
        self.name: str = ready["model"]
        self.engine_pid: int = ready["engine_pid"]
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{ready['port']}", timeout=PATIENCE)

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        return self.client.post(path, json={"model": self.name, **body}, headers=_dashed(headers))

    def chat(self, content: str, **fields: Any) -> dict[str, Any]:
        """A greedy reply to one message; it must succeed."""
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, **fields}
        return self._answer(self.post("/v1/chat/completions", body))

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        return self._answer(self.post("/v1/completions", {"prompt": prompt, "temperature": 0, **fields}))

    def _answer(self, response: httpx.Response) -> dict[str, Any]:
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = strict(response.content)
        return answer

    def stream(self, path: str, body: dict[str, Any], **headers: str) -> Stream:
        """The whole of a stream."""
        request = {"model": self.name, "temperature": 0, "stream": True, **body}
        with self.client.stream("POST", path, json=request, headers=_dashed(headers)) as response:
            raw = response.read()
        assert response.status_code == 200, raw
        return Stream(response, raw)

    def health(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.client.get("/health").json()
        return answer

    def metrics(self) -> dict[str, float]:
        """Samples by their text, labels of the model and provider left out."""
        found: dict[str, float] = {}
        for line in self.client.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                for label in ("gen_ai_provider_name", "gen_ai_request_model"):
                    name = _without_label(name, label)
                found[name] = float(value)
        return found

    def open_stream(self, body: dict[str, Any], header: str = "") -> socket.socket:
        """A chat on a socket of its own, sent and not yet read. header: a further line, sent as it is written."""
        connection = socket.create_connection(("127.0.0.1", self.ready["port"]), timeout=PATIENCE)
        content = json.dumps({"model": self.name, "temperature": 0, "stream": True, **body}).encode()
        lines = ["POST /v1/chat/completions HTTP/1.1", "Host: replica", f"Content-Length: {len(content)}"]
        lines += [header] if header else []
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + content)
        return connection

    def idle(self) -> bool:
        health = self.health()
        return not any(health[key] for key in ("open", "running", "waiting", "kv_blocks_used"))

    def logged(self) -> list[dict[str, Any]]:
        """Events on stderr; every line must be one."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


class Stream:
    """Server-sent events that were read to their end."""

    def __init__(self, response: httpx.Response, raw: bytes) -> None:
        self.headers = response.headers
        self.raw = raw
        frames = raw.decode().split("\n\n")
        assert frames.pop() == "", "the last frame has no end"
        self.comments = [frame for frame in frames if frame.startswith(":")]
        data = [frame for frame in frames if not frame.startswith(":")]
        assert all(frame.startswith("data: ") and "\n" not in frame for frame in data)
        self.done = data[-1] == "data: [DONE]"
        self.frames: list[dict[str, Any]] = [strict(frame[6:]) for frame in data if frame != "data: [DONE]"]

    def text(self, index: int = 0) -> str:
        parts = [choice for frame in self.frames for choice in frame["choices"] if choice["index"] == index]
        return "".join(part.get("text") or part.get("delta", {}).get("content") or "" for part in parts)

    def finishes(self, index: int = 0) -> list[str]:
        found = [choice for frame in self.frames for choice in frame["choices"] if choice["index"] == index]
        return [choice["finish_reason"] for choice in found if choice["finish_reason"] is not None]


def strict(text: str | bytes) -> Any:
    """JSON, without the NaN and Infinity that Python's parser lets pass."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


@contextlib.contextmanager
def running(model: Path | str, log: Path, *flags: str, **environment: str) -> Iterator[Replica]:
    process = start(model, log, *flags, **environment)
    try:
        assert process.stdout is not None
        line = within(process.stdout.readline)
        assert line, log.read_text()
        ready = json.loads(line)
        assert ready["event"] == "ready", ready
    except BaseException:
        process.kill()
        process.communicate()
        raise
    replica = Replica(process, ready, log)
    try:
        yield replica
    finally:
        replica.close()


def start(model: Path | str, log: Path, *flags: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "data_plane", "serve", str(model), "--port", "0", "--device", "cpu", *flags]
    with log.open("w") as stderr:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env={**os.environ, **environment}
        )


def within(read: Callable[[], T], seconds: float = PATIENCE) -> T:
    """What a blocking read gives; it must give it in time."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(read()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, f"nothing came in {seconds} s"
    return found[0]


def eventually(true: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Poll until it holds."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"it did not come true in {seconds} s"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs; a dead one that nobody has waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def _dashed(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}


def _without_label(sample: str, label: str) -> str:
    if f'{label}="' not in sample:
        return sample
    before, after = sample.split(f'{label}="', 1)
    rest = after.split('"', 1)[1].removeprefix(",")
    joined = (before.rstrip(",") if rest.startswith("}") else before) + rest
    return joined.removesuffix("{}")
