"""What cannot start says so: one JSON line on stdout, one line on stderr, an exit code that means something."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.data_plane import tiny
from tests.data_plane.replica import PATIENCE, running, start, within
from tests.data_plane.text.tokenizers_made import byte_level_fields, byte_level_folder

_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 24, 1, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    tiny.write_gguf(tiny.make("llama"), path, **byte_level_fields(tiny.VOCABULARY))
    return path


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "data_plane", *arguments]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=env, check=False)


def failure(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert said.keys() == {"event", "code", "message"}
    assert said["event"] == "failed"
    assert done.stderr == f"error: {said['message']}\n"
    assert len(said["message"]) > 20
    return said


def broken_models(folder: Path, model: Path) -> dict[str, tuple[str, str, int, str]]:
    """name -> (argument, code, exit code, part of the message)."""
    whole = model.read_bytes()
    (folder / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.gguf").write_bytes(b"")
    (folder / "text.gguf").write_text("hello, this is no model")
    (folder / "model.onnx").write_bytes(b"onnx")
    (folder / "folder.gguf").mkdir()
    (folder / "dangling.gguf").symlink_to(folder / "nowhere")
    (folder / "gpt.gguf").write_bytes(whole.replace(b"llama", b"gpt9x"))
    mixtral = folder / "mixtral"
    tiny.make("llama").save_pretrained(mixtral)
    byte_level_folder(mixtral)
    config = json.loads((mixtral / "config.json").read_text())
    (mixtral / "config.json").write_text(json.dumps({**config, "architectures": ["MixtralForCausalLM"]}))
    bare = folder / "bare"
    tiny.make("llama").save_pretrained(bare)
    return {
        "no such name": ("smollm3-9b", "model_not_found", 4, "smollm2-135m-instruct"),
        "no such file": (str(folder / "none.gguf"), "model_not_found", 4, "none.gguf"),
        "dangling link": (str(folder / "dangling.gguf"), "model_not_found", 4, "dangling.gguf"),
        "cut": (str(folder / "cut.gguf"), "model_unreadable", 1, "fetch it again"),
        "empty": (str(folder / "empty.gguf"), "model_unreadable", 1, "it is empty"),
        "no GGUF": (str(folder / "text.gguf"), "model_unreadable", 1, "does not start with GGUF"),
        "other format": (str(folder / "model.onnx"), "model_unreadable", 1, "neither a .gguf file nor a folder"),
        "a folder named so": (str(folder / "folder.gguf"), "model_unreadable", 1, "folder.gguf"),
        "unknown architecture": (str(folder / "gpt.gguf"), "unsupported_architecture", 1, "gpt9x"),
        "unknown class": (str(mixtral), "unsupported_architecture", 1, "MixtralForCausalLM"),
        "no tokenizer": (str(bare), "model_unreadable", 1, "tokenizer.json"),
    }


def test_models_that_cannot_be_served(model: Path, tmp_path: Path) -> None:
    for name, (argument, code, exit_code, part) in broken_models(tmp_path, model).items():
        done = run("serve", argument, "--port", "0", "--device", "cpu")
        said = failure(done)
        assert (said["code"], done.returncode) == (code, exit_code), name
        assert part in said["message"], name


def test_a_file_that_may_not_be_read(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "closed.gguf"
    path.write_bytes(model.read_bytes())
    path.chmod(0)
    command = [sys.executable, "-m", "data_plane", "serve", str(path), "--port", "0"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, check=False, preexec_fn=_read_only_what_is_allowed
    )
    said = failure(done)
    assert said["code"] == "model_unreadable"
    assert "permission denied" in said["message"]


def _read_only_what_is_allowed() -> None:
    """Root reads everything; it does not without these capabilities."""
    libc = ctypes.CDLL(None)
    for capability in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--port", "99999"], "--port"),
        (["--port", "abc"], "--port"),
        (["--block-size", "24"], "--block-size"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--max-model-len", "1000000"], "--max-model-len"),
        (["--max-model-len", "-1"], "--max-model-len"),
        (["--threads", "100000"], "--threads"),
        (["--liveness", "0"], "--liveness"),
        (["--liveness", "nan"], "--liveness"),
        (["--drain", "-1"], "--drain"),
        (["--max-body", "1"], "--max-body"),
        (["--device", "tpu"], "--device"),
        (["--precision", "int3"], "--precision"),
        (["--precision", "packed", "--block-size", "8"], "--precision packed"),
        (["--host", "256.256.256.256"], "256.256.256.256"),
        (["--nonsense"], "--nonsense"),
        ([], "model"),
    ],
)
def test_flags_that_are_off(flags: list[str], part: str, model: Path) -> None:
    arguments = ["serve", *([str(model)] if flags else []), *flags]
    done = run(*arguments, *(["--port", "0"] if "--port" not in flags else []))
    said = failure(done)
    assert (said["code"], done.returncode) == ("invalid_argument", 2)
    assert part in said["message"]


def test_a_port_that_is_taken(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run("serve", str(model), "--port", port)
    said = failure(done)
    assert (said["code"], done.returncode) == ("port_in_use", 1)
    assert port in said["message"]


def test_two_that_want_one_port_at_once(model: Path, tmp_path: Path) -> None:
    """One serves; the other says why it does not."""
    with socket.socket() as finder:
        finder.bind(("127.0.0.1", 0))
        port = str(finder.getsockname()[1])
    processes = [start(model, tmp_path / f"log{place}", "--port", port) for place in range(2)]
    try:
        lines = [json.loads(first_line(process)) for process in processes]
        assert sorted(line["event"] for line in lines) == ["failed", "ready"]
        for process, line in zip(processes, lines, strict=True):
            if line["event"] == "ready":
                process.terminate()
            else:
                assert line["code"] == "port_in_use"
            assert process.wait(PATIENCE) == (0 if line["event"] == "ready" else 1)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert "Traceback" not in (tmp_path / "log0").read_text() + (tmp_path / "log1").read_text()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return within(process.stdout.readline)


def test_the_ready_line(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path / "log", "--max-model-len", "100", "--precision", "float32") as replica:
        ready = replica.ready
        assert ready["host"] == "127.0.0.1"
        assert (ready["model"], ready["pid"]) == (str(model), replica.process.pid)
        assert (ready["device"], ready["precision"], ready["max_model_len"]) == ("cpu", "float32", 100)
        assert ready["startup_ms"] > 0
        assert replica.complete("a fox", max_tokens=2)["usage"]["completion_tokens"] == 2
    assert replica.process.returncode == 0


def test_without_a_compiler_it_serves_all_the_same(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path / "log", INGLE_CC="none", INGLE_CACHE=str(tmp_path)) as replica:
        assert replica.ready["precision"] in ("bfloat16", "float32")
        assert replica.complete("a fox", max_tokens=2)["usage"]["completion_tokens"] == 2
        assert [event["event"] for event in replica.logged()] == ["packed_unavailable"]


def test_inspecting_a_model_needs_no_torch(model: Path) -> None:
    done = run("model", "inspect", str(model), "-o", "json")
    spec = json.loads(done.stdout)
    assert (spec["architecture"], spec["num_layers"], spec["vocab_size"]) == ("llama", 2, tiny.VOCABULARY)
    code = "import sys; from data_plane.__main__ import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "model", "inspect", str(model)]
    assert subprocess.run(command, capture_output=True, timeout=PATIENCE).returncode == 0
    missing = run("model", "inspect", "nothing-here")
    assert missing.returncode == 4
    assert failure(missing)["code"] == "model_not_found"
