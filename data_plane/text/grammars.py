"""What a reply must look like, as a grammar for the engine: JSON schemas, regular expressions, Lark, and tool calls.

Checked here, at the edge and off the event loop, with bounds on size, depth and work; the engine compiles it once more,
and its masks come from the same library (llguidance).
"""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from data_plane.errors import RequestError

MOST_BYTES = 64 << 10
MOST_DEPTH = 40
MOST_CALLS = 16


def limits() -> LLParserLimits:
    """Bounds on the work of one grammar: it fails rather than hold up the engine."""
    return LLParserLimits(
        initial_lexer_fuel=2_000_000,
        step_lexer_fuel=500_000,
        step_max_items=100_000,
        max_lexer_states=250_000,
        max_grammar_size=500_000,
    )


def from_json_schema(schema: dict[str, Any], param: str) -> str:
    """Compact JSON that is valid for the schema."""
    _check_size(schema, param)
    try:
        return LLMatcher.grammar_from_json_schema(closed(schema), overrides={"whitespace_flexible": False})
    except ValueError as error:
        raise RequestError(f"{param} is not a usable JSON schema: {error}", param=param) from error


def from_regex(pattern: str, param: str) -> str:
    _check_text(pattern, param)
    return LLMatcher.grammar_from_regex(pattern)


def from_lark(grammar: str, param: str) -> str:
    _check_text(grammar, param)
    return LLMatcher.grammar_from_lark(grammar)


def validate(grammar: str, param: str) -> str:
    """Return the grammar; raise RequestError naming `param` when the library refuses it. May take a while."""
    complaint = LLMatcher.validate_grammar(grammar, limits=limits())
    if complaint and not complaint.startswith("WARNING"):
        raise RequestError(f"{param} cannot be compiled: {_one_line(complaint)}", param=param)
    return grammar


def calls_grammar(tools: list[dict[str, Any]], opening: str, closing: str, arguments_key: str, many: bool) -> str:
    """One or more calls, each `opening` {"name": …, arguments_key: …} `closing`, with arguments valid for their tool.

    tools: {"name", "parameters"}; opening and closing: Lark terms, such as `"<tool_call>"`, or empty.
    """
    variants = [
        {
            "type": "object",
            "properties": {"name": {"const": tool["name"]}, arguments_key: closed(tool["parameters"])},
            "required": ["name", arguments_key],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schema = json.dumps({"anyOf": variants, "x-guidance": {"whitespace_flexible": False}})
    repeat = f'("\\n" call){{0,{MOST_CALLS - 1}}}' if many else ""
    return LLMatcher.grammar_from_lark(
        f"start: call {repeat}\ncall: {opening} object {closing}\nobject: %json {schema}\n"
    )


def closed(schema: Any) -> Any:
    """The schema with objects closed that list their properties and do not say: small models else invent more and more.

    What it allows, the given schema allows too.
    """
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: value if key in ("const", "enum", "default", "examples") else closed(value)
             for key, value in schema.items()}  # fmt: skip
    composed = any(key in schema for key in ("allOf", "anyOf", "oneOf", "$ref", "patternProperties", "if"))
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema and not composed:
        inner["additionalProperties"] = False
    return inner


def _check_text(text: str, param: str) -> None:
    if not isinstance(text, str) or not text:
        raise RequestError(f"{param} must be a non-empty string", param=param)
    if len(text.encode()) > MOST_BYTES:
        raise RequestError(f"{param} must be at most {MOST_BYTES} bytes", param=param)


def _check_size(schema: dict[str, Any], param: str) -> None:
    if len(json.dumps(schema)) > MOST_BYTES:
        raise RequestError(f"{param} must be at most {MOST_BYTES} bytes of JSON", param=param)
    level: list[Any] = [schema]
    for _ in range(MOST_DEPTH):
        level = [
            item
            for value in level
            for item in (value.values() if isinstance(value, dict) else value)
            if isinstance(item, dict | list)
        ]
        if not level:
            return
    raise RequestError(f"{param} must be nested at most {MOST_DEPTH} deep", param=param)


def _one_line(complaint: str) -> str:
    return " ".join(complaint.split())[:300]
