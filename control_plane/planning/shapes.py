"""Sizes of a model, as far as memory and time follow from them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from control_plane.config import describe_validation
from control_plane.errors import InvalidInput

Size = Annotated[int, Field(gt=0, le=1 << 24)]
_FIELDS = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size",
           "max_model_len")  # fmt: skip


class Shape(BaseModel):
    """A decoder of the Llama family. Field names are those that `ingle model inspect -o json` prints."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    num_layers: Size
    hidden_size: Size
    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    intermediate_size: Size
    vocab_size: Size
    max_model_len: Size
    tied_head: bool = False

    @property
    def block_parameters(self) -> int:
        """Of all layers, without embedding and head."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def table_parameters(self) -> int:
        """Of the embedding; the head has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        return self.block_parameters + self.table_parameters * (1 if self.tied_head else 2)

    def kv_values(self) -> int:
        """Numbers that the cache keeps for each token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def parse_shape(text: str, where: str) -> Shape:
    """What `ingle model inspect -o json` printed. Raises InvalidInput naming the field."""
    try:
        return Shape.model_validate_json(text)
    except ValidationError as error:
        raise InvalidInput(f"{where}: {describe_validation(error)}", param="shape") from None


@cache
def known_shapes() -> Mapping[str, Shape]:
    """By lower-case name."""
    table: dict[str, Any] = tomllib.loads(files("control_plane.planning").joinpath("models.toml").read_text("utf-8"))
    found = {}
    for name, entry in table.items():
        shape = Shape(**dict(zip(_FIELDS, entry["shape"], strict=True)), tied_head=entry.get("tied", False))
        for one in (name, *entry.get("aliases", ())):
            found[one.lower()] = shape
    return found


def known_shape(model: str) -> Shape | None:
    return known_shapes().get(model.lower())
