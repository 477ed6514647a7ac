"""The Llama family on a CPU: weights in groups of 4 or 8 bits, every layer in one call of the compiled decoder."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from data_plane.layers.rope import cos_sin_table
from data_plane.loading import prepacked
from data_plane.loading.checkpoint import Checkpoint, GroupedWeight, group_to_8_bits
from data_plane.models.batch import Array, Batch
from data_plane.models.spec import ModelSpec
from kernels.cpu import LANES, Decoder, DecoderShape, LayerWeights, PackedMatrix, pack
from kernels.sampling import Draws


class PackedLlamaModel:
    """See `registry.Model`. Weights that the file holds in groups of 32 are used as they are; others become 8-bit."""

    def __init__(self, checkpoint: Checkpoint, path: Path, shape: DecoderShape, max_model_len: int) -> None:
        spec = self.spec = checkpoint.spec
        self._piece = shape.kv_piece
        self.kv_token_bytes = spec.num_layers * spec.num_kv_heads * shape.kv_piece // shape.block_size
        entry = prepacked.entry_for(path, spec)
        arrays = prepacked.read(entry)
        if arrays is None:
            arrays = _pack_all(checkpoint)
            if prepacked.write(entry, arrays):
                arrays = prepacked.read(entry) or arrays
        layers = [_layer(arrays, spec, index) for index in range(spec.num_layers)]
        head = _matrix(arrays, "head", spec.vocab_size, spec.hidden_size)
        table = cos_sin_table(spec.rope, max_model_len)
        self._decoder = Decoder(shape, layers, arrays["norm"], head, arrays.get("embedding"), table)
        self._bytes = head.nbytes + sum(
            part.nbytes for layer in layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down)
        )

    @property
    def own_kv_token_bytes(self) -> int:
        return self.kv_token_bytes

    def check(self) -> None:
        """All of it is here."""

    def new_cache(self, num_blocks: int, block_size: int) -> Array:
        spec = self.spec
        shape = (num_blocks, spec.num_layers, spec.num_kv_heads, self._piece)
        # vectors that straddle cache lines cost twice
        room = np.empty(math.prod(shape) + 63, np.uint8)
        start = -room.ctypes.data % 64
        return room[start : start + math.prod(shape)].reshape(shape)

    def __call__(self, batch: Batch, kv: Array) -> Array:
        return self._decoder.step(
            batch.tokens, batch.positions, batch.slot_mapping, batch.block_tables, batch.cu_seqlens_q, batch.seq_lens,
            batch.logit_rows, kv,
        )  # fmt: skip

    def hidden(self, row: int) -> Array:
        return self._decoder.hidden(row)

    def draw(self, logits: Array, draws: Draws) -> list[int]:
        return self._decoder.draw(logits, draws)

    def weight_bytes(self) -> int:
        return self._bytes

    def release(self) -> None:
        """They are mapped from a file: the kernel keeps them as long as it has room."""

    def restore(self) -> None:
        """Nothing was moved."""


def decoder_shape(
    spec: ModelSpec, *, block_size: int, most_tokens: int, threads: int, loudness: float = 0.0
) -> DecoderShape:
    return DecoderShape(
        hidden=spec.hidden_size,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rotary_dim=spec.rope.rotary_dim,
        intermediate=spec.intermediate_size,
        vocabulary=spec.vocab_size,
        block_size=block_size,
        most_tokens=most_tokens,
        threads=threads,
        eps=spec.norm_eps,
        loudness=loudness,
    )


def _pack_all(checkpoint: Checkpoint) -> dict[str, Array]:
    """Everything that the decoder reads, by name. A matrix is `.values`, `.scales` and perhaps `.bias`."""
    spec = checkpoint.spec
    arrays: dict[str, Array] = {"norm": _vector(checkpoint, "norm")}
    if not spec.tied_head:
        arrays["embedding"] = np.ascontiguousarray(checkpoint.dense("embed.weight"), np.float16)
    arrays |= _pack(checkpoint, "head", ["embed" if spec.tied_head else "head"])
    for index in range(spec.num_layers):
        name = f"layers.{index}"
        for part in ("attn_norm", "mlp_norm", *(("q_norm", "k_norm") if spec.qk_norm else ())):
            arrays[f"{name}.{part}"] = _vector(checkpoint, f"{name}.{part}")
        for part, sources, bias in (
            ("qkv", "qkv", spec.attention_bias),
            ("out", "o", spec.output_bias),
            ("gate_up", ("gate", "up"), spec.mlp_bias),
            ("down", ("down",), spec.mlp_bias),
        ):
            arrays |= _pack(checkpoint, f"{name}.{part}", [f"{name}.{source}" for source in sources], bias=bias)
    return arrays


def _vector(checkpoint: Checkpoint, name: str) -> Array:
    return np.ascontiguousarray(checkpoint.dense(f"{name}.weight"), np.float32)


def _pack(checkpoint: Checkpoint, name: str, sources: list[str], *, bias: bool = False) -> dict[str, Array]:
    """The matrices `sources`, stacked along the output."""
    parts = [_grouped(checkpoint, f"{source}.weight") for source in sources]
    # values of 4 bits fit into 8 as they are: nothing changes but their storage
    bits = max(part.bits for part in parts)
    packed = pack(
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.scale for part in parts]),
        np.concatenate([part.offset for part in parts]),
        bits,
        np.concatenate([checkpoint.dense(f"{source}.bias") for source in sources]) if bias else None,
    )
    arrays = {f"{name}.values": packed.values, f"{name}.scales": packed.scales}
    return arrays if packed.bias is None else {**arrays, f"{name}.bias": packed.bias}


def _matrix(arrays: dict[str, Array], name: str, outputs: int, inputs: int) -> PackedMatrix:
    values = arrays[f"{name}.values"]
    tiles = arrays[f"{name}.scales"].shape[0]
    bits = values.nbytes * 8 // (tiles * LANES * inputs)
    return PackedMatrix(values, arrays[f"{name}.scales"], arrays.get(f"{name}.bias"), outputs, inputs, bits)


def _layer(arrays: dict[str, Array], spec: ModelSpec, index: int) -> LayerWeights:
    name = f"layers.{index}"
    attended, width = spec.num_heads * spec.head_dim, spec.hidden_size
    return LayerWeights(
        attn_norm=arrays[f"{name}.attn_norm"],
        mlp_norm=arrays[f"{name}.mlp_norm"],
        q_norm=arrays.get(f"{name}.q_norm"),
        k_norm=arrays.get(f"{name}.k_norm"),
        qkv=_matrix(arrays, f"{name}.qkv", attended + 2 * spec.num_kv_heads * spec.head_dim, width),
        out=_matrix(arrays, f"{name}.out", width, attended),
        gate_up=_matrix(arrays, f"{name}.gate_up", 2 * spec.intermediate_size, width),
        down=_matrix(arrays, f"{name}.down", width, spec.intermediate_size),
        window=spec.window(index),
    )


def _grouped(checkpoint: Checkpoint, name: str) -> GroupedWeight:
    return checkpoint.grouped(name) or group_to_8_bits(checkpoint.dense(name))
