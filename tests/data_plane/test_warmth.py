"""A replica goes down to asleep and ember and comes back, and says the same as before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data_plane.replica import Replica, running, start, within

PROMPT = {"prompt": "One, two, three,", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def replica(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    with running(demo_path, tmp_path_factory.mktemp("warm") / "log", "--rung", "ember") as replica:
        yield replica


def move(replica: Replica, path: str, **body: Any) -> dict[str, Any]:
    answer = replica.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def say(replica: Replica) -> str:
    answer = replica.client.post("/v1/completions", json={"model": replica.name, **PROMPT})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_an_ember_holds_nothing_and_becomes_any_rung(replica: Replica) -> None:
    assert replica.ready["rung"] == "ember"
    assert replica.health()["status"] == "ember"
    refused = replica.client.post("/v1/completions", json={"model": replica.name, **PROMPT})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "asleep")
    assert replica.client.get("/openapi.json").status_code == 200
    assert replica.client.get("/metrics").status_code == 200
    ember = memory(replica)

    assert move(replica, "/wake")["rung"] == "hot"
    first = say(replica)
    assert replica.client.get("/v1/models").json()["data"][0]["id"] == replica.name
    hot = memory(replica)
    for rung in ("asleep", "ember", "asleep"):
        down = move(replica, "/sleep", rung=rung)
        assert down["rung"] == replica.health()["rung"] == rung
        phases = move(replica, "/wake")["wake_phases"]
        assert phases["total"] > 0
        assert say(replica) == first
    move(replica, "/sleep", rung="ember")
    assert memory(replica) < hot, "what was loaded is given back"
    assert ember < hot


def test_moving_again_is_safe(replica: Replica) -> None:
    move(replica, "/sleep")
    move(replica, "/sleep")
    move(replica, "/wake")
    assert move(replica, "/wake")["rung"] == "hot"
    assert say(replica)


def test_nothing_that_runs_is_put_to_sleep(replica: Replica) -> None:
    move(replica, "/wake")
    stream = replica.open_stream({"messages": [{"role": "user", "content": "Count."}], "max_tokens": 200})
    try:
        assert within(lambda: stream.recv(64)).startswith(b"HTTP/1.1 200")
        busy = replica.client.post("/sleep")
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "busy")
    finally:
        stream.close()
    assert say(replica)


@pytest.mark.parametrize("body", ["{", '{"rung": "hot"}', '{"rung": 3}', "[]"])
def test_a_rung_that_is_none_is_refused(replica: Replica, body: str) -> None:
    answer = replica.client.post("/sleep", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("rung", "body")


def test_an_ember_ends_in_good_order(demo_path: Path, tmp_path: Path) -> None:
    with running(demo_path, tmp_path / "log", "--rung", "ember") as replica:
        replica.process.terminate()
        assert replica.process.wait(20) == 0


def test_a_model_that_is_gone_when_it_is_needed(demo_path: Path, tmp_path: Path) -> None:
    """The engine ends, and the replica with it, so that whoever watches sees it."""
    copy = tmp_path / "model.gguf"
    copy.symlink_to(demo_path)
    with running(copy, tmp_path / "log", "--rung", "ember") as replica:
        copy.unlink()
        answer = replica.client.post("/wake")
        assert answer.status_code == 503
        assert replica.process.wait(20) != 0


def test_a_rung_is_asked_for_by_name(demo_path: Path, tmp_path: Path) -> None:
    process = start(demo_path, tmp_path / "log", "--rung", "tepid")
    assert process.stdout is not None
    assert "invalid_argument" in within(process.stdout.readline)
    assert process.wait(20) != 0
    process.stdout.close()


def memory(replica: Replica) -> int:
    """KiB of its two processes that are theirs alone or shared in part."""
    total = 0
    for pid in (replica.ready["pid"], replica.ready["engine_pid"]):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1])
    return total


def test_weights_of_torch_come_back_too(demo_path: Path, tmp_path: Path) -> None:
    with running(demo_path, tmp_path / "log", "--precision", "float32", "--kv-cache-tokens", "1024") as replica:
        first = say(replica)
        move(replica, "/sleep")
        move(replica, "/wake")
        assert say(replica) == first
