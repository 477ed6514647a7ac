"""From messages and tools to prompt tokens, and to how the reply will be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from data_plane.api.context import ALWAYS, Replica
from data_plane.api.fields import Fields
from data_plane.api.pipeline import Reading
from data_plane.api.tools import ToolUse, calls_grammar
from data_plane.errors import RequestError
from data_plane.text import reasoning, tool_calls
from data_plane.text.chat_template import ChatTemplate
from data_plane.text.grammars import MOST_CALLS

MOST_VARIABLES = 16
OURS = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True)
class Conversation:
    tokens: list[int]
    reading: Reading
    grammar: str


def read_variables(fields: Fields) -> dict[str, Any]:
    """What a template may be told besides messages: `reasoning_effort`, and `chat_template_kwargs` as an extension."""
    value = fields.raw("chat_template_kwargs")
    if value is not None and (not isinstance(value, dict) or len(value) > MOST_VARIABLES):
        raise RequestError(
            f"chat_template_kwargs must be an object of at most {MOST_VARIABLES} entries", param="chat_template_kwargs"
        )
    variables = dict(value or {})
    for name, item in variables.items():
        if name in OURS:
            raise RequestError(
                f"chat_template_kwargs.{name} is set by the request itself", param="chat_template_kwargs"
            )
        if not isinstance(item, bool | int | float | str):
            raise RequestError(
                f"chat_template_kwargs.{name} must be a string, number or boolean", param="chat_template_kwargs"
            )
    return effort_variables(fields.raw("reasoning_effort"), "reasoning_effort") | variables


def effort_variables(effort: Any, param: str) -> dict[str, Any]:
    """What templates that reason are told of how much to."""
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise RequestError(f"{param} must be one of {', '.join(EFFORTS)}", param=param)
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


async def converse(
    replica: Replica,
    messages: list[dict[str, Any]],
    use: ToolUse,
    variables: dict[str, Any],
    bound: Callable[[], str] | None,
    bound_by: str,
    param: str,
) -> Conversation:
    """Render, tokenize and check the conversation; compile what binds the reply. Long work runs off the event loop.

    bound: makes the grammar of the reply's format, which `bound_by` asked for; param: the field the messages came in.
    """
    template = replica.template
    if template is None:
        raise RequestError("this model has no chat template; use /v1/completions", param=param)
    if use.forced and bound is not None:
        raise RequestError(f"{bound_by} and a forced tool call exclude each other", param=bound_by)
    shown = _shown(messages, use, template)
    known = {name: value for name, value in variables.items() if name in template.variables}
    size = 0
    for message in shown:
        replica.check_characters(message["content"], param)
        size += len(message["content"])
    tools = use.as_tools() if use.active and template.knows_tools else None

    def prepare() -> tuple[list[int], str]:
        tokens = template.tokens(shown, tools=tools, **known)
        replica.check_prompt(tokens, param)
        if use.forced:
            return tokens, calls_grammar(use, template.dialect, _control(template, template.dialect.opening))
        return tokens, bound() if bound is not None else ""

    heavy = use.forced or bound is not None or template.slow
    tokens, grammar = await replica.off_loop(ALWAYS if heavy else size, prepare)
    return Conversation(tokens, _reading(replica, template, use, tokens), grammar)


def _control(template: ChatTemplate, text: str) -> int | None:
    """The id of a mark that is one control token, which no grammar can spell."""
    return template.tokenizer.id_of(text) if text in template.tokenizer.tokens.control else None


def _reading(replica: Replica, template: ChatTemplate, use: ToolUse, prompt: list[int]) -> Reading:
    tokenizer = replica.tokenizer
    opening = tokenizer.id_of(reasoning.OPEN)
    inside = opening is not None and opening in prompt[-3:]
    reasons = opening is not None and not use.forced
    if not use.active:
        return Reading(reasons=reasons, begins_inside=inside)
    dialect = template.dialect
    mark = _control(template, dialect.opening)
    return Reading(
        dialect=dialect,
        tools=use.names,
        most_calls=MOST_CALLS if use.many else 1,
        reasons=reasons,
        begins_inside=inside,
        shown={} if mark is None else {mark: dialect.opening.encode()},
    )


def _shown(messages: list[dict[str, Any]], use: ToolUse, template: ChatTemplate) -> list[dict[str, Any]]:
    """The messages as the template can show them: one that knows no tools gets them, calls and results as text."""
    if template.knows_tools:
        return messages
    shown = [_as_text(message) for message in messages]
    if use.active:
        told = tool_calls.describe(use.functions, use.forced)
        if shown[0]["role"] == "system":
            shown[0] = {"role": "system", "content": f"{shown[0]['content']}\n\n{told}"}
        else:
            shown.insert(0, {"role": "system", "content": told})
    return shown


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>{content}</tool_response>"}
    calls = [tool_calls.written(**call["function"]) for call in message.get("tool_calls", [])]
    return {"role": message["role"], "content": "\n".join([part for part in (content, *calls) if part])}
