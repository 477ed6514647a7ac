"""BERT-style encoders (as sentence-transformers publishes them): one vector for a text.

Devlin et al., 2018; mean pooling and unit length after Reimers and Gurevych, 2019.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file

from data_plane.errors import ModelUnreadable, UnsupportedModel
from data_plane.loading.files import read_json
from data_plane.loading.settings import Settings

Array = np.ndarray[Any, Any]
_ACTIVATIONS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}


@dataclass(frozen=True)
class EncoderSpec:
    """Sizes of an encoder. pooling: mean or cls; max_len counts the marks at both ends."""

    hidden_size: int
    num_layers: int
    num_heads: int
    vocab_size: int
    max_len: int
    norm_eps: float
    gelu: str
    pooling: str


class BertEncoder:
    """Weights on one device in float32."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.spec = _spec(folder)
        self._device = device
        try:
            weights = load_file(str(folder / "model.safetensors"), device=str(device))
        except (SafetensorError, OSError) as error:
            raise ModelUnreadable(f"{folder}/model.safetensors cannot be read ({error}); fetch it again") from error
        self._weights: dict[str, torch.Tensor] = {
            name.removeprefix("bert."): weight.float() for name, weight in weights.items() if weight.is_floating_point()
        }
        wanted = (self.spec.vocab_size, self.spec.hidden_size)
        found = tuple(self._get("embeddings.word_embeddings.weight").shape)
        if found != wanted:
            raise ModelUnreadable(f"{folder}: the word embeddings are {found}, not {wanted}; fetch it again")

    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self._weights.values())

    def release(self) -> None:
        """Move the weights to host memory, where they aren't there."""
        self._weights = {name: weight.cpu() for name, weight in self._weights.items()}

    def restore(self) -> None:
        """Move them back."""
        self._weights = {name: weight.to(self._device) for name, weight in self._weights.items()}

    @torch.inference_mode()
    def encode(self, texts: list[list[int]]) -> Array:
        """float32 [texts, hidden], each of length one. Texts are padded to the longest."""
        longest = max(map(len, texts))
        ids = torch.zeros((len(texts), longest), dtype=torch.int64)
        seen = torch.zeros((len(texts), longest), dtype=torch.bool)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
            seen[row, : len(text)] = True
        hidden = self._forward(ids.to(self._device), seen.to(self._device))
        if self.spec.pooling == "cls":
            pooled = hidden[:, 0]
        else:
            kept = seen.to(self._device).unsqueeze(2)
            pooled = (hidden * kept).sum(dim=1) / kept.sum(dim=1)
        vectors: Array = F.normalize(pooled, dim=1).cpu().numpy()
        return vectors

    def _forward(self, ids: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        spec = self.spec
        table = "embeddings."
        x = F.embedding(ids, self._get(table + "word_embeddings.weight"))
        x = x + self._get(table + "position_embeddings.weight")[: ids.shape[1]]
        x = x + self._get(table + "token_type_embeddings.weight")[0]
        x = self._norm(x, table + "LayerNorm")
        mask = seen[:, None, None, :]
        heads, width = spec.num_heads, spec.hidden_size // spec.num_heads
        for index in range(spec.num_layers):
            layer = f"encoder.layer.{index}."

            def split(name: str, x: torch.Tensor = x, layer: str = layer) -> torch.Tensor:
                projected = self._linear(x, f"{layer}attention.self.{name}")
                return projected.view(*x.shape[:2], heads, width).transpose(1, 2)

            attended = F.scaled_dot_product_attention(
                split("query"), split("key"), split("value"), mask, scale=1 / math.sqrt(width)
            )
            attended = attended.transpose(1, 2).reshape(x.shape)
            x = self._norm(
                x + self._linear(attended, layer + "attention.output.dense"), layer + "attention.output.LayerNorm"
            )
            inner = F.gelu(self._linear(x, layer + "intermediate.dense"), approximate=spec.gelu)
            x = self._add_norm(x, inner, layer + "output")
        return x

    def _add_norm(self, x: torch.Tensor, inner: torch.Tensor, name: str) -> torch.Tensor:
        return self._norm(x + self._linear(inner, f"{name}.dense"), f"{name}.LayerNorm")

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        projected: torch.Tensor = F.linear(x, self._get(f"{name}.weight"), self._get(f"{name}.bias"))
        return projected

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = self._get(f"{name}.weight"), self._get(f"{name}.bias")
        normed: torch.Tensor = F.layer_norm(x, (self.spec.hidden_size,), weight, bias, self.spec.norm_eps)
        return normed

    def _get(self, name: str) -> torch.Tensor:
        if name not in self._weights:
            raise ModelUnreadable(f"the encoder lacks tensor {name}; fetch it again")
        return self._weights[name]


def _spec(folder: Path) -> EncoderSpec:
    where = str(folder / "config.json")
    config = Settings(read_json(folder / "config.json"), where)

    def size(key: str) -> int:
        return config.integer(key, low=1, high=1 << 20)

    activation = config.text("hidden_act", "gelu")
    if activation not in _ACTIVATIONS or config.text("position_embedding_type", "absolute") != "absolute":
        raise UnsupportedModel(f"{folder}: only encoders with gelu and absolute positions are supported")
    pooling = folder / "1_Pooling" / "config.json"
    settings = read_json(pooling) if pooling.exists() else {}
    kind = "cls" if settings.get("pooling_mode_cls_token") else "mean"
    if size("hidden_size") % size("num_attention_heads"):
        raise ModelUnreadable(f"{where}: {size('num_attention_heads')} heads do not share the hidden size evenly")
    return EncoderSpec(
        hidden_size=size("hidden_size"),
        num_layers=size("num_hidden_layers"),
        num_heads=size("num_attention_heads"),
        vocab_size=size("vocab_size"),
        max_len=size("max_position_embeddings"),
        norm_eps=config.number("layer_norm_eps", 1e-12),
        gelu=_ACTIVATIONS[activation],
        pooling=kind,
    )
