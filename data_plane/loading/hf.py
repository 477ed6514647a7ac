"""A folder with config.json and safetensors as a checkpoint. Weights that need pickle are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from data_plane.errors import ModelUnreadable, UnsupportedModel
from data_plane.loading.checkpoint import Array, GroupedWeight, check_shape
from data_plane.loading.files import read_json
from data_plane.models.spec import ModelSpec, RopeSpec, require

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

_TOP = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip


def file_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "layers":
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    return f"{_TOP[parts[0]]}.{parts[1]}"


class HFCheckpoint:
    """See `Checkpoint`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._where = _index(folder)
        self._open: dict[str, Any] = {}
        self.spec = _spec(folder, self._where)

    def has(self, name: str) -> bool:
        return file_name(name) in self._where

    def dense(self, name: str) -> Array:
        import torch  # numpy has no bfloat16

        stored = file_name(name)
        if stored not in self._where:
            raise ModelUnreadable(f"{self.folder} lacks tensor {stored}; fetch it again")
        shard = self._where[stored]
        try:
            if shard not in self._open:
                self._open[shard] = safe_open(str(self.folder / shard), framework="pt")
            tensor: torch.Tensor = self._open[shard].get_tensor(stored)
        except (SafetensorError, OSError) as error:
            raise _broken(self.folder / shard, error) from error
        if not tensor.is_floating_point():
            raise UnsupportedModel(f"{self.folder / shard}: {stored} is {tensor.dtype}; only float weights are read")
        check_shape(self.spec, name, tuple(tensor.shape), f"{self.folder / shard}: tensor {stored}")
        found: Array = (tensor if tensor.dtype == torch.float16 else tensor.float()).numpy()
        return found

    def grouped(self, name: str) -> GroupedWeight | None:
        return None


def _broken(path: Path, error: Exception) -> ModelUnreadable:
    return ModelUnreadable(f"{path} is not a whole safetensors file ({str(error).splitlines()[0]}); fetch it again")


def _index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name inside the folder."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = require(read_json(index), "weight_map", str(index))
        for shard in set(shards.values()):
            if Path(shard).name != shard:
                raise ModelUnreadable(f"{index} points outside its folder: {shard!r}")
            if not (folder / shard).exists():
                raise ModelUnreadable(f"{folder} lacks {shard}, which its index names; fetch it again")
        return {str(name): str(shard) for name, shard in shards.items()}
    single = folder / "model.safetensors"
    if not single.exists():
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
            raise ModelUnreadable(f"{folder} holds pickled weights, which are never loaded; convert it to safetensors")
        raise ModelUnreadable(f"{folder} holds no model.safetensors; give a model's folder or a .gguf file")
    try:
        with safe_open(str(single), framework="pt") as file:
            return dict.fromkeys(file.keys(), single.name)
    except (SafetensorError, OSError) as error:
        raise _broken(single, error) from error


def _spec(folder: Path, tensors: dict[str, str]) -> ModelSpec:
    config_path = folder / "config.json"
    config = read_json(config_path)
    names = config.get("architectures") or ["?"]
    architecture = ARCHITECTURES.get(str(names[0]))
    if architecture is None:
        raise UnsupportedModel(
            f"{folder} is a {names[0]}; this engine runs {', '.join(ARCHITECTURES)}: choose such a model"
        )

    def get(key: str) -> Any:
        return require(config, key, str(config_path))

    hidden, heads, layers = int(get("hidden_size")), int(get("num_attention_heads")), int(get("num_hidden_layers"))
    head_dim = int(config.get("head_dim") or hidden // max(heads, 1))
    return ModelSpec(
        architecture=architecture,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        intermediate_size=int(get("intermediate_size")),
        vocab_size=int(get("vocab_size")),
        norm_eps=float(get("rms_norm_eps")),
        max_model_len=int(get("max_position_embeddings")),
        rope=_rope(config, head_dim),
        tied_head="lm_head.weight" not in tensors,
        attention_bias="model.layers.0.self_attn.q_proj.bias" in tensors,
        output_bias="model.layers.0.self_attn.o_proj.bias" in tensors,
        mlp_bias="model.layers.0.mlp.gate_proj.bias" in tensors,
        qk_norm="model.layers.0.self_attn.q_norm.weight" in tensors,
        windows=_windows(config, layers),
        eos_token_ids=_eos(folder, config),
    )


def _rope(config: dict[str, Any], head_dim: int) -> RopeSpec:
    # transformers 5 writes rope_parameters; older files have rope_theta and rope_scaling
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    context = int(config["max_position_embeddings"])
    factor = float(scaling.get("factor") or 1.0)
    original = int(scaling.get("original_max_position_embeddings") or context)
    share = float(scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    attention = scaling.get("attention_factor")
    return RopeSpec(
        theta=float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0),
        rotary_dim=int(head_dim * share),
        kind="none" if kind == "default" else kind,
        factor=factor,
        original_max_len=original,
        low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
        high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=None if attention is None else float(attention),
        mscale=float(scaling.get("mscale") or 0.0),
        mscale_all_dim=float(scaling.get("mscale_all_dim") or 0.0),
        truncate=bool(scaling.get("truncate", True)),
    )


def _windows(config: dict[str, Any], layers: int) -> tuple[int, ...]:
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return ()
    kinds = config.get("layer_types")
    if kinds:
        return tuple(int(window) if kind == "sliding_attention" else 0 for kind in kinds)
    first = int(config.get("max_window_layers") or 0) if "use_sliding_window" in config else 0
    return tuple(int(window) if layer >= first else 0 for layer in range(layers))


def _eos(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    generation = folder / "generation_config.json"
    settings = read_json(generation) if generation.exists() else config
    value = settings.get("eos_token_id", config.get("eos_token_id"))
    if value is None:
        return ()
    return tuple(int(item) for item in (value if isinstance(value, list) else [value]))
