"""Reading `tools`, `tool_choice` and `response_format`: what a reply is bound to."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from data_plane.api.fields import Fields
from data_plane.api.parameters import Flag
from data_plane.errors import RequestError
from data_plane.text import grammars
from data_plane.text.tool_calls import Dialect

MOST_TOOLS = 128
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
PARALLEL = Flag("parallel_tool_calls", default=True)


@dataclass(frozen=True)
class ToolUse:
    """What the request says of tools.

    functions: {"name", "description", "parameters"} each; choice: none, auto, required, or a function's name.
    """

    functions: list[dict[str, Any]] = field(default_factory=list)
    choice: str = "none"
    parallel: bool = True

    @property
    def active(self) -> bool:
        return bool(self.functions) and self.choice != "none"

    @property
    def forced(self) -> bool:
        return self.active and self.choice != "auto"

    @property
    def many(self) -> bool:
        """Whether there may be several calls; a function that was named is called once."""
        return self.parallel and self.choice in ("auto", "required")

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function["name"] for function in self.allowed)

    @property
    def allowed(self) -> list[dict[str, Any]]:
        if self.choice in ("none", "auto", "required"):
            return self.functions
        return [function for function in self.functions if function["name"] == self.choice]

    def as_tools(self) -> list[dict[str, Any]]:
        """In OpenAI's chat shape, as templates expect them."""
        return [{"type": "function", "function": function} for function in self.functions]


def read_tools(fields: Fields) -> ToolUse:
    """Raises RequestError naming the field that is off."""
    value = fields.raw("tools")
    functions = []
    if value is not None:
        if not isinstance(value, list):
            raise RequestError("tools must be an array", param="tools")
        if len(value) > MOST_TOOLS:
            raise RequestError(f"tools must hold at most {MOST_TOOLS} entries, not {len(value)}", param="tools")
        functions = [read_function(tool, f"tools[{place}]") for place, tool in enumerate(value)]
        names = [function["name"] for function in functions]
        if len(set(names)) < len(names):
            raise RequestError("tools must have different names", param="tools")
    choice = _choice(fields, {function["name"] for function in functions})
    return ToolUse(functions, choice, PARALLEL.read(fields))


def read_function(tool: Any, where: str) -> dict[str, Any]:
    """A function tool in chat's nested shape or in Responses' flat one."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise RequestError(f"{where} must be an object of type function", param=where)
    function = tool.get("function", tool)
    if not isinstance(function, dict):
        raise RequestError(f"{where}.function must be an object", param=f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(f"{where}: name must be 1 to 64 letters, digits, _ or -", param=where)
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise RequestError(f"{where}: parameters must be a JSON schema", param=where)
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise RequestError(f"{where}: description must be a string", param=where)
    return {"name": name, "description": description or "", "parameters": parameters}


def _choice(fields: Fields, names: set[str]) -> str:
    value = fields.raw("tool_choice")
    if value is None:
        return "auto" if names else "none"
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise RequestError("tool_choice must be none, auto, required or a function", param="tool_choice")
        if value == "required" and not names:
            raise RequestError("tool_choice is required, but there are no tools", param="tool_choice")
        return value
    function = value.get("function", value) if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestError("tool_choice must be none, auto, required or a function", param="tool_choice")
    if name not in names:
        raise RequestError(f"tool_choice names {name!r}, which is not in tools", param="tool_choice")
    return name


def calls_grammar(use: ToolUse, dialect: Dialect, opening_id: int | None) -> str:
    """The grammar of a reply that must call. `opening_id`: the opening's token where it is a control token."""
    opening = f"<[{opening_id}]>" if opening_id is not None else f'"{dialect.opening}"'
    many = use.many and not dialect.bare
    grammar = grammars.calls_grammar(
        use.allowed,
        "" if dialect.bare else opening,
        f'"{dialect.closing}"' if dialect.closing else "",
        dialect.arguments_key,
        many and bool(dialect.closing),
    )
    return grammars.validate(grammar, "tools")


def constrained(fields: Fields) -> bool:
    """Whether `read_grammar` has anything to compile."""
    if fields.has("regex") or fields.has("grammar"):
        return True
    return fields.has("response_format") and fields.raw("response_format") != {"type": "text"}


def read_grammar(fields: Fields) -> str:
    """The grammar that `response_format`, `regex` or `grammar` asks for, or an empty string. At most one may."""
    found = [name for name in ("response_format", "regex", "grammar") if fields.has(name)]
    if len(found) > 1 and not (len(found) == 2 and fields.raw("response_format") == {"type": "text"}):
        raise RequestError(f"{' and '.join(found)} exclude each other", param=found[1])
    if fields.has("regex"):
        return grammars.validate(grammars.from_regex(fields.raw("regex"), "regex"), "regex")
    if fields.has("grammar"):
        return grammars.validate(grammars.from_lark(fields.raw("grammar"), "grammar"), "grammar")
    return format_grammar(fields.raw("response_format"), "response_format", nested=True)


def format_grammar(value: Any, param: str, *, nested: bool) -> str:
    """nested: the schema lies under `json_schema` (chat), not beside `type` (Responses)."""
    if value is None:
        return ""
    if not isinstance(value, dict):
        raise RequestError(f"{param} must be an object", param=param)
    kind = value.get("type")
    if kind == "text":
        return ""
    if kind == "json_object":
        return grammars.validate(grammars.from_json_schema({"type": "object"}, param), param)
    if kind != "json_schema":
        raise RequestError(f"{param}.type must be text, json_object or json_schema", param=f"{param}.type")
    where = f"{param}.json_schema" if nested else param
    inner = value.get("json_schema") if nested else value
    if not isinstance(inner, dict):
        raise RequestError(f"{where} must be an object with name and schema", param=where)
    name = inner.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(f"{where}.name must be 1 to 64 letters, digits, _ or -", param=f"{where}.name")
    strict = inner.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(f"{where}.strict must be true or false", param=f"{where}.strict")
    schema = inner.get("schema")
    if not isinstance(schema, dict):
        raise RequestError(f"{where}.schema must be a JSON schema", param=f"{where}.schema")
    if not schema or (strict and schema.get("type") != "object"):
        raise RequestError(f'{where}.schema must say "type": "object" at its root', param=f"{where}.schema")
    return grammars.validate(grammars.from_json_schema(schema, f"{where}.schema"), f"{where}.schema")
