"""Processes that die, hang or are asked to go."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.data_plane.replica import PATIENCE, Replica, alive, eventually, running, strict

LONG = {"messages": [{"role": "user", "content": "Write."}], "max_tokens": 60_000, "ignore_eos": True}
Start = Callable[..., AbstractContextManager[Replica]]


@pytest.fixture
def started(tiny_path: Path, tmp_path: Path) -> Start:
    def start(*flags: str) -> AbstractContextManager[Replica]:
        return running(tiny_path, tmp_path / "log", "--name", "tiny", *flags)

    return start


class Reader:
    """Reads a stream in a thread, and tells when it has begun and what it was."""

    def __init__(self, replica: Replica, body: dict[str, Any]) -> None:
        self.begun = threading.Event()
        self.raw = b""
        self._client = httpx.Client(base_url=replica.client.base_url, timeout=PATIENCE)
        self._body = {"model": replica.name, "stream": True, "temperature": 0, **body}
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self.begun.wait(PATIENCE)

    def _read(self) -> None:
        with self._client.stream("POST", "/v1/chat/completions", json=self._body) as response:
            for piece in response.iter_raw():
                self.raw += piece
                self.begun.set()

    def frames(self) -> list[str]:
        """All frames, once the stream has ended."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self._client.close()
        return self.raw.decode().split("\n\n")[:-1]


def test_the_engine_is_killed(started: Start) -> None:
    """/health fails within two seconds; open requests end in an error, none in a made-up end; the exit is a failure."""
    with started() as replica:
        readers = [Reader(replica, LONG) for _ in range(3)]
        plain: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: plain.append(replica.post("/v1/chat/completions", LONG)))
        waiting.start()
        with httpx.Client(base_url=replica.client.base_url, timeout=PATIENCE) as watch:
            eventually(lambda: watch.get("/health").json()["running"] == 4)
            os.kill(replica.engine_pid, signal.SIGKILL)
            eventually(lambda: watch.get("/health").status_code == 503, seconds=2)
            assert watch.get("/health").json()["reason"] == "the engine process ended"
            refused = watch.post("/v1/chat/completions", json={"model": "tiny", **LONG})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_died")
        for reader in readers:
            assert ends_in_error(reader)
        waiting.join(PATIENCE)
        assert (plain[0].status_code, plain[0].json()["error"]["code"]) == (500, "engine_error")
        assert replica.process.wait(PATIENCE) != 0
        assert any(event["event"] == "engine_died" and event["requests"] == 4 for event in replica.logged())


def ends_in_error(reader: Reader) -> bool:
    frames = reader.frames()
    error = strict(frames[-1].removeprefix("data: "))["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == "engine_error"
    return not any('"finish_reason":"' in frame for frame in frames)


def test_the_engine_hangs_and_comes_back(started: Start) -> None:
    with started("--liveness", "1") as replica:
        os.kill(replica.engine_pid, signal.SIGSTOP)
        eventually(lambda: replica.client.get("/health").status_code == 503)
        assert replica.health()["reason"].startswith("no step for ")
        os.kill(replica.engine_pid, signal.SIGCONT)
        eventually(lambda: replica.client.get("/health").status_code == 200)
        assert replica.chat("Write.", max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2
        os.kill(replica.engine_pid, signal.SIGSTOP)
        replica.process.send_signal(signal.SIGTERM)
        assert replica.process.wait(PATIENCE) == 0
        assert not alive(replica.engine_pid), "a hung engine is ended by force"


@pytest.fixture
def draining(started: Start) -> Iterator[tuple[Replica, Reader]]:
    """A replica that was asked to go while a stream runs."""
    with started() as replica:
        reader = Reader(replica, {**LONG, "max_tokens": 4000})
        replica.process.send_signal(signal.SIGTERM)
        eventually(lambda: bool(replica.health()["draining"]))
        yield replica, reader


def test_asked_to_go_it_finishes_what_it_began(draining: tuple[Replica, Reader]) -> None:
    replica, reader = draining
    refused = replica.post("/v1/chat/completions", LONG)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert "retry-after" in refused.headers
    frames = reader.frames()
    assert frames[-1] == "data: [DONE]"
    assert strict(frames[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert replica.process.wait(PATIENCE) == 0
    assert not alive(replica.engine_pid)


def test_a_drain_that_takes_too_long_is_cut(started: Start) -> None:
    with started("--drain", "0.2") as replica:
        reader = Reader(replica, LONG)
        replica.process.send_signal(signal.SIGTERM)
        assert replica.process.wait(PATIENCE) == 0
        assert ends_in_error(reader)
        assert not alive(replica.engine_pid)
        assert not [event for event in replica.logged() if event["level"] == "error"]


def test_drain_on_demand_refuses_new_work_and_keeps_the_process(started: Start) -> None:
    with started() as replica:
        assert replica.client.post("/drain").json() == {"draining": True, "open": 0}
        assert replica.post("/v1/completions", {"prompt": "x"}).json()["error"]["code"] == "draining"
        assert replica.client.get("/health").status_code == 200
        assert replica.process.poll() is None


def test_the_front_is_killed_and_the_engine_goes_too(started: Start) -> None:
    with started() as replica:
        connection = replica.open_stream(LONG)
        assert connection.recv(1)
        replica.process.kill()
        replica.process.wait(PATIENCE)
        eventually(lambda: not alive(replica.engine_pid))
        connection.close()
        assert [event["event"] for event in replica.logged()] == ["engine_stopped"]
