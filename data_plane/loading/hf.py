"""A folder with config.json and safetensors as a checkpoint. Weights that need pickle are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from data_plane.errors import ModelUnreadable, UnsupportedModel
from data_plane.loading.checkpoint import Array, GroupedWeight, check_shape
from data_plane.loading.files import read_json
from data_plane.loading.settings import Settings
from data_plane.models.spec import MOST_LAYERS, ModelSpec, RopeSpec

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
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
            raise ModelUnreadable(f"{index} has no weight_map of tensors to files; fetch the model again")
        for shard in set(shards.values()):
            if Path(shard).name != shard:
                raise ModelUnreadable(f"{index} points outside its folder: {shard!r}")
            if not (folder / shard).exists():
                raise ModelUnreadable(f"{folder} lacks {shard}, which its index names; fetch it again")
        return shards
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
    path = folder / "config.json"
    config = read_json(path)
    settings = Settings(config, str(path))
    name = (settings.texts("architectures", []) or ["?"])[0]
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{folder} is a {name}; this engine runs {', '.join(ARCHITECTURES)}: choose such a model"
        )
    _refuse_what_is_not_read(settings, folder)
    hidden, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads", low=1)
    layers = settings.integer("num_hidden_layers", high=MOST_LAYERS)
    head_dim = settings.integer("head_dim", hidden // heads)
    return ModelSpec(
        architecture=ARCHITECTURES[name],
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=settings.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=settings.integer("intermediate_size"),
        vocab_size=settings.integer("vocab_size"),
        norm_eps=settings.number("rms_norm_eps"),
        max_model_len=settings.integer("max_position_embeddings"),
        rope=_rope(settings, head_dim),
        tied_head="lm_head.weight" not in tensors,
        attention_bias="model.layers.0.self_attn.q_proj.bias" in tensors,
        output_bias="model.layers.0.self_attn.o_proj.bias" in tensors,
        mlp_bias="model.layers.0.mlp.gate_proj.bias" in tensors,
        qk_norm="model.layers.0.self_attn.q_norm.weight" in tensors,
        windows=_windows(settings, layers),
        eos_token_ids=_eos(folder, settings),
    )


def _refuse_what_is_not_read(settings: Settings, folder: Path) -> None:
    """What would change the answers if it were overlooked."""
    if settings.has("quantization_config"):
        raise UnsupportedModel(
            f"{folder} holds quantized weights (quantization_config), which are not read from safetensors yet; "
            "choose the model's unquantized folder or a .gguf file"
        )
    activation = settings.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(
            f"{folder} uses the activation {activation!r}; only silu is supported: choose another model"
        )


def _rope(settings: Settings, head_dim: int) -> RopeSpec:
    # transformers 5 writes rope_parameters; older files have rope_theta and rope_scaling
    scaling = settings.part("rope_parameters" if settings.has("rope_parameters") else "rope_scaling")
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    context = settings.integer("max_position_embeddings")
    share = scaling.number("partial_rotary_factor", settings.number("partial_rotary_factor", 1.0))
    return RopeSpec(
        theta=scaling.number("rope_theta", settings.number("rope_theta", 10000.0)),
        rotary_dim=int(head_dim * share),
        kind="none" if kind == "default" else kind,
        factor=scaling.number("factor", 1.0),
        original_max_len=scaling.integer("original_max_position_embeddings", context),
        low_freq_factor=scaling.number("low_freq_factor", 1.0),
        high_freq_factor=scaling.number("high_freq_factor", 4.0),
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        attention_factor=scaling.number("attention_factor") if scaling.has("attention_factor") else None,
        mscale=scaling.number("mscale", 0.0),
        mscale_all_dim=scaling.number("mscale_all_dim", 0.0),
        truncate=scaling.flag("truncate", True),
    )


def _windows(settings: Settings, layers: int) -> tuple[int, ...]:
    window = settings.integer("sliding_window", 0)
    if not window or not settings.flag("use_sliding_window", True):
        return ()
    if settings.has("layer_types"):
        return tuple(window if kind == "sliding_attention" else 0 for kind in settings.texts("layer_types"))
    first = settings.integer("max_window_layers", 0) if settings.has("use_sliding_window") else 0
    return tuple(window if layer >= first else 0 for layer in range(layers))


def _eos(folder: Path, settings: Settings) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    generation = Settings(read_json(path), str(path)) if path.exists() else settings
    return (generation if generation.has("eos_token_id") else settings).token_ids("eos_token_id")
