"""Tool calls in a model's text: how they are asked for, written in a prompt, and found again in a reply.

A dialect is what a family was trained on. A template that knows no tools gets the generic one: the tools are described
in the system message, calls look as in the Hermes dialect, and the grammar keeps them valid.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Dialect:
    """A call is `opening` JSON `closing`; `arguments_key` names its arguments. An empty closing means: to the end.

    `listed`: the JSON is an array of calls. `bare`: a reply that begins with an object is a call, without an opening.
    """

    name: str
    opening: str
    closing: str
    arguments_key: str = "arguments"
    listed: bool = False
    bare: bool = False


HERMES = Dialect("hermes", "<tool_call>", "</tool_call>")
MISTRAL = Dialect("mistral", "[TOOL_CALLS]", "", listed=True)
LLAMA3 = Dialect("llama3", "<|python_tag|>", "", arguments_key="parameters", bare=True)
GENERIC = Dialect("generic", "<tool_call>", "</tool_call>")


def dialect_of(template_source: str, knows_tools: bool) -> Dialect:
    """The dialect that a chat template speaks, by the marks it writes."""
    if not knows_tools:
        return GENERIC
    if "[TOOL_CALLS]" in template_source:
        return MISTRAL
    if "<tool_call>" in template_source:
        return HERMES
    if "<|python_tag|>" in template_source or "ipython" in template_source:
        return LLAMA3
    return HERMES


@dataclass(frozen=True)
class Call:
    """One call as the model wrote it; `arguments` is JSON text, cut short if the reply was."""

    name: str
    arguments: str


class ToolCallParser:
    """Feed text, get what is plain text and what is a call. Linear: a character is looked at a bounded number of times.

    What was opened but is no call in the end comes out as the text that it was.
    """

    def __init__(self, dialect: Dialect, names: frozenset[str], most_calls: int) -> None:
        self._dialect = dialect
        self._names = names
        self._left = most_calls
        self._held: list[str] = []
        self._inside = self._in_string = False
        self._marks = re.compile(r'\\.|"|' + re.escape(dialect.closing), re.DOTALL)
        self._tail = ""
        self._begun = self._after_call = False
        self.calls = 0
        self.repeats = False
        self._seen: set[Call] = set()

    def feed(self, text: str) -> tuple[str, list[Call]]:
        """What may be shown now, and the calls that ended."""
        shown: list[str] = []
        calls: list[Call] = []
        self._tail += text
        while self._tail:
            before = len(self._tail)
            self._advance(shown, calls)
            if len(self._tail) == before:
                break
        return "".join(shown), calls

    def finish(self) -> tuple[str, list[Call]]:
        """The end of the reply: what is still held becomes a call or text."""
        if not self._inside:
            rest, self._tail = self._tail, ""
            return self._visible(rest), []
        body = "".join(self._held) + self._tail
        self._held, self._tail, self._inside = [], "", False
        calls = self._calls(body) or self._cut_call(body)
        if calls:
            return "", self._count(calls)
        return ("" if self._dialect.bare and not body else self._opening_text() + body), []

    def _advance(self, shown: list[str], calls: list[Call]) -> None:
        dialect = self._dialect
        if self._inside:
            if not dialect.closing:
                self._hold(self._tail)
                self._tail = ""
                return
            at = self._closing_at()
            if at < 0:
                keep = overlap(self._tail, dialect.closing) or int(_ends_in_escape(self._tail))
                self._hold(self._tail[: len(self._tail) - keep])
                self._tail = self._tail[len(self._tail) - keep :]
                return
            body = "".join(self._held) + self._tail[:at]
            self._tail = self._tail[at + len(dialect.closing) :]
            self._held, self._inside, self._in_string = [], False, False
            found = self._calls(body)
            if found:
                calls += self._count(found)
                self._after_call = True
            else:
                shown.append(dialect.opening + body + dialect.closing)
            return
        if dialect.bare and not self._begun:
            stripped = self._tail.lstrip()
            if not stripped:
                return
            self._begun = True
            if stripped.startswith("{"):
                self._inside = True
                self._hold(self._tail)
                self._tail = ""
                return
        at = self._tail.find(dialect.opening)
        if at < 0:
            keep = overlap(self._tail, dialect.opening)
            shown.append(self._visible(self._tail[: len(self._tail) - keep]))
            self._tail = self._tail[len(self._tail) - keep :]
            return
        shown.append(self._visible(self._tail[:at]))
        self._tail = self._tail[at + len(dialect.opening) :]
        self._inside = True

    def _closing_at(self) -> int:
        """Where the closing mark stands, or -1. One inside a JSON string is part of the string."""
        for match in self._marks.finditer(self._tail):
            if match[0] == '"':
                self._in_string = not self._in_string
            elif match[0] == self._dialect.closing and not self._in_string:
                return match.start()
        return -1

    def _hold(self, text: str) -> None:
        if text:
            self._held.append(text)

    def _opening_text(self) -> str:
        return "" if self._dialect.bare else self._dialect.opening

    def _visible(self, text: str) -> str:
        # white space right after a call is layout, not text
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        return text

    def _count(self, calls: list[Call]) -> list[Call]:
        kept = []
        for call in calls[: self._left]:
            # a model that repeats itself to the letter has nothing more to say
            if call in self._seen:
                self.repeats = True
                break
            self._seen.add(call)
            kept.append(call)
        self._left -= len(kept)
        self.calls += len(kept)
        return kept

    def _calls(self, body: str) -> list[Call]:
        try:
            value = json.loads(body)
        except ValueError:
            return []
        items = value if isinstance(value, list) else [value]
        calls = [self._call(item) for item in items]
        return [call for call in calls if call is not None] if all(calls) else []

    def _call(self, item: Any) -> Call | None:
        if not isinstance(item, dict) or item.get("name") not in self._names:
            return None
        arguments = item.get(self._dialect.arguments_key, item.get("arguments", {}))
        if isinstance(arguments, str):
            return Call(item["name"], arguments)
        return Call(item["name"], json.dumps(arguments, ensure_ascii=False, separators=(",", ":")))

    def _cut_call(self, body: str) -> list[Call]:
        """A call that the length limit cut: its name and what there is of its arguments."""
        pattern = rf'\s*\[?\s*\{{\s*"name"\s*:\s*"([^"]{{1,64}})"\s*,\s*"{self._dialect.arguments_key}"\s*:\s*'
        match = re.match(pattern, body)
        if match is None or match[1] not in self._names:
            return []
        return [Call(match[1], body[match.end() :])]


def _ends_in_escape(text: str) -> bool:
    """Whether the last character is a backslash that escapes the next one."""
    return (len(text) - len(text.rstrip("\\"))) % 2 == 1


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[len(text) - size :]):
            return size
    return 0


def describe(tools: list[dict[str, Any]], must_call: bool) -> str:
    """What a model that was never told of tools is told."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    when = "Answer with a call" if must_call else "When a tool helps, answer with a call"
    return (
        f"You can call these tools, given as JSON:\n{lines}\n"
        f'{when}, written as <tool_call>{{"name": tool name, "arguments": object}}</tool_call>.'
    )


def written(name: str, arguments: Any) -> str:
    """A past call, as the generic dialect shows it in a prompt."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>{call}</tool_call>"
