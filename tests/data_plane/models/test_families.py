"""Every family that is served, against transformers on the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_plane.loading.checkpoint import group_to_8_bits
from tests.data_plane import forward, tiny
from tests.data_plane.drive import load_model, new_core

LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
DEEP_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_attention_heads": 2}),
    "llama, heads of 64": ("llama", {"head_dim": 64, "num_key_value_heads": 1}),
    "llama, linear": ("llama", {"rope_parameters": LINEAR}),
    "llama, llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, yarn with mscale": ("llama", {"rope_parameters": DEEP_YARN}),
    "llama, yarn with factor": ("llama", {"rope_parameters": {**YARN, "attention_factor": 0.8}}),
    "mistral, window": ("mistral", {"sliding_window": 20}),
    "mistral, no window": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen2, some layers windowed": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
}
TOKENS = tiny.tokens_for(7)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    family, settings = CASES[case]
    model = tiny.make(family, **settings)
    model.save_pretrained(tmp_path)
    check(model, tmp_path)
    tiny.replace_weights(model, as_packed(model))
    check_packed(model, tmp_path)


def check(model: Any, folder: Path) -> None:
    """In one go and in chunks, over memory that is not a number where nothing was written."""
    expected = tiny.logits_of(model, TOKENS)
    assert expected.std() > 0.5, "logits this flat would hide a fault"
    loaded = load_model(folder, precision="float32", kv_cache_tokens=512, threads=1)
    new_core(loaded)
    np.testing.assert_allclose(forward.logits_of(loaded, TOKENS), expected, atol=1e-4, rtol=0)
    blocks = [9, 3, 4, 30, 2, 11]
    rows = [
        forward.run(loaded, [forward.Part(TOKENS, start, end, blocks)])[0]
        for start, end in ((0, 33), (33, 34), (34, 90))
    ]
    np.testing.assert_allclose(np.concatenate(rows), expected, atol=1e-4, rtol=0)


def check_packed(model: Any, folder: Path) -> None:
    """Off by a few percent of the spread of the logits, as 8 bits are, not by more; chunks change no bit."""
    expected = tiny.logits_of(model, TOKENS)
    assert expected.std() > 0.5, "logits this flat would hide a fault"
    loaded = load_model(folder, precision="packed", kv_cache_tokens=512, threads=1)
    new_core(loaded)
    found = forward.logits_of(loaded, TOKENS)
    assert tiny.relative_error(found, expected) < 0.05
    blocks = [9, 3, 4, 30, 2, 11]
    rows = [
        forward.run(loaded, [forward.Part(TOKENS, start, end, blocks)])[0]
        for start, end in ((0, 33), (33, 34), (34, 90))
    ]
    np.testing.assert_array_equal(np.concatenate(rows), found)


def as_packed(model: Any) -> Any:
    """The weights that the packed decoder keeps: groups of 8 bits, and an embedding of its own in 16."""
    own_embedding = not model.config.tie_word_embeddings

    def change(name: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if own_embedding and "embed_tokens" in name:
            return values.astype(np.float16).astype(np.float32)
        grouped = group_to_8_bits(values).dense()
        step = np.abs(values).reshape(len(values), -1, 32).max(axis=2, keepdims=True) / 127
        assert (np.abs(grouped - values).reshape(len(values), -1, 32) <= step * 0.56).all()
        return grouped

    return change


def test_configs_of_older_versions(tmp_path: Path) -> None:
    """rope_theta and rope_scaling at the top, and windows by the layer they begin at."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    windows = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    model = tiny.make("qwen2", rope_parameters={"rope_theta": 500.0, **scaling}, **windows)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"], config["layer_types"]
    old = {
        "rope_theta": 500.0,
        "rope_scaling": {"type": "yarn", **{k: scaling[k] for k in scaling if k != "rope_type"}},
    }
    path.write_text(json.dumps({**config, **windows, **old}))
    check(model, tmp_path)


def test_partial_rotation(tmp_path: Path) -> None:
    """Only a quarter of each head turns: transformers' Llama with frequencies of zero, its rows in another order."""
    model = tiny.make("llama", head_dim=32, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"]["partial_rotary_factor"] = 0.25
    (tmp_path / "config.json").write_text(json.dumps(config))
    # there, row i turns with row i + 16; here, rows 0 … 3 with 4 … 7
    order = np.array([0, 1, 2, 3, *range(8, 20), 4, 5, 6, 7, *range(20, 32)])
    with torch.no_grad():
        for layer in model.model.layers:
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                part.weight.copy_(part.weight.view(-1, 32, 64)[:, order].reshape(part.weight.shape))
    frequencies = torch.zeros(16)
    frequencies[:4] = 500.0 ** (-torch.arange(0, 8, 2) / 8)
    model.model.rotary_emb.inv_freq = frequencies
    check(model, tmp_path)


def test_more_threads_than_the_decoder_has_room_for(tmp_path: Path) -> None:
    """As on a machine of very many cores: it takes what it can use."""
    tiny.make("llama").save_pretrained(tmp_path)
    one, many = (load_model(tmp_path, precision="packed", kv_cache_tokens=512, threads=threads) for threads in (1, 200))
    assert np.array_equal(forward.logits_of(one, TOKENS), forward.logits_of(many, TOKENS))


def test_weights_may_be_in_16_bits_and_in_several_files(tmp_path: Path) -> None:
    model = tiny.make("llama")
    for dtype in (torch.bfloat16, torch.float16):
        folder = tmp_path / str(dtype)
        model.to(dtype).save_pretrained(folder, max_shard_size="60KB")
        assert len([*folder.glob("*.safetensors")]) > 2
        model.float()
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        check(model, folder)
