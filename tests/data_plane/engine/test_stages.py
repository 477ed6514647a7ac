"""One model in several stages says what one device says, to the bit, and goes as a whole when a stage goes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID

from control_plane.security.certificates import CertificateAuthority
from data_plane.__main__ import main
from data_plane.config import EngineConfig, ServeConfig
from data_plane.engine.client import EngineClient
from data_plane.engine.loader import Loaded, load
from data_plane.engine.messages import Failed, Output, SamplingParams, Warmed
from data_plane.engine.stage_link import Hello, Joined, Open, StageLink
from data_plane.engine.stages import Stages, split
from data_plane.errors import InvalidArgument, ModelNotFound, StageLost
from data_plane.loading.formats import open_checkpoint
from tests.data_plane import tiny
from tests.data_plane.drive import Driver, generate, new_core
from tests.data_plane.replica import Replica, alive, eventually, running, start
from tests.data_plane.text.tokenizers_made import byte_level_fields

LAYERS = 5
TOLD = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=4, prompt_logprobs=2)
PROMPTS = {"long": tiny.tokens_for(1, 150), "short": tiny.tokens_for(2, 3), "middle": tiny.tokens_for(3, 40)}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    tied = request.param == "qwen3"
    tiny.make(request.param, num_hidden_layers=LAYERS, tie_word_embeddings=tied).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer."""
    path = tmp_path_factory.mktemp("spoken") / "model.gguf"
    tiny.write_gguf(tiny.make("llama", num_hidden_layers=LAYERS), path, **byte_level_fields(tiny.VOCABULARY))
    return path


def config(model: Path, **settings: Any) -> EngineConfig:
    sizes = {"kv_cache_tokens": 512, "max_batched_tokens": 64, "threads": 1, **settings}
    return EngineConfig(model=str(model), device="cpu", **sizes).validate()


@contextlib.contextmanager
def staged(asked: EngineConfig) -> Iterator[tuple[Loaded, Stages]]:
    stages = Stages(asked)
    try:
        yield load(asked, stages), stages
    finally:
        stages.close()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [2, 4])
def test_it_says_what_one_device_says_to_the_bit(model: Path, precision: str, count: int) -> None:
    alone = generate(new_core(load(config(model, precision=precision))), PROMPTS, TOLD)
    with staged(config(model, precision=precision, stages=count)) as (loaded, _):
        together = generate(new_core(loaded), PROMPTS, TOLD)
    assert together == alone


def test_it_comes_back_from_sleep(model: Path) -> None:
    with staged(config(model, precision="float32", stages=2)) as (loaded, stages):
        core = new_core(loaded)
        before = generate(core, PROMPTS, TOLD)
        core.release()
        core.restore()
        assert generate(core, PROMPTS, TOLD) == before
        stages.shut()


def test_what_a_stage_cannot_load_is_said_by_its_name(model: Path, tmp_path: Path) -> None:
    asked = config(model, precision="float32", stages=2)
    stages = Stages(asked)
    try:
        spec = open_checkpoint(model).spec
        stages._config = config(tmp_path / "gone", precision="float32", stages=2)
        stages.open(spec, "float32", "cpu", 64)
        with pytest.raises(ModelNotFound, match="gone"):
            stages.room()
    finally:
        stages.close()


def test_an_error_in_a_stage_ends_its_request_and_nothing_else(model: Path) -> None:
    with staged(config(model, precision="float32", stages=2)) as (loaded, stages):
        core = new_core(loaded)
        before = generate(core, PROMPTS, TOLD)
        stages.new_cache(2, 16)  # too small for what the first stage thinks that there is
        driver = Driver(core)
        driver.add("far", tiny.tokens_for(4, 200))
        assert driver.finish()["far"].finish == "error"
        stages.new_cache(loaded.num_blocks, 16)
        assert generate(core, PROMPTS, TOLD) == before


def test_a_stage_that_goes_takes_the_engine_with_it(model: Path) -> None:
    with staged(config(model, precision="float32", stages=3)) as (loaded, stages):
        core = new_core(loaded)
        core._runner.check()
        stages._children[1].kill()
        stages._children[1].wait()
        with pytest.raises(StageLost):
            core._runner.check()
        with pytest.raises(StageLost):
            generate(core, PROMPTS, TOLD)


@pytest.mark.parametrize(
    ("stages", "vocabulary", "expected"),
    [
        (1, 320, [5]),
        (2, 320, [2, 3]),
        (2, 5000, [1, 4]),
        (3, 5000, [1, 2, 2]),
        (4, 320, [1, 2, 1, 1]),
        (5, 320, [1, 1, 1, 1, 1]),
    ],
)
def test_the_first_stage_has_fewer_layers_because_it_has_the_tables(
    model: Path, stages: int, vocabulary: int, expected: list[int]
) -> None:
    spec = dataclasses.replace(open_checkpoint(model).spec, vocab_size=vocabulary)
    shares = split(spec, stages)
    assert [len(share) for share in shares] == expected
    assert [layer for share in shares for layer in share] == list(range(LAYERS))


def test_more_stages_than_layers_are_refused(model: Path) -> None:
    with pytest.raises(InvalidArgument, match="--stages 6: the model has 5 layers"):
        split(open_checkpoint(model).spec, 6)


def test_what_cannot_be_is_refused_before_anything_starts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    monkeypatch.delenv("INGLE_REPLICA_TOKEN", raising=False)
    with pytest.raises(InvalidArgument, match="--stages 6: the model has 5 layers"):
        Stages(config(model, stages=6))
    for open_to_all in ("0.0.0.0:0", "example.org:0"):
        with pytest.raises(InvalidArgument, match=r"others reach it.* set INGLE_REPLICA_TOKEN"):
            Stages(config(model, stages=2, stages_elsewhere=1, stage_listen=open_to_all))
    Stages(config(model, stages=2, stages_elsewhere=1, stage_listen="127.0.0.1:0")).close()
    monkeypatch.setenv("INGLE_REPLICA_TOKEN", "t")
    Stages(config(model, stages=2, stages_elsewhere=1, stage_listen="0.0.0.0:0")).close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"stages": 0}, "--stages must be between 1 and 64"),
        ({"stages": 2, "precision": "packed"}, "--precision packed runs a model whole"),
        ({"stages": 2, "stages_elsewhere": 2}, "--stages-elsewhere must be between 0 and 1"),
        ({"stages_elsewhere": 1}, "--stages-elsewhere says how many of --stages come from other hosts"),
        ({"stages": 2, "stages_elsewhere": 1}, "--stage-listen is missing: HOST:PORT"),
        ({"stages": 2, "stage_listen": "127.0.0.1:9"}, "--stage-listen is for --stages-elsewhere"),
        ({"stages": 2, "stages_elsewhere": 1, "stage_listen": "x:http"}, "--stage-listen must be HOST:PORT"),
    ],
)
def test_settings_that_contradict_each_other_are_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        EngineConfig(model="m", **settings).validate()


# ---- as processes


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_replica_in_two_stages_serves_rests_and_ends_when_one_is_killed(spoken: Path, tmp_path: Path) -> None:
    flags = ("--stages", "2", "--precision", "float32", "--kv-cache-tokens", "512")
    prompt = tiny.tokens_for(5, 30)
    with running(spoken, tmp_path / "alone", *flags[2:]) as replica:
        expected = replica.complete(prompt, max_tokens=12)["choices"]
    with running(spoken, tmp_path / "log", *flags) as replica:
        (stage,) = children(replica.engine_pid)
        assert replica.complete(prompt, max_tokens=12)["choices"] == expected
        for rung in ("asleep", "ember"):
            assert replica.client.post("/sleep", json={"rung": rung}).status_code == 200
            assert replica.client.post("/wake").status_code == 200
            assert replica.complete(prompt, max_tokens=12)["choices"] == expected
        os.kill(stage, signal.SIGKILL)
        eventually(lambda: not alive(replica.engine_pid))
        reasons = [line for line in replica.logged() if line["event"] == "engine_failed"]
        assert [line["code"] for line in reasons] == ["stage_lost"]
        replica.process.wait(60)


async def test_whoever_loses_a_part_of_the_model_is_told_so() -> None:
    engine = EngineClient(ServeConfig(engine=EngineConfig(model="m")), None, None)  # type: ignore[arg-type]
    engine._take([Warmed("hot", None, {})])
    heard: list[Output] = []
    engine._sinks["one"] = heard.append
    engine._take([Failed("stage_lost", "a stage ended")])
    engine._end(engine._ended)
    assert [(output.finish, output.error) for output in heard] == [("error", "the engine lost a part of the model")]


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        (["serve"], "ingle engine serve"),
        (["stage"], "ingle engine stage"),
        (["serve", "m", "--x"], "ingle engine"),
        (["model", "pull"], "ingle model pull"),
    ],
)
def test_hints_name_what_was_typed(typed: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(typed) == 2
    assert f"see `{named} --help`" in capsys.readouterr().err


def test_stages_end_with_their_engine(spoken: Path, tmp_path: Path) -> None:
    with running(spoken, tmp_path / "log", "--stages", "3", "--precision", "float32") as replica:
        stages = children(replica.engine_pid)
        assert len(stages) == 2
        os.kill(replica.engine_pid, signal.SIGKILL)
        eventually(lambda: not any(alive(pid) for pid in stages))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_engine_that_waits_for_stages_ends_with_its_server(spoken: Path, tmp_path: Path, number: int) -> None:
    port = free_port()
    asked = ("--stages", "3", "--stages-elsewhere", "1", "--stage-listen", f"127.0.0.1:{port}")
    process = start(spoken, tmp_path / "log", *asked, "--precision", "float32")
    try:
        eventually(lambda: "stages_awaited" in (tmp_path / "log").read_text())
        said = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
        (awaited,) = [line for line in said if line["event"] == "stages_awaited"]
        assert (awaited["missing"], awaited["listen"]) == (1, f"127.0.0.1:{port}")
        (engine,) = children(process.pid)
        (stage,) = children(engine)
        process.send_signal(number)
        process.wait(60)
        eventually(lambda: not alive(engine) and not alive(stage))
        socket.create_server(("127.0.0.1", port)).close()
    finally:
        process.kill()
        process.communicate()


def test_stages_are_taken_before_the_model_is_opened_and_strangers_keep_nobody_out(model: Path) -> None:
    port = free_port()
    stages = Stages(config(model, precision="float32", stages=2, stages_elsewhere=1, stage_listen=f"127.0.0.1:{port}"))
    try:
        for _ in range(3):  # these know no token, and go
            with socket.create_connection(("127.0.0.1", port)) as gone:
                StageLink(gone).send(Hello("wrong"))
        with socket.create_connection(("127.0.0.1", port)) as connection:
            link = StageLink(connection)
            link.patience(20)
            link.send(Hello(os.environ.get("INGLE_REPLICA_TOKEN", "")))
            assert link.receive() == (Joined(), [])
            shares = stages.open(open_checkpoint(model).spec, "float32", "cpu", 64)
            asked, _ = link.receive()
            assert isinstance(asked, Open)
            assert range(asked.start, asked.stop) == range(shares.stop, LAYERS)
    finally:
        stages.close()


def test_what_is_no_engine_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with joining(port, tmp_path / "log", "t") as stage:
            connection, _ = other.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            assert stage.wait(60) == 1
            connection.close()
    assert f"what listens at 127.0.0.1:{port} doesn't answer as an engine" in (tmp_path / "log").read_text()
    with joining(port, tmp_path / "waits", "t"):  # nobody listens there
        eventually(lambda: "engine_awaited" in (tmp_path / "waits").read_text())


@contextlib.contextmanager
def joining(port: int, log: Path, token: str, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "data_plane", "stage", "--connect", f"127.0.0.1:{port}", *flags]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command, stdout=stderr, stderr=stderr, env={**os.environ, "INGLE_REPLICA_TOKEN": token}
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("tls", [False, True])
def test_stages_of_other_hosts_come_by_tcp_with_the_replicas_token(spoken: Path, tmp_path: Path, tls: bool) -> None:
    port, served, flags = free_port(), [], []
    if tls:
        authority = CertificateAuthority(tmp_path, 90)
        pair = tmp_path / "pair.pem"
        usage = ExtendedKeyUsageOID.SERVER_AUTH
        pair.write_bytes(authority.issue("r", ["r.replica.ingle"], usage=usage, lifetime=600, now=time.time()))
        served = ["--tls-pair", str(pair), "--tls-authority", str(authority.ca_file)]
        flags = ["--tls-authority", str(authority.ca_file), "--tls-name", "r.replica.ingle"]
    asked = ["--stages", "2", "--stages-elsewhere", "1", "--stage-listen", f"127.0.0.1:{port}"]
    process = start(spoken, tmp_path / "log", *asked, *served, "--precision", "float32", INGLE_REPLICA_TOKEN="right")
    try:
        with joining(port, tmp_path / "wrong", "wrong", *flags) as stranger:
            assert stranger.wait(60) == 2
        assert "doesn't take this stage: the token in INGLE_REPLICA_TOKEN isn't" in (tmp_path / "wrong").read_text()
        with joining(port, tmp_path / "none", "", *flags) as stranger:
            assert stranger.wait(60) == 2
        with joining(port, tmp_path / "stage", "right", *flags) as stage:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            assert ready["event"] == "ready", ready
            told = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
            assert [line["reason"] for line in told if line["event"] == "stage_refused"] == ["wrong token", "no token"]
            assert [line["event"] for line in told].count("stage_joined") == 1
            with joining(port, tmp_path / "surplus", "right", *flags) as surplus:
                assert surplus.wait(60) == 2
            last = json.loads((tmp_path / "log").read_text().splitlines()[-1])
            assert (last["event"], last["reason"]) == ("stage_refused", "one too many")
            assert "the engine has the 1 that --stages-elsewhere asks for" in (tmp_path / "surplus").read_text()
            if not tls:
                replica = Replica(process, ready, tmp_path / "log")
                replica.client.headers["Authorization"] = "Bearer right"
                assert replica.complete(tiny.tokens_for(5, 9), max_tokens=4)["usage"]["completion_tokens"] == 4
                assert "right" not in (tmp_path / "log").read_text() + (tmp_path / "stage").read_text()
                replica.client.close()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            assert stage.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_stage_believes_no_engine_without_the_right_certificate(spoken: Path, tmp_path: Path) -> None:
    authority, other = CertificateAuthority(tmp_path / "a", 90), CertificateAuthority(tmp_path / "b", 90)
    pair, port = tmp_path / "pair.pem", free_port()
    usage = ExtendedKeyUsageOID.SERVER_AUTH
    pair.write_bytes(authority.issue("r", ["r.replica.ingle"], usage=usage, lifetime=600, now=time.time()))
    asked = config(
        spoken,
        precision="float32",
        stages=2,
        stages_elsewhere=1,
        stage_listen=f"127.0.0.1:{port}",
        stage_pair=str(pair),
    )
    stages = Stages(asked)
    try:
        for ca, name in ((other, "r.replica.ingle"), (authority, "else.replica.ingle")):
            flags = ("--tls-authority", str(ca.ca_file), "--tls-name", name)
            with joining(port, tmp_path / "log", "", *flags) as process:
                assert process.wait(60) == 1
            assert "certificate verify failed" in (tmp_path / "log").read_text()
        assert stages._links == []
    finally:
        stages.close()


def test_a_frame_beyond_all_bounds_ends_the_connection() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = StageLink(ours)
        theirs.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(StageLost, match="message of 4294967295 bytes"):
            link.receive()
        StageLink(theirs).send(Hello("x"), [b"abc"])
        assert link.receive() == (Hello("x"), [bytearray(b"abc")])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])
