"""Small random models of every family, by transformers, and their GGUF twins, by the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 320
CONTEXT = 256
_CLASSES: dict[str, Any] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "q_norm": "attn_q_norm", "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def make(family: str, *, seed: int = 1, **settings: Any) -> Any:
    """A model whose weights are wide enough that attention, norms and positions all show in its logits."""
    config_class, model_class = _CLASSES[family]
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
        "attn_implementation": "eager", "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = model_class(config_class(**{**sizes, **settings})).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                weight.normal_(0, 0.3)
            else:
                weight.normal_(0, 1.6 / weight.shape[1] ** 0.5)
    return model


@torch.inference_mode()
def logits_of(model: Any, tokens: list[int]) -> np.ndarray[Any, Any]:
    """float32 [len(tokens), vocabulary]."""
    logits: np.ndarray[Any, Any] = model(torch.tensor([tokens])).logits[0].float().numpy()
    return logits


def relative_error(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """Root mean square of the difference, as a share of the spread of what is expected."""
    return float(np.sqrt(((found - expected) ** 2).mean()) / expected.std())


def tokens_for(seed: int, count: int = 90) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()
    return found


def replace_weights(model: Any, change: Any) -> None:
    """Set every matrix to change(name, values), both numpy float32 [out, in]."""
    done = set()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and weight.data_ptr() not in done:
                done.add(weight.data_ptr())
                weight.copy_(torch.from_numpy(np.ascontiguousarray(change(name, weight.numpy()))))


def write_gguf(model: Any, path: Path, kinds: dict[str, str] | None = None, **fields: Any) -> None:
    """The model as a GGUF file; the model takes on the weights as the file holds them.

    kinds: GGML type by the last part of a matrix's GGUF name, default F32. fields: further metadata without the
    architecture's prefix, `__` for a dot.
    """
    config = model.config
    architecture = {"mistral": "llama"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    for key, value in fields.items():
        _add_field(writer, key.replace("__", "."), value, architecture)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            stored = _stored_name(name)
            part = stored.split(".")[-2]
            values = weight.numpy()
            permuted = architecture == "llama" and part in heads
            if permuted:
                values = _interleaved(values, heads[part])
            kind = (kinds or {}).get(part, "F32") if weight.ndim == 2 else "F32"
            type = gguf.GGMLQuantizationType[kind]
            raw = gguf.quants.quantize(np.ascontiguousarray(values), type)
            writer.add_tensor(stored, raw, raw_dtype=type)
            held = gguf.quants.dequantize(raw, type).astype(np.float32)
            weight.copy_(torch.from_numpy(_halved(held, heads[part]) if permuted else held))
    if config.rope_parameters["rope_type"] == "llama3":
        plain = config.rope_parameters["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_field(writer: gguf.GGUFWriter, key: str, value: Any, architecture: str) -> None:
    name = key if key.startswith(("tokenizer.", "general.")) else f"{architecture}.{key}"
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int) and value < 0:
        writer.add_int32(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)


def _stored_name(name: str) -> str:
    stem, last = name.rsplit(".", 1)
    if stem in _TOP:
        return f"{_TOP[stem]}.{last}"
    parts = stem.split(".")
    return f"blk.{parts[2]}.{_LAYER[parts[-1]]}.{last}"


def _interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter does to Q and K: a head's row i and row i + D/2 become neighbours."""
    by_head = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return np.ascontiguousarray(by_head.swapaxes(1, 2).reshape(weight.shape))


def _halved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    by_head = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return np.ascontiguousarray(by_head.swapaxes(1, 2).reshape(weight.shape))
