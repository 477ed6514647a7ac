"""Reads a model's own settings (GGUF fields, config.json): each has its type and bounds, or a clear error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from data_plane.errors import ModelUnreadable

_MOST = 1 << 28


class Settings:
    """A mapping that came with a model. Every getter raises ModelUnreadable naming `where` and the key.

    `prefix` goes before each key. A key that is absent or null has the default; without a default it must be there.
    """

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self._values = values
        self._where = where
        self._prefix = prefix

    def integer(self, key: str, default: int | None = None, *, low: int = 0, high: int = _MOST) -> int:
        value = self._get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._wrong(key, f"a whole number from {low} to {high}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(key, "a number", value)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a text", value)
        return value

    def texts(self, key: str, default: list[str] | None = None) -> list[str]:
        value = self._get(key, default)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of texts", value)
        return value

    def numbers(self, key: str, default: list[float]) -> list[float]:
        value = self._get(key, default)
        if not isinstance(value, list) or not all(isinstance(item, int | float) for item in value):
            raise self._wrong(key, "a list of numbers", value)
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id or a list of them; empty where the key is absent."""
        value = self._get(key, ())
        ids = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < _MOST for id in ids):
            raise self._wrong(key, "token ids", value)
        return tuple(ids)

    def part(self, key: str) -> Settings:
        """The settings under a key; empty where it is absent."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, "an object", value)
        return Settings(value, f"{self._where}: {key}")

    def has(self, key: str) -> bool:
        return self._values.get(self._prefix + key) is not None

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(self._prefix + key)
        if value is None:
            value = default
        if value is None:
            raise ModelUnreadable(f"{self._where} lacks {self._prefix}{key}; fetch the model again")
        return value

    def _wrong(self, key: str, wanted: str, value: Any) -> ModelUnreadable:
        found = repr(value)
        shown = found if len(found) <= 40 else f"{found[:40]}…"
        return ModelUnreadable(f"{self._where}: {self._prefix}{key} is {shown}, not {wanted}; fetch the model again")
