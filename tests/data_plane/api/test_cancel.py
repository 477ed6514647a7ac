"""A client that goes away takes its work with it: batch, queue and cache are empty again, and it is counted."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data_plane.replica import Replica, eventually, running

LONG: dict[str, Any] = {"messages": [{"role": "user", "content": "Write."}], "max_tokens": 60_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def narrow(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """Two sequences run at a time; the others wait."""
    log = tmp_path_factory.mktemp("narrow") / "log"
    with running(tiny_path, log, "--name", "tiny", "--max-num-seqs", "2") as replica:
        yield replica
    assert not [event for event in replica.logged() if event["level"] == "error"]


def read_some(connection: socket.socket) -> None:
    """At least three frames of the stream."""
    got = b""
    while got.count(b"\n\n") < 4:
        piece = connection.recv(4096)
        assert piece
        got += piece


def reset(connection: socket.socket) -> None:
    """Close with RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


WAYS: dict[str, tuple[dict[str, Any], bool, Callable[[socket.socket], None]]] = {
    "in mid-stream": ({}, True, socket.socket.close),
    "before the first byte": ({}, False, socket.socket.close),
    "waiting for a plain reply": ({"stream": False}, False, socket.socket.close),
    "by reset": ({}, True, reset),
    "with several choices": ({"n": 5}, False, socket.socket.close),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_leaves(way: str, narrow: Replica) -> None:
    fields, reads, leave = WAYS[way]
    before, made = cancelled(narrow), generated(narrow)
    connection = narrow.open_stream({**LONG, **fields})
    if reads:
        read_some(connection)
    eventually(lambda: narrow.health()["running"] > 0)
    leave(connection)
    eventually(narrow.idle)
    assert cancelled(narrow) == before + 1
    assert generated(narrow) - made < LONG["max_tokens"], "it was let run to its end"


def cancelled(replica: Replica) -> float:
    return replica.metrics().get("ingle_requests_cancelled_total", 0)


def generated(replica: Replica) -> float:
    return replica.metrics().get("ingle_tokens_generated_total", 0)


def test_clients_that_leave_while_they_queue(narrow: Replica) -> None:
    """Twenty at once, of which eighteen wait: all gone, and the next is served."""
    before = cancelled(narrow)
    connections = [narrow.open_stream(LONG) for _ in range(20)]
    eventually(lambda: narrow.health()["waiting"] == 18)
    assert narrow.health()["running"] == 2
    for connection in connections:
        connection.close()
    eventually(narrow.idle)
    metrics = narrow.metrics()
    assert metrics["ingle_requests_cancelled_total"] == before + 20
    assert metrics["ingle_requests_running"] == metrics["ingle_requests_waiting"] == metrics["ingle_kv_usage"] == 0
    assert narrow.chat("Write.", max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3


def test_a_stop_string_ends_the_work_too(narrow: Replica) -> None:
    """The engine knows nothing of stop strings: the front end must tell it."""
    text = narrow.chat("Write.", max_tokens=50, ignore_eos=True)["choices"][0]["message"]["content"]
    stop = next(char for char in text if char != "\ufffd")
    made = generated(narrow)
    answer = narrow.chat("Write.", **{**LONG, "stop": stop})
    assert answer["choices"][0]["finish_reason"] == "stop"
    eventually(narrow.idle)
    assert generated(narrow) - made < LONG["max_tokens"]


def read_all(connection: socket.socket) -> bytes:
    got = b""
    while piece := connection.recv(65536):
        got += piece
    return got


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_only_stops_sending_gets_its_reply(stream: bool, narrow: Replica) -> None:
    """Half-closed, it still reads; while it waits in the queue, too."""
    before = cancelled(narrow)
    body = {**LONG, "max_tokens": 30, "stream": stream}
    whole = narrow.chat("Write.", max_tokens=30, ignore_eos=True)["choices"][0]["message"]["content"]
    waiting = [narrow.open_stream({**LONG, "max_tokens": 3000}) for _ in range(2)]
    eventually(lambda: narrow.health()["running"] == 2)
    with narrow.open_stream(body) as connection:
        connection.shutdown(socket.SHUT_WR)
        eventually(lambda: narrow.health()["waiting"] == 1)
        for other in waiting:
            other.close()
        got = read_all(connection)
    interim, _, reply = got.rpartition(b"HTTP/1.1 200 OK")
    assert interim.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"") == b""
    if stream:
        assert b"data: [DONE]" in reply
        assert reply.count(b"data: ") > 10
    else:
        assert json.loads(reply.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"] == whole
    eventually(narrow.idle)
    assert cancelled(narrow) == before + 2


def test_a_half_sent_request_is_dropped(narrow: Replica) -> None:
    with socket.create_connection(("127.0.0.1", narrow.ready["port"]), timeout=10) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b""
    eventually(narrow.idle)
