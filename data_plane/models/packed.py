"""The Llama family on a CPU: weights in groups of 4 or 8 bits, every layer in one call of the compiled decoder."""

from __future__ import annotations

import numpy as np

from data_plane.layers.rope import cos_sin_table
from data_plane.loading.checkpoint import Checkpoint, GroupedWeight, group_to_8_bits
from data_plane.models.batch import Array, Batch
from data_plane.models.spec import ModelSpec
from kernels.cpu import Decoder, DecoderShape, LayerWeights, PackedMatrix, pack
from kernels.sampling import Draws


class PackedLlamaModel:
    """See `registry.Model`. Weights that the file holds in groups of 32 are used as they are; others become 8-bit."""

    def __init__(self, checkpoint: Checkpoint, shape: DecoderShape, max_model_len: int) -> None:
        spec = self.spec = checkpoint.spec
        self.kv_value_bytes = 2
        layers = [_layer(checkpoint, spec, index) for index in range(spec.num_layers)]
        head = _matrix(checkpoint, "embed" if spec.tied_head else "head")
        embedding = None if spec.tied_head else np.ascontiguousarray(checkpoint.dense("embed.weight"), np.float16)
        norm = np.ascontiguousarray(checkpoint.dense("norm.weight"), np.float32)
        table = cos_sin_table(spec.rope, max_model_len)
        self._decoder = Decoder(shape, layers, norm, head, embedding, table)
        self._bytes = head.nbytes + sum(
            part.nbytes for layer in layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down)
        )

    def new_cache(self, num_blocks: int, block_size: int) -> Array:
        spec = self.spec
        shape = (spec.num_layers, 2, num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
        return np.empty(shape, np.float16)

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


def decoder_shape(
    spec: ModelSpec, *, block_size: int, most_tokens: int, threads: int, activation_bits: int
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
        activation_bits=activation_bits,
    )


def _layer(checkpoint: Checkpoint, spec: ModelSpec, index: int) -> LayerWeights:
    name = f"layers.{index}"

    def vector(part: str) -> Array:
        return np.ascontiguousarray(checkpoint.dense(f"{name}.{part}.weight"), np.float32)

    return LayerWeights(
        attn_norm=vector("attn_norm"),
        mlp_norm=vector("mlp_norm"),
        q_norm=vector("q_norm") if spec.qk_norm else None,
        k_norm=vector("k_norm") if spec.qk_norm else None,
        qkv=_matrix(checkpoint, *(f"{name}.{part}" for part in "qkv"), bias=spec.attention_bias),
        out=_matrix(checkpoint, f"{name}.o", bias=spec.output_bias),
        gate_up=_matrix(checkpoint, f"{name}.gate", f"{name}.up", bias=spec.mlp_bias),
        down=_matrix(checkpoint, f"{name}.down", bias=spec.mlp_bias),
        window=spec.window(index),
    )


def _matrix(checkpoint: Checkpoint, *names: str, bias: bool = False) -> PackedMatrix:
    """The matrices `names`, stacked along the output."""
    parts = [_grouped(checkpoint, f"{name}.weight") for name in names]
    if len({part.bits for part in parts}) > 1:
        parts = [part if part.bits == 8 else _widened(part) for part in parts]
    offset = np.concatenate([checkpoint.dense(f"{name}.bias") for name in names]) if bias else None
    return pack(
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.scale for part in parts]),
        np.concatenate([part.offset for part in parts]),
        parts[0].bits,
        offset,
    )


def _grouped(checkpoint: Checkpoint, name: str) -> GroupedWeight:
    return checkpoint.grouped(name) or group_to_8_bits(checkpoint.dense(name))


def _widened(part: GroupedWeight) -> GroupedWeight:
    """The same values in 8 bits: nothing changes but their storage."""
    return GroupedWeight(part.values, part.scale, part.offset, 8)
