"""A GGUF file as a checkpoint: names, sizes, and the row order of Q and K."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data_plane.errors import ModelUnreadable, UnsupportedModel
from data_plane.loading import gguf_blocks as blocks
from data_plane.loading.checkpoint import GROUP, Array, GroupedWeight, check_shape
from data_plane.loading.gguf import GGUFFile
from data_plane.loading.settings import Settings
from data_plane.models.spec import MOST_LAYERS, ModelSpec, RopeSpec

ARCHITECTURES = ("llama", "qwen2", "qwen3")

_TOP = {"embed": "token_embd", "norm": "output_norm", "head": "output"}
_LAYER = {
    "attn_norm": "attn_norm", "mlp_norm": "ffn_norm",
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm",
    "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
}  # fmt: skip


def file_name(name: str) -> str:
    """Our name of a tensor in GGUF's: layers.3.q.weight -> blk.3.attn_q.weight."""
    parts = name.split(".")
    if parts[0] == "layers":
        return f"blk.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    return f"{_TOP[parts[0]]}.{parts[1]}"


class GGUFCheckpoint:
    """See `Checkpoint`."""

    def __init__(self, path: Path) -> None:
        self.file = GGUFFile(path)
        self.spec = _spec(self.file)

    def has(self, name: str) -> bool:
        return file_name(name) in self.file.tensors

    def dense(self, name: str) -> Array:
        info = self.file.tensors[self._present(name)]
        tensor: Array
        if info.kind == blocks.F16:
            tensor = self.file.raw(info.name).view("<f2").reshape(info.shape)
        else:
            tensor = self.file.array(info.name)
        order = self._row_order(name)
        return tensor if order is None else tensor[order]

    def grouped(self, name: str) -> GroupedWeight | None:
        info = self.file.tensors[self._present(name)]
        if len(info.shape) != 2:
            return None
        weight = _grouped(self.file.raw(info.name), info.kind, info.shape)
        order = self._row_order(name)
        return weight if weight is None or order is None else weight.rows(order)

    def _present(self, name: str) -> str:
        stored = file_name(name)
        if stored not in self.file.tensors:
            raise ModelUnreadable(f"{self.file.path} lacks tensor {stored}; fetch it again")
        check_shape(self.spec, name, self.file.tensors[stored].shape, f"{self.file.path}: tensor {stored}")
        return stored

    def _row_order(self, name: str) -> Array | None:
        # the llama converter interleaves each head's rotary halves; we rotate halves, so we undo it
        if self.spec.architecture != "llama" or name.split(".")[-2] not in ("q", "k"):
            return None
        heads = self.spec.num_heads if name.split(".")[-2] == "q" else self.spec.num_kv_heads
        rows = np.arange(heads * self.spec.head_dim)
        return rows.reshape(heads, self.spec.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _grouped(raw: Array, kind: int, shape: tuple[int, ...]) -> GroupedWeight | None:
    groups = (shape[0], shape[1] // GROUP)
    if kind not in (blocks.Q4_0, blocks.Q4_1, blocks.Q8_0, blocks.Q4_K):
        return None
    rows = raw.reshape(-1, blocks.BLOCKS[kind][1])
    if kind == blocks.Q4_K:
        values, scale, offset = blocks.q4_k_parts(rows)
    else:
        scale = rows[:, 0:2].copy().view("<f2").astype(np.float32)
        if kind == blocks.Q4_1:
            values, offset = blocks.nibbles(rows[:, 4:]), rows[:, 2:4].copy().view("<f2").astype(np.float32)
        elif kind == blocks.Q4_0:
            values, offset = blocks.nibbles(rows[:, 2:]), scale * -8
        else:
            values, offset = rows[:, 2:] ^ 128, scale * -128
    return GroupedWeight(
        np.ascontiguousarray(values).reshape(shape),
        np.ascontiguousarray(scale).reshape(groups),
        np.ascontiguousarray(offset).reshape(groups),
        8 if kind == blocks.Q8_0 else 4,
    )


def _spec(file: GGUFFile) -> ModelSpec:
    architecture = Settings(file.fields, str(file.path)).text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path} is of architecture {architecture!r}; this engine runs {', '.join(ARCHITECTURES)} "
            "(Llama, Mistral, SmolLM, Qwen 2 and 3): choose such a model"
        )
    settings = Settings(file.fields, str(file.path), f"{architecture}.")
    if settings.integer("expert_count", 0):
        raise UnsupportedModel(f"{file.path} is a mixture of experts, which this engine does not run yet")
    heads, hidden = settings.integer("attention.head_count", low=1), settings.integer("embedding_length")
    head_dim = settings.integer("attention.key_length", hidden // heads)
    layers, context = settings.integer("block_count", high=MOST_LAYERS), settings.integer("context_length")
    vocabulary = file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else 0
    window = settings.integer("attention.sliding_window", 0)
    return ModelSpec(
        architecture=architecture,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=settings.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=settings.integer("feed_forward_length"),
        vocab_size=vocabulary,
        norm_eps=settings.number("attention.layer_norm_rms_epsilon"),
        max_model_len=context,
        rope=RopeSpec(
            theta=settings.number("rope.freq_base", 10000.0),
            rotary_dim=settings.integer("rope.dimension_count", head_dim),
            kind=settings.text("rope.scaling.type", "none"),
            factor=settings.number("rope.scaling.factor", 1.0),
            original_max_len=settings.integer("rope.scaling.original_context_length", context),
            frequency_divisors=_divisors(file),
        ),
        tied_head="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        windows=(window,) * layers if window else (),
        eos_token_ids=_eos(Settings(file.fields, str(file.path), "tokenizer.ggml.")),
    )


def _divisors(file: GGUFFile) -> tuple[float, ...]:
    name = "rope_freqs.weight"
    return tuple(file.array(name).reshape(-1).tolist()) if name in file.tensors else ()


def _eos(settings: Settings) -> tuple[int, ...]:
    """End-of-turn and end-of-text tokens; a model may end with either."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    return tuple(dict.fromkeys(id for key in keys for id in settings.token_ids(key)))
