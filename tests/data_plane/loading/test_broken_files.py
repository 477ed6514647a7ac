"""Broken model files: a StartError that names what to do, or a model that runs. Never another exception."""

from __future__ import annotations

import json
import math
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_plane.config import EngineConfig
from data_plane.engine.loader import load
from data_plane.errors import StartError
from data_plane.loading import gguf_checkpoint
from data_plane.loading.gguf import GGUFFile
from data_plane.loading.hf import HFCheckpoint
from data_plane.text.load import load_text
from data_plane.text.tokenizer import _BYTE_OF, from_gguf
from tests.data_plane import forward, tiny

ODD: tuple[Any, ...] = (
    None, "abc", "", -1, 0, 1, 1 << 40, 1 << 70, 1.5, math.nan, math.inf, -math.inf, True, [], [1], ["a"], [[1]], {},
    {"a": 1},
)  # fmt: skip


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    names = [*sorted(_BYTE_OF), "th", *(f"<{number}>" for number in range(257, tiny.VOCABULARY))]
    tiny.write_gguf(
        tiny.make("llama"), path, {"attn_q": "Q4_0", "ffn_up": "Q8_0"},
        tokenizer__ggml__model="gpt2", tokenizer__ggml__pre="smollm", tokenizer__ggml__tokens=names,
        tokenizer__ggml__token_type=[1] * 257 + [3] * (tiny.VOCABULARY - 257), tokenizer__ggml__merges=["t h"],
        tokenizer__ggml__eos_token_id=257, tokenizer__chat_template="{{ messages[0].content }}",
        rope__scaling__type="linear", rope__scaling__factor=2.0, attention__sliding_window=64,
    )  # fmt: skip
    return path.read_bytes()


def start(path: Path) -> None:
    """What a replica does with a file before it serves, and a step."""
    load_text(path)
    config = EngineConfig(model=str(path), precision="packed", kv_cache_tokens=64, threads=1, device="cpu")
    forward.logits_of(load(config), [1, 2, 3])


def outcome(work: Callable[[], object]) -> str:
    """`ok`, or the code of the StartError; anything else is a fault of ours and comes through."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # weights that are no numbers are not the question here
        error = caught(work)
    if error is None:
        return "ok"
    assert str(error)
    assert str(error).isprintable()
    return error.code


def caught(work: Callable[[], object]) -> StartError | None:
    try:
        work()
    except StartError as error:
        return error
    return None


def test_a_file_cut_anywhere(gguf_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes)
    assert outcome(lambda: start(path)) == "ok"
    random_ = random.Random(1)
    end = len(gguf_bytes)
    sizes = [0, 1, 4, 8, 16, 24, end - 1, *random_.sample(range(7000), 60), *random_.sample(range(7000, end), 20)]
    for size in sizes:
        path.write_bytes(gguf_bytes[:size])
        assert outcome(lambda: start(path)) == "model_unreadable", f"cut at {size}"


def test_a_file_with_bytes_turned(gguf_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    random_ = random.Random(2)
    seen = set()
    for _ in range(500):
        broken = bytearray(gguf_bytes)
        for _ in range(random_.choice((1, 1, 2, 5))):
            # the metadata, then names and shapes of tensors; what lies between is the vocabulary
            at = random_.randrange(1200) if random_.random() < 0.5 else random_.randrange(5000, 7000)
            broken[at] = random_.choice((0, 1, 2, 4, 127, 255, random_.randrange(256)))
        path.write_bytes(broken)
        seen.add(outcome(lambda: start(path)))
    assert {"ok", "model_unreadable"} <= seen


def test_an_alignment_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for value in ("32", 0, 3, -8, 1.5):
        tiny.write_gguf(tiny.make("llama"), path, general__alignment=value)
        assert outcome(lambda: GGUFFile(path)) == "model_unreadable"


def test_metadata_of_the_wrong_kind(gguf_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes)
    file = GGUFFile(path)
    whole = dict(file.fields)
    absent = (
        "tokenizer.ggml.scores", "tokenizer.ggml.bos_token_id", "tokenizer.ggml.add_bos_token",
        "tokenizer.ggml.eot_token_id", "llama.expert_count", "llama.rope.dimension_count",
    )  # fmt: skip
    for key in (*whole, *absent):
        for value in ODD:
            for model in ("gpt2", "llama"):
                scores = {"tokenizer.ggml.model": model, "tokenizer.ggml.scores": [0.0] * tiny.VOCABULARY}
                file.fields = {**whole, **scores, key: value}
                outcome(lambda: gguf_checkpoint._spec(file))
                outcome(lambda: from_gguf(file.fields, path))


def test_a_folder_whose_config_is_odd(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    tiny.make("llama", rope_parameters=scaling, sliding_window=4).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    whole = json.loads(path.read_text())
    changes: list[dict[str, Any]] = [{key: value} for key in whole for value in ODD]
    changes += [{"rope_parameters": {**scaling, key: value}} for key in scaling for value in ODD]
    seen = set()
    for change in changes:
        path.write_text(json.dumps({**whole, **change}))
        seen.add(outcome(lambda: HFCheckpoint(tmp_path)))
    assert seen == {"ok", "model_unreadable", "unsupported_architecture"}
    path.write_text(json.dumps(whole))
    for name, key in (("generation_config.json", "eos_token_id"), ("model.safetensors.index.json", "weight_map")):
        for value in ODD:
            (tmp_path / name).write_text(json.dumps({key: value}))
            outcome(lambda: HFCheckpoint(tmp_path))
        (tmp_path / name).unlink()


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "unsupported_architecture", "is a MixtralForCausalLM"),
        ({"architectures": None}, "unsupported_architecture", "is a ?"),
        ({"quantization_config": {"quant_method": "fp8"}}, "unsupported_architecture", "quantization_config"),
        ({"hidden_act": "gelu"}, "unsupported_architecture", "'gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "unsupported_architecture", "'dynamic'"),
        ({"hidden_size": None}, "model_unreadable", "lacks hidden_size"),
        ({"num_key_value_heads": 3}, "model_unreadable", "3 key heads"),
        ({"intermediate_size": 128}, "model_unreadable", "has shape [96, 64]"),
        ({"vocab_size": 1 << 23}, "model_unreadable", "has shape [320, 64]"),
        ({"num_hidden_layers": 3}, "model_unreadable", "lacks tensor model.layers.2"),
        ({"max_position_embeddings": 1 << 27}, "model_unreadable", "max_model_len"),
    ],
)
def test_what_cannot_be_served_is_said(change: dict[str, Any], code: str, said: str, tmp_path: Path) -> None:
    tiny.make("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(StartError) as caught:
        load(EngineConfig(model=str(tmp_path), kv_cache_tokens=64, threads=1, device="cpu"))
    assert caught.value.code == code
    assert said in str(caught.value)


def test_pickled_weights_are_never_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(StartError, match="pickled weights, which are never loaded"):
        HFCheckpoint(tmp_path)


def test_an_index_cannot_point_outside(tmp_path: Path) -> None:
    tiny.make("llama").save_pretrained(tmp_path / "real")
    folder = tmp_path / "crafted"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "../real/model.safetensors"}})
    )
    with pytest.raises(StartError, match="points outside its folder"):
        HFCheckpoint(folder)


def test_a_cut_safetensors_file(tmp_path: Path) -> None:
    tiny.make("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for size in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(StartError, match="not a whole safetensors file"):
            HFCheckpoint(tmp_path)
