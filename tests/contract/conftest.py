"""A real replica on the demo model, started once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import openai
import pytest

from data_plane.loading.sources import pull

MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True)
class Replica:
    url: str
    max_model_len: int
    process: subprocess.Popen[str]


@pytest.fixture(scope="session")
def replica() -> Iterator[Replica]:
    pull(MODEL)
    command = [sys.executable, "-m", "data_plane", "serve", MODEL, "--port", "0", "--name", "m"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["event"] == "ready", ready
        yield Replica(f"http://127.0.0.1:{ready['port']}", ready["max_model_len"], process)
    finally:
        process.terminate()
        assert process.wait(30) == 0


@pytest.fixture
def client(replica: Replica) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{replica.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made
