"""Reading a JSON body field by field: every refusal names its field, and nothing is coerced."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from data_plane.errors import RequestError


class Fields:
    """A request body. Absent and null are the same: the default."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body

    @staticmethod
    def parse(raw: bytes) -> Fields:
        try:
            body = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RequestError("the body is not valid JSON") from error
        if not isinstance(body, dict):
            raise RequestError("the body must be a JSON object")
        return Fields(body)

    def only(self, *names: str) -> Fields:
        """The body as if it held nothing else."""
        return Fields({name: value for name, value in self._body.items() if name in names})

    def raw(self, name: str) -> Any:
        return self._body.get(name)

    def has(self, name: str) -> bool:
        return self._body.get(name) is not None

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self._body.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong(name, "a number", value)
        if not (math.isfinite(value) and low <= value <= high):
            raise RequestError(f"{name} must be between {low:g} and {high:g}, not {value}", param=name)
        return float(value)

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        found = self.optional_integer(name, low, high)
        return default if found is None else found

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        value = self._body.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise _wrong(name, "an integer", value)
        if not low <= value <= high:
            raise RequestError(f"{name} must be between {low} and {high}, not {value}", param=name)
        return value

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self._body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise _wrong(name, "true or false", value)
        return value

    def string(self, name: str) -> str:
        value = self._body.get(name)
        if not isinstance(value, str) or not value:
            raise _wrong(name, "a non-empty string", value)
        return value

    def optional_string(self, name: str) -> str | None:
        value = self._body.get(name)
        if value is not None and not isinstance(value, str):
            raise _wrong(name, "a string", value)
        return value

    def refuse(self, name: str, allowed: tuple[Any, ...], why: str) -> None:
        """Refuse a field that we know but cannot honour, unless its value asks for nothing."""
        value = self._body.get(name)
        if value is not None and value not in allowed:
            raise RequestError(why, param=name, code="unsupported_parameter")


def _wrong(name: str, wanted: str, value: object) -> RequestError:
    found = {type(None): "missing", bool: "a boolean", int: "an integer", float: "a number", str: "a string",
             list: "an array", dict: "an object"}  # fmt: skip
    return RequestError(f"{name} must be {wanted}, not {found.get(type(value), 'something else')}", param=name)
