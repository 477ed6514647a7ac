from __future__ import annotations

import os
import pydoc_data.topics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from data_plane.engine.loader import Loaded
from data_plane.loading.sources import cache_folder, pull
from data_plane.text.chat_template import ChatTemplate
from data_plane.text.load import load_text
from data_plane.text.tokenizer import TextTokenizer
from tests.data_plane.drive import load_model

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

DEMO = "smollm2-135m-instruct"
# torch's threads spin at barriers unless told otherwise before it is loaded, and starve the replicas beside them
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# the machine may be busy: how long an example takes says nothing about it
settings.register_profile("ingle", parent=settings(), deadline=None)
settings.load_profile("ingle")


@pytest.fixture(scope="package", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of the tests' own, with the user's models and compiled kernels: what tests pack stays out of that."""
    pull(DEMO)
    shared, own = cache_folder().parent, tmp_path_factory.mktemp("cache")
    for name in ("models", "kernels"):
        (shared / name).mkdir(exist_ok=True)
        (own / name).symlink_to(shared / name)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("INGLE_CACHE", str(own))
        yield


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The demo model's file; fetched unless it is in the cache."""
    return pull(DEMO)


@pytest.fixture(scope="session")
def demo_text(demo_path: Path) -> tuple[TextTokenizer, ChatTemplate]:
    tokenizer, template = load_text(demo_path)
    assert template is not None
    return tokenizer, template


@pytest.fixture(scope="session")
def reference(demo_path: Path) -> LlamaForCausalLM:
    """The demo model in float32, by others' code alone."""
    from tests.data_plane.reference import load_reference

    return load_reference(demo_path)


@pytest.fixture(scope="session")
def packed(demo_path: Path) -> Loaded:
    return load_model(demo_path, precision="packed", threads=2)


@pytest.fixture(scope="session")
def float32(demo_path: Path) -> Loaded:
    return load_model(demo_path, precision="float32", threads=1)


@pytest.fixture(scope="session")
def prompts(demo_text: tuple[TextTokenizer, ChatTemplate]) -> dict[str, list[int]]:
    """Five of different kinds; the longest crosses prefill chunks, and partitions of the attention."""
    tokenizer, template = demo_text
    ask = "What is the capital of France? Answer in a whole sentence and say something of its history."
    return {
        "long": tokenizer.encode(pydoc_data.topics.topics["assignment"][:3000]),
        "question": template.tokens([{"role": "user", "content": ask}]),
        "story": template.tokens([{"role": "user", "content": "Tell me a story about a lighthouse keeper."}]),
        "code": tokenizer.encode('def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n'),
        "list": tokenizer.encode("The planets of the solar system, from the sun outwards, are"),
    }
