"""Plain fields of a request as values: what reads and bounds a field is also what the OpenAPI document says of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from data_plane.api.fields import Fields

Schema = dict[str, Any]


class Bound(Enum):
    """A bound that depends on the model."""

    CONTEXT = "tokens of the model's context"
    VOCABULARY = "entries of the model's vocabulary"


@dataclass(frozen=True)
class ModelLimits:
    """What the engine said of itself when it became ready."""

    max_model_len: int
    vocab_size: int

    def of(self, bound: int | Bound) -> int:
        if isinstance(bound, int):
            return bound
        return self.max_model_len if bound is Bound.CONTEXT else self.vocab_size


@dataclass(frozen=True)
class Number:
    name: str
    default: float
    low: float
    high: float

    def read(self, fields: Fields) -> float:
        return fields.number(self.name, self.default, self.low, self.high)

    def schema(self, limits: ModelLimits | None) -> Schema:
        return {"type": ["number", "null"], "minimum": self.low, "maximum": self.high, "default": self.default}


@dataclass(frozen=True)
class OptionalInteger:
    """Absent is told from any number."""

    name: str
    low: int
    high: int | Bound

    def read(self, fields: Fields, limits: ModelLimits) -> int | None:
        return fields.optional_integer(self.name, self.low, limits.of(self.high))

    def schema(self, limits: ModelLimits | None) -> Schema:
        """Without `limits` (of no model in particular) a bound that depends on the model is told in words."""
        schema: Schema = {"type": ["integer", "null"], "minimum": self.low}
        if isinstance(self.high, int):
            return {**schema, "maximum": self.high}
        if limits is None:
            return {**schema, "description": f"at most the {self.high.value}"}
        return {**schema, "maximum": limits.of(self.high)}


@dataclass(frozen=True)
class Integer:
    name: str
    default: int
    low: int
    high: int | Bound

    def read(self, fields: Fields, limits: ModelLimits) -> int:
        return fields.integer(self.name, self.default, self.low, limits.of(self.high))

    def schema(self, limits: ModelLimits | None) -> Schema:
        return {**OptionalInteger(self.name, self.low, self.high).schema(limits), "default": self.default}


@dataclass(frozen=True)
class Flag:
    name: str
    default: bool = False

    def read(self, fields: Fields) -> bool:
        return fields.boolean(self.name, self.default)

    def schema(self, limits: ModelLimits | None) -> Schema:
        return {"type": ["boolean", "null"], "default": self.default}


Parameter = Number | Integer | OptionalInteger | Flag
