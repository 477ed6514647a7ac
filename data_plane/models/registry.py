"""Which class runs a model."""

from __future__ import annotations

from typing import Protocol

import torch

from data_plane.errors import UnsupportedModel
from data_plane.loading.checkpoint import Checkpoint
from data_plane.models.batch import Batch
from data_plane.models.llama import LlamaModel
from data_plane.models.spec import ModelSpec
from kernels import Ops


class Model(Protocol):
    """A loaded model: a callable from a batch and the KV cache to logits."""

    spec: ModelSpec
    kv_dtype: torch.dtype

    def __call__(self, batch: Batch, kv: torch.Tensor) -> torch.Tensor: ...

    def weight_bytes(self) -> int: ...


_FAMILIES = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), LlamaModel)


def build(checkpoint: Checkpoint, ops: Ops, dtype: torch.dtype, device: torch.device, max_model_len: int) -> Model:
    """Load the model of a checkpoint. Raises UnsupportedModel for a family that has no class."""
    architecture = checkpoint.spec.architecture
    if architecture not in _FAMILIES:
        raise UnsupportedModel(f"no model class for {architecture}; there are {', '.join(_FAMILIES)}")
    return _FAMILIES[architecture](checkpoint, ops, dtype, device, max_model_len)
