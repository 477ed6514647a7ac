"""Whether a model fits an accelerator, for how many at once, and how fast it would be by a roofline. Pure.

A step reads all weights and the cache of every sequence, and multiplies each token by all weights: the longer of the
two bounds it on a GPU, their sum on a CPU. `Efficiency` says what share of the published rates is believed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from control_plane.errors import InvalidInput
from control_plane.planning.accelerators import GIGA, TERA, Accelerator, Catalogue, Efficiency, label
from control_plane.planning.shapes import Shape

USABLE = 0.9
"""Of an accelerator's memory; the rest is the runtime's and the activations'."""


class Precision(StrEnum):
    """As `ingle engine serve --precision` takes it."""

    PACKED = "packed"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def table_bits(self) -> float:
        """A weight of the embedding and the head."""
        return {"packed": 8.5, "float32": 32.0}.get(self.value, 16.0)

    @property
    def block_bits(self) -> float:
        """A weight of the layers. `packed` counts four bits and each group's scale and minimum."""
        return {"packed": 5.0, "float32": 32.0}.get(self.value, 16.0)

    @property
    def cache_bytes(self) -> float:
        return {"packed": 1.0, "float32": 4.0}.get(self.value, 2.0)


def precision_for(kind: str, asked: str | None = None) -> Precision:
    """`asked`, or what the engine chooses on a `cpu` or a `gpu`. Raises InvalidInput naming the field."""
    if asked in (None, "auto"):
        return Precision.PACKED if kind == "cpu" else Precision.BFLOAT16
    try:
        return Precision(asked)
    except ValueError:
        raise InvalidInput(
            f"precision must be one of {', '.join(Precision)}, not {asked!r}", param="precision"
        ) from None


@dataclass(frozen=True, slots=True)
class Machine:
    """`count` accelerators that share a model, its layers in as many stages.

    `kv_tokens` and `max_seqs` are the engine's own bounds, if given.
    """

    accelerator: Accelerator
    count: int
    efficiency: Efficiency
    usable: float = USABLE
    kv_tokens: int | None = None
    max_seqs: int = 256

    @property
    def name(self) -> str:
        return label(self.accelerator, self.count)

    @property
    def memory(self) -> float:
        """Bytes that weights and cache may take."""
        return self.accelerator.memory_gb * GIGA * self.count * self.usable

    @property
    def bytes_per_s(self) -> float:
        """Of one: a step visits one after the other."""
        return self.accelerator.bandwidth_gb_s * GIGA * self.efficiency.bandwidth

    def flops(self, precision: Precision) -> float:
        """Matrix operations a second."""
        one = self.accelerator
        rate = one.eight_bit_tflops if precision is Precision.PACKED else one.bf16_tflops
        return rate * TERA * self.efficiency.prefill


@dataclass(frozen=True, slots=True)
class Fit:
    """How a model stands on a machine. Bytes, seconds, tokens; `users` is how many contexts of full length at once."""

    machine: Machine
    shape: Shape
    precision: Precision
    context: int
    weights: float
    kv_per_token: float
    kv_tokens: int
    """That the cache holds; 0 where not even the weights fit."""

    @property
    def fits(self) -> bool:
        return self.kv_tokens >= self.context

    @property
    def users(self) -> int:
        return min(self.kv_tokens // self.context, self.machine.max_seqs)

    def slots(self, tokens: float) -> int:
        """Sequences of `tokens` each that run at once."""
        return max(1, min(int(self.kv_tokens / max(tokens, 1.0)), self.machine.max_seqs))

    def prefill_seconds(self, tokens: int) -> float:
        """Time to the first token of a prompt on an idle machine."""
        work = self._operations(tokens, tokens / 2)
        return self._step(work, self._read) + self.machine.efficiency.sequence_overhead_s

    def step_seconds(self, batch: int, context: float) -> float:
        """One step of decoding: each of `batch` sequences, of `context` tokens each, gets a token."""
        read = self._read + batch * context * self.kv_per_token
        overhead = batch * self.machine.efficiency.sequence_overhead_s
        return self._step(self._operations(batch, context, heads=batch), read) + overhead

    def tokens_per_second(self, batch: int, context: float) -> float:
        return batch / self.step_seconds(batch, context)

    @property
    def _read(self) -> float:
        """Weights that a step reads: an embedding that isn't the head is only looked up in."""
        spared = 0 if self.shape.tied_head else self.shape.table_parameters
        return self.weights - spared * self.precision.table_bits / 8

    def _operations(self, tokens: float, seen: float, heads: float = 1.0) -> float:
        """Multiplications and additions for `tokens` that each attend to `seen`; `heads` of them get logits."""
        shape = self.shape
        attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * seen
        return tokens * (2 * shape.block_parameters + attention) + heads * 2 * shape.table_parameters

    def _step(self, operations: float, read: float) -> float:
        computing, reading = operations / self.machine.flops(self.precision), read / self.machine.bytes_per_s
        efficiency = self.machine.efficiency
        together = max(computing, reading) if efficiency.overlaps else computing + reading
        return together + efficiency.step_overhead_s + (self.machine.count - 1) * efficiency.stage_s


def fit(shape: Shape, precision: Precision, context: int | None, machine: Machine) -> Fit:
    """How `shape` stands on `machine`; without a `context`, the model's own. Raises InvalidInput naming the field."""
    length = shape.max_model_len if context is None else context
    if not 0 < length <= shape.max_model_len:
        raise InvalidInput(
            f"context must lie between 1 and the model's {shape.max_model_len} tokens, not {length}", param="context"
        )
    if precision is Precision.PACKED and machine.accelerator.kind != "cpu":
        raise InvalidInput(f"precision packed runs on CPUs, not on {machine.accelerator.name}", param="precision")
    tables = shape.parameters - shape.block_parameters
    weights = (shape.block_parameters * precision.block_bits + tables * precision.table_bits) / 8
    per_token = shape.kv_values() * precision.cache_bytes
    room = max(0, int((machine.memory - weights) / per_token))
    kept = room if machine.kv_tokens is None else min(room, machine.kv_tokens)
    return Fit(machine, shape, precision, length, weights, per_token, kept)


def machines(catalogue: Catalogue, counts: Iterable[int] | None = None) -> list[Machine]:
    """Every machine of the catalogue, with the counts that are allowed."""
    allowed = None if counts is None else set(counts)
    return [
        Machine(one, count, catalogue.efficiency[one.kind])
        for one, count in catalogue.sizes()
        if allowed is None or count in allowed
    ]


def nearest(shape: Shape, precision: Precision, context: int, among: Iterable[Machine]) -> Machine | None:
    """The fewest GPUs, and of those the ones with the least memory, that `shape` fits."""
    fitting = [one for one in among if one.accelerator.kind == "gpu" and fit(shape, precision, context, one).fits]
    return min(
        fitting, key=lambda one: (one.count, one.memory, one.accelerator.price_per_hour or float("inf")), default=None
    )
