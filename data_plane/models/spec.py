"""The shape of a decoder-only model, whatever file it came from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from data_plane.errors import ModelUnreadable, UnsupportedModel

MOST_LAYERS = 1 << 12
_MOST = {
    "hidden_size": 1 << 20,
    "num_layers": MOST_LAYERS,
    "num_heads": 1 << 12,
    "num_kv_heads": 1 << 12,
    "head_dim": 1 << 12,
    "intermediate_size": 1 << 22,
    "vocab_size": 1 << 24,
    "max_model_len": 1 << 24,
}


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: `rotary_dim` leading dimensions turn, by `theta`, stretched as `kind` says.

    kind is one of none, linear, llama3, yarn. `frequency_divisors` (GGUF's rope_freqs) divides each frequency.
    """

    theta: float = 10000.0
    rotary_dim: int = 64
    kind: str = "none"
    factor: float = 1.0
    original_max_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    frequency_divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("none", "linear", "llama3", "yarn"):
            raise UnsupportedModel(
                f"RoPE scaling {self.kind!r} is not supported; none, linear, llama3 and yarn are: choose another model"
            )
        if self.rotary_dim <= 0 or self.rotary_dim % 2:
            raise ModelUnreadable(f"the model rotates {self.rotary_dim} dimensions of a head; fetch it again")
        positive = [self.theta, self.factor, *self.frequency_divisors]
        if self.kind in ("llama3", "yarn"):
            positive += [
                self.original_max_len,
                self.beta_fast,
                self.beta_slow,
                self.high_freq_factor - self.low_freq_factor,
            ]
        if not all(0 < value < math.inf for value in positive) or self.theta == 1:
            raise ModelUnreadable("the model's RoPE settings are no positive numbers; fetch it again")
        if self.frequency_divisors and len(self.frequency_divisors) != self.rotary_dim // 2:
            raise ModelUnreadable(f"{len(self.frequency_divisors)} RoPE divisors for {self.rotary_dim} dimensions")


@dataclass(frozen=True)
class ModelSpec:
    """Sizes and switches of a Llama-family decoder.

    `windows` holds a sliding-window length for each layer, 0 where attention sees everything.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    max_model_len: int
    rope: RopeSpec
    tied_head: bool
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = field(default=())
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            if not 0 < value <= most:
                raise ModelUnreadable(f"the model's {name} is {value}, which no model has; fetch it again")
        if self.num_heads % self.num_kv_heads:
            raise ModelUnreadable(f"{self.num_heads} query heads do not share {self.num_kv_heads} key heads evenly")
        if not 0 <= self.norm_eps < math.inf:
            raise ModelUnreadable(f"the model's norm epsilon is {self.norm_eps}; fetch it again")
        if self.rope.rotary_dim > self.head_dim:
            raise ModelUnreadable(f"the model rotates {self.rope.rotary_dim} dimensions of heads of {self.head_dim}")
        if self.windows and len(self.windows) != self.num_layers:
            raise ModelUnreadable(f"{len(self.windows)} attention windows for {self.num_layers} layers")

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight, by its name in `loading.checkpoint`."""
        part, kind = name.split(".")[-2:]
        attention, shared = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        vectors = dict.fromkeys(("norm", "attn_norm", "mlp_norm"), self.hidden_size)
        vectors |= dict.fromkeys(("q_norm", "k_norm"), self.head_dim)
        if part in vectors:
            return (vectors[part],)
        matrices = {
            "embed": (self.vocab_size, self.hidden_size),
            "head": (self.vocab_size, self.hidden_size),
            "q": (attention, self.hidden_size),
            "k": (shared, self.hidden_size),
            "v": (shared, self.hidden_size),
            "o": (self.hidden_size, attention),
            "gate": (self.intermediate_size, self.hidden_size),
            "up": (self.intermediate_size, self.hidden_size),
            "down": (self.hidden_size, self.intermediate_size),
        }
        return matrices[part] if kind == "weight" else matrices[part][:1]

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value
