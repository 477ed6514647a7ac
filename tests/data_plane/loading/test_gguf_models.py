"""Models from GGUF files, against transformers on the weights as the gguf package reads them back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from data_plane.loading import gguf_blocks, gguf_checkpoint
from tests.data_plane import forward, tiny
from tests.data_plane.drive import load_model, new_core

KINDS = {
    "attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q8_0", "attn_output": "Q5_1", "ffn_gate": "F16", "ffn_up": "Q5_0",
    "ffn_down": "BF16", "token_embd": "Q8_0", "output": "Q4_1",
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
SCALED = {"rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 64}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True}, {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}, {}),
    "llama, llama3": ("llama", {"rope_parameters": LLAMA3}, {}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}, {"rope__scaling__type": "yarn", **SCALED}),
    "llama, linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        {"rope__scaling__type": "linear", **SCALED},
    ),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {"head_dim": 32}, {}),
}
TOKENS = tiny.tokens_for(11, 70)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("quantized", [False, True])
def test_logits_equal_those_of_transformers(case: str, quantized: bool, tmp_path: Path) -> None:
    family, settings, fields = CASES[case]
    model, path = tiny.make(family, seed=3, **settings), tmp_path / "model.gguf"
    tiny.write_gguf(model, path, KINDS if quantized else None, **fields)
    loaded = load_model(path, precision="float32", kv_cache_tokens=256, threads=1)
    new_core(loaded)
    np.testing.assert_allclose(forward.logits_of(loaded, TOKENS), tiny.logits_of(model, TOKENS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_packed_decoder_keeps_the_files_own_groups(family: str, tmp_path: Path) -> None:
    """4- and 8-bit groups are taken as they are, side by side in a fused matrix too."""
    model, path = tiny.make(family, seed=4, head_dim=32), tmp_path / "model.gguf"
    fours = ("attn_q", "attn_k", "attn_output", "ffn_gate", "output")
    kinds = {**dict.fromkeys(KINDS, "Q8_0"), **dict.fromkeys(fours, "Q4_1"), "ffn_up": "Q4_0"}
    tiny.write_gguf(model, path, kinds)
    loaded = load_model(path, precision="packed", kv_cache_tokens=256, threads=1)
    new_core(loaded)
    assert tiny.relative_error(forward.logits_of(loaded, TOKENS), tiny.logits_of(model, TOKENS)) < 0.05


@pytest.mark.parametrize("kind", [kind for kind in gguf_blocks.BLOCKS if kind > 1])
def test_blocks_of_every_type_read_as_the_gguf_package_reads_them(kind: int) -> None:
    values, size = gguf_blocks.BLOCKS[kind]
    type = gguf.GGMLQuantizationType(kind)
    assert (values, size) == gguf.GGML_QUANT_SIZES[type]
    raw = np.random.default_rng(kind).integers(0, 256, (200, size), dtype=np.uint8)
    with np.errstate(all="ignore"):  # random bytes make scales that are no numbers, too
        ours = gguf_blocks.dequantize(raw.reshape(-1), kind, (200, values))
        theirs = gguf.quants.dequantize(raw, type)
    finite = np.isfinite(theirs)
    assert finite.mean() > 0.9
    assert np.array_equal(finite, np.isfinite(ours))
    # halves that are products of two scales may be rounded in another order
    np.testing.assert_allclose(ours[finite], theirs[finite], rtol=1e-6)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K"])
def test_groups_hold_exactly_what_the_blocks_hold(kind: str) -> None:
    type = gguf.GGMLQuantizationType[kind]
    values, size = gguf.GGML_QUANT_SIZES[type]
    rng = np.random.default_rng(5)
    raw = rng.integers(0, 256, (64, 512 // values, size), dtype=np.uint8)
    for at in (0, 2) if kind in ("Q4_1", "Q4_K") else (0,):
        # scales as a real file has them: numbers, and small
        raw[:, :, at : at + 2] = rng.normal(0, 1, raw.shape[:2]).astype("<f2")[..., None].view(np.uint8)
    grouped = gguf_checkpoint._grouped(raw.reshape(-1), int(type), (64, 512))
    assert grouped is not None
    assert grouped.bits == (8 if kind == "Q8_0" else 4)
    assert grouped.values.max() < 2**grouped.bits
    np.testing.assert_allclose(grouped.dense(), gguf.quants.dequantize(raw.reshape(64, -1), type), rtol=1e-6, atol=1e-5)
