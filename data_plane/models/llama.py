"""The Llama family: Llama, Mistral, SmolLM, Qwen 2 and 3 differ by biases, QK-norm, head sharing and RoPE scaling."""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F

from data_plane.layers.linear import DenseLinear, load_dense, to_tensor
from data_plane.layers.residence import move
from data_plane.layers.rope import cos_sin_table
from data_plane.loading.checkpoint import Checkpoint
from data_plane.models.batch import Array, Batch
from data_plane.models.spec import ModelSpec
from kernels import Ops
from kernels.sampling import Draws, draw


class DeviceBatch:
    """A batch's arrays as tensors of one device."""

    def __init__(self, batch: Batch, device: torch.device) -> None:
        def put(array: Array) -> torch.Tensor:
            return torch.as_tensor(array).to(device, non_blocking=True)

        self.positions = put(batch.positions)
        self.slot_mapping, self.block_tables = put(batch.slot_mapping), put(batch.block_tables)
        self.cu_seqlens_q, self.seq_lens = put(batch.cu_seqlens_q), put(batch.seq_lens)
        self.max_query_len = batch.max_query_len
        self.logit_rows = put(batch.logit_rows)


class Layer:
    """One decoder layer: attention, then MLP, each behind a norm and added to the residual stream."""

    def __init__(
        self, index: int, spec: ModelSpec, checkpoint: Checkpoint, ops: Ops, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec = spec
        self.ops = ops
        self.window = spec.window(index)
        name = f"layers.{index}"

        def vector(part: str) -> torch.Tensor:
            return to_tensor(checkpoint.dense(f"{name}.{part}.weight"), dtype, device)

        def linear(*parts: str, bias: bool) -> DenseLinear:
            return load_dense(checkpoint, [f"{name}.{part}" for part in parts], dtype, device, bias=bias)

        self.attn_norm, self.mlp_norm = vector("attn_norm"), vector("mlp_norm")
        self.qkv = linear("q", "k", "v", bias=spec.attention_bias)
        self.out = linear("o", bias=spec.output_bias)
        self.gate_up = linear("gate", "up", bias=spec.mlp_bias)
        self.down = linear("down", bias=spec.mlp_bias)
        self.q_norm = vector("q_norm") if spec.qk_norm else None
        self.k_norm = vector("k_norm") if spec.qk_norm else None

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, kv: torch.Tensor, cos_sin: torch.Tensor, batch: DeviceBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: the last layer's output [T, H]; residual [T, H]; kv: [2, blocks, Hk, block, D]. Returns the next pair."""
        normed, residual = self.ops.add_rms_norm(x, residual, self.attn_norm, self.spec.norm_eps)
        x = self.out(self._attention(normed, kv, cos_sin, batch))
        normed, residual = self.ops.add_rms_norm(x, residual, self.mlp_norm, self.spec.norm_eps)
        return self.down(self.ops.silu_mul(self.gate_up(normed))), residual

    def _attention(self, x: torch.Tensor, kv: torch.Tensor, cos_sin: torch.Tensor, batch: DeviceBatch) -> torch.Tensor:
        spec, ops = self.spec, self.ops
        count, dim = x.shape[0], spec.head_dim
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        fused = self.qkv(x).view(count, heads + 2 * kv_heads, dim)
        q, k, v = torch.split(fused, [heads, kv_heads, kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q = ops.rms_norm(q, self.q_norm, spec.norm_eps)
            k = ops.rms_norm(k, self.k_norm, spec.norm_eps)
        ops.apply_rope(q, k, cos_sin, batch.positions)
        ops.cache_write(k, v, kv[0], kv[1], batch.slot_mapping)
        attended = ops.paged_attention(
            q, kv[0], kv[1], batch.block_tables, batch.cu_seqlens_q, batch.seq_lens,
            scale=1 / math.sqrt(dim), max_query_len=batch.max_query_len, window=self.window,
        )  # fmt: skip
        return attended.view(count, heads * dim)


class LlamaLayers:
    """Consecutive layers on one device, in one dtype, with their paged KV cache: all of a model's, or one stage's."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        which: range,
    ) -> None:
        self.spec = checkpoint.spec
        self._dtype, self._device = dtype, device
        self.kv_token_bytes = self.spec.kv_bytes_per_token(dtype.itemsize) // self.spec.num_layers * len(which)
        self.layers = [Layer(index, self.spec, checkpoint, ops, dtype, device) for index in which]
        self.cos_sin = torch.from_numpy(cos_sin_table(self.spec.rope, max_model_len)).to(device)

    def new_cache(self, num_blocks: int, block_size: int) -> torch.Tensor:
        spec = self.spec
        shape = (len(self.layers), 2, num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, kv: torch.Tensor, batch: DeviceBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: what the layer before gave [T, H]; residual [T, H]. Returns the next pair."""
        for layer, cache in zip(self.layers, kv, strict=True):
            x, residual = layer(x, residual, cache, self.cos_sin, batch)
        return x, residual

    def weight_bytes(self) -> int:
        parts = (part for layer in self.layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down))
        return sum(part.weight.nbytes for part in parts)


class Rest(Protocol):
    """The layers after a model's own, wherever they are: see `engine.stages`."""

    def new_cache(self, num_blocks: int, block_size: int) -> None: ...

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows `batch.logit_rows` of the last layer's pair, each [R, H], on x's device."""
        ...

    def weight_bytes(self) -> int: ...

    def release(self) -> None: ...

    def restore(self) -> None: ...

    def check(self) -> None:
        """Raises StageLost where they are gone."""
        ...


class LlamaModel:
    """Weights on one device, in one dtype, and the forward pass over a paged KV cache.

    With `rest` it has the embedding, layers `which` and the head, and what lies between is done there.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        which: range | None = None,
        rest: Rest | None = None,
    ) -> None:
        spec = self.spec = checkpoint.spec
        self.ops = ops
        self._device = device
        self._rest = rest
        self._hidden = torch.empty(0)
        self.embedding = to_tensor(checkpoint.dense("embed.weight"), dtype, device)
        self.body = LlamaLayers(checkpoint, ops, dtype, device, max_model_len, which or range(spec.num_layers))
        self.kv_token_bytes = spec.kv_bytes_per_token(dtype.itemsize)
        self.norm = to_tensor(checkpoint.dense("norm.weight"), dtype, device)
        if spec.tied_head:
            self.head = DenseLinear(self.embedding, None)
        else:
            self.head = load_dense(checkpoint, ["head"], dtype, device)

    @property
    def own_kv_token_bytes(self) -> int:
        return self.body.kv_token_bytes

    def new_cache(self, num_blocks: int, block_size: int) -> torch.Tensor:
        if self._rest is not None:
            self._rest.new_cache(num_blocks, block_size)
        return self.body.new_cache(num_blocks, block_size)

    @torch.inference_mode()
    def __call__(self, batch: Batch, kv: torch.Tensor) -> Array:
        residual = F.embedding(torch.as_tensor(batch.tokens).to(self._device, non_blocking=True), self.embedding)
        x, residual = self.body(torch.zeros_like(residual), residual, kv, there := DeviceBatch(batch, self._device))
        if self._rest is not None:
            x, residual = self._rest(x, residual, batch)
        else:
            x, residual = x[there.logit_rows], residual[there.logit_rows]
        self._hidden, _ = self.ops.add_rms_norm(x, residual, self.norm, self.spec.norm_eps)
        return self.head(self._hidden).float().cpu().numpy()

    def hidden(self, row: int) -> Array:
        return self._hidden[row].float().cpu().numpy()

    def draw(self, logits: Array, draws: Draws) -> list[int]:
        return draw(logits, draws)

    def check(self) -> None:
        if self._rest is not None:
            self._rest.check()

    def release(self) -> None:
        if self._rest is not None:
            self._rest.release()
        self._hidden = torch.empty(0)
        move(self, torch.device("cpu"))

    def restore(self) -> None:
        if self._rest is not None:
            self._rest.restore()
        move(self, self._device)

    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads, in all stages."""
        beyond = 0 if self._rest is None else self._rest.weight_bytes()
        return self.body.weight_bytes() + self.head.weight.nbytes + beyond
