"""An independent implementation of the demo model: transformers' Llama on weights that the gguf package dequantized.

Nothing here comes from the data plane: the file is read, named, put in order and run by others' code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, quants
from transformers import LlamaConfig, LlamaForCausalLM

_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def load_reference(path: Path) -> LlamaForCausalLM:
    """The model of a llama GGUF file in float32."""
    reader = GGUFReader(path)

    def field(name: str) -> Any:
        return reader.get_field(f"llama.{name}").contents()

    heads, kv_heads = field("attention.head_count"), field("attention.head_count_kv")
    names = {tensor.name for tensor in reader.tensors}
    config = LlamaConfig(
        hidden_size=field("embedding_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=field("feed_forward_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=field("context_length"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        vocab_size=next(int(tensor.shape[1]) for tensor in reader.tensors if tensor.name == "token_embd.weight"),
        tie_word_embeddings="output.weight" not in names,
    )
    weights = {}
    for tensor in reader.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        head_count = {"attn_q": heads, "attn_k": kv_heads}.get(tensor.name.split(".")[-2])
        weights[_name(tensor.name)] = torch.from_numpy(values if head_count is None else _halves(values, head_count))
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


def _name(stored: str) -> str:
    parts = stored.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    return f"{_TOP[parts[0]]}.{parts[1]}"


def _halves(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of each head from (0, 1), (2, 3), … pairs to the two halves that transformers rotates."""
    by_head = weight.reshape(heads, -1, weight.shape[1])
    return np.concatenate([by_head[:, 0::2], by_head[:, 1::2]], axis=1).reshape(weight.shape)


@torch.inference_mode()
def logits_of(model: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    """float32 [len(tokens), vocabulary]."""
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0].float()
    return logits
