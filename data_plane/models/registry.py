"""What a model must do, and which class runs which architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from data_plane.errors import UnsupportedModel
from data_plane.loading.checkpoint import Checkpoint
from data_plane.models.batch import Array, Batch
from data_plane.models.spec import ModelSpec
from kernels.sampling import Draws

if TYPE_CHECKING:
    import torch

    from data_plane.models.llama import Rest

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class Model(Protocol):
    """Loaded weights, and the step over them. kv_token_bytes: a token's share of the KV cache, in all stages."""

    spec: ModelSpec
    kv_token_bytes: int

    @property
    def own_kv_token_bytes(self) -> int:
        """Of that, what this process has."""
        ...

    def new_cache(self, num_blocks: int, block_size: int) -> Any:
        """An empty paged KV cache in a layout of the model's own."""
        ...

    def __call__(self, batch: Batch, kv: Any) -> Array:
        """float32 logits [R, vocabulary] in host memory; kv is written in place."""
        ...

    def hidden(self, row: int) -> Array:
        """float32 [hidden]: the last step's normed state behind logits row `row`, good until the next step."""
        ...

    def draw(self, logits: Array, draws: Draws) -> list[int]:
        """A token for each row; see `kernels.sampling.draw`."""
        ...

    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads."""
        ...

    def check(self) -> None:
        """Raises StageLost where a part of it on other devices or hosts is gone."""
        ...

    def release(self) -> None:
        """Move the weights to host memory, where they aren't there."""
        ...

    def restore(self) -> None:
        """Move them back."""
        ...


def build(
    checkpoint: Checkpoint,
    dtype: str,
    device: torch.device,
    max_model_len: int,
    which: range | None = None,
    rest: Rest | None = None,
) -> tuple[Model, str]:
    """Load a model for torch; returns it and the name of its kernels. dtype: float32, bfloat16 or float16.

    With `which` only those of its layers, and `rest` has the others.
    """
    import torch

    from data_plane.models.llama import LlamaModel
    from kernels import select

    check_family(checkpoint)
    ops = select(device)
    return LlamaModel(checkpoint, ops, getattr(torch, dtype), device, max_model_len, which, rest), ops.name


def check_family(checkpoint: Checkpoint) -> None:
    """Raises UnsupportedModel for an architecture that no class runs."""
    architecture = checkpoint.spec.architecture
    if architecture not in FAMILIES:
        raise UnsupportedModel(f"no model class for {architecture}; there are {', '.join(FAMILIES)}")
