"""The demo model as a folder of safetensors in bfloat16, for peers that do not read GGUF."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from data_plane.loading import hf
from data_plane.loading.gguf_checkpoint import GGUFCheckpoint
from data_plane.text.tokenizer import from_gguf


def export(gguf: Path, folder: Path) -> Path:
    """Write the folder if it is not there; return it."""
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = GGUFCheckpoint(gguf)
    spec, fields = checkpoint.spec, checkpoint.file.fields
    names = ["embed", "norm"]
    for layer in range(spec.num_layers):
        names += [f"layers.{layer}.{part}" for part in ("attn_norm", "mlp_norm", *"qkvo", "gate", "up", "down")]
    tensors = {
        hf.file_name(f"{name}.weight"): torch.from_numpy(checkpoint.dense(f"{name}.weight").copy()).bfloat16()
        for name in names
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "intermediate_size": spec.intermediate_size,
        "vocab_size": spec.vocab_size,
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.max_model_len,
        "rope_theta": spec.rope.theta,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "bfloat16",
    }
    tokenizer = from_gguf(fields, gguf)
    (folder / "tokenizer.json").write_text(tokenizer.as_json(), "utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": tokenizer.tokens.bos,
                "eos_token": tokenizer.tokens.eos,
                "chat_template": fields["tokenizer.chat_template"],
            }
        )
    )
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder
