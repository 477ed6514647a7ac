"""`make demo`: the main job, as an operator and a tenant would do it, each step through the public doors.

Set up the platform on embedded defaults, create an endpoint on a real model, stream a reply over HTTPS through the
official client, let it sleep, wake it with a second request, stop. The last line carries the figures.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai

ENDPOINT, REGION, MODEL = "demo", "local-eu", "smollm2-135m-instruct"
IDLE_TIMEOUT = "2s"
START_S, SLEEP_S, STOP_S = 30.0, 30.0, 20.0
INGLE = str(Path(sys.executable).with_name("ingle"))


@dataclass(frozen=True)
class Reply:
    """Seconds from the request to the first token; tokens a second after it."""

    text: str
    first_token_s: float
    tokens_per_s: float


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="ingle-demo-") as folder:
        home = Path(folder)
        environment = {**os.environ, "INGLE_HOME": str(home), "NO_COLOR": "1"}
        try:
            with platform(home, environment):
                return story(environment)
        except DemoFailed as error:
            print(f"demo failed: {error}", file=sys.stderr)
            log = home / "up.log"
            if log.exists():
                print("".join(log.read_text().splitlines(keepends=True)[-15:]), file=sys.stderr)
            return 1


class DemoFailed(Exception):
    pass


def story(environment: dict[str, str]) -> int:
    say(f"ingle endpoint create {ENDPOINT} --region {REGION} --model {MODEL} --idle-timeout {IDLE_TIMEOUT}")
    ingle(environment, "endpoint", "create", ENDPOINT, "--region", REGION, "--model", MODEL,
          "--idle-timeout", IDLE_TIMEOUT, "--wait")  # fmt: skip
    say("ingle key create -o env")
    client = connect(ingle(environment, "key", "create", "-o", "env"))

    say('openai: "Why is the sky blue?"')
    warm = chat(client, "Why is the sky blue?")

    say(f"no requests: the endpoint goes to zero after {IDLE_TIMEOUT}")
    wait_for_state(environment, "zero", SLEEP_S)

    say('openai: "And why is it red at sunset?" (held at the gateway while a replica starts)')
    woken = chat(client, "And why is it red at sunset?")

    show = endpoint(environment)
    say(f"ingle endpoint delete {ENDPOINT}")
    ingle(environment, "endpoint", "delete", ENDPOINT, "--yes", "--wait")
    print(
        f"demo ok endpoint={show['url']} region={show['region']} ttft_ms={warm.first_token_s * 1000:.0f} "
        f"tokens_per_s={warm.tokens_per_s:.0f} cold_start_ms={woken.first_token_s * 1000:.0f}",
        flush=True,
    )
    return 0


@contextlib.contextmanager
def platform(home: Path, environment: dict[str, str]) -> Iterator[None]:
    """`ingle up` in a home of its own, stopped by SIGTERM at the end."""
    gateway, admin = free_port(2), free_port(1)
    say("ingle up")
    with (home / "up.log").open("w") as log:
        process = subprocess.Popen(
            [INGLE, "up", "--gateway", f"127.0.0.1:{gateway}", "--admin", f"127.0.0.1:{admin}"],
            env=environment, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        wait_until_up(process, environment)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise DemoFailed(f"ingle up did not stop within {STOP_S:.0f} s") from None
    if process.returncode:
        raise DemoFailed(f"ingle up ended with exit code {process.returncode}")


def wait_until_up(process: subprocess.Popen[bytes], environment: dict[str, str]) -> None:
    deadline = time.monotonic() + START_S
    profile = Path(environment["INGLE_HOME"]) / "profile.toml"
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise DemoFailed(f"ingle up ended with exit code {process.returncode}")
        if profile.exists() and run(environment, "region", "list", "-o", "json").returncode == 0:
            return
        time.sleep(0.1)
    raise DemoFailed(f"ingle up did not answer within {START_S:.0f} s")


def connect(exports: str) -> openai.OpenAI:
    """The client exactly as a tenant gets it: from the environment that `key create -o env` prints."""
    for line in exports.splitlines():
        name, _, value = line.removeprefix("export ").partition("=")
        os.environ[name] = value.strip("'\"")
    return openai.OpenAI(timeout=90, max_retries=0)


def chat(client: openai.OpenAI, question: str) -> Reply:
    started = time.monotonic()
    first = 0.0
    tokens, text = 0, ""
    stream = client.chat.completions.create(
        model=ENDPOINT, messages=[{"role": "user", "content": question}], max_tokens=96, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    for chunk in stream:
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
        piece = chunk.choices[0].delta.content if chunk.choices else None
        if piece:
            first = first or time.monotonic()
            text += piece
            print(piece, end="", flush=True)
    print()
    if not text or not tokens:
        raise DemoFailed("the stream ended without a reply")
    rate = (tokens - 1) / max(time.monotonic() - first, 1e-9)
    return Reply(text, first - started, rate)


def endpoint(environment: dict[str, str]) -> dict[str, str]:
    shown: dict[str, str] = json.loads(ingle(environment, "endpoint", "show", ENDPOINT, "-o", "json"))
    return shown


def wait_for_state(environment: dict[str, str], state: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    seen = ""
    while time.monotonic() < deadline:
        seen = endpoint(environment)["state"]
        if seen == state:
            return
        time.sleep(0.2)
    raise DemoFailed(f"the endpoint is {seen}, not {state}, after {seconds:.0f} s")


def ingle(environment: dict[str, str], *arguments: str) -> str:
    done = run(environment, *arguments)
    if done.returncode:
        raise DemoFailed(f"ingle {' '.join(arguments)}: exit {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([INGLE, *arguments], env=environment, capture_output=True, text=True, timeout=120)


def free_port(count: int) -> int:
    """A port with `count - 1` free ones after it."""
    for _ in range(50):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            first = held.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            for place in range(1, count):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port + place))
            return port
    raise DemoFailed("no free ports on 127.0.0.1")


def say(step: str) -> None:
    print(f"▸ {step}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
