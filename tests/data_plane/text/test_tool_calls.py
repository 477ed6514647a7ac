"""Tool-call parsers: whatever the split of the text, the same calls; what is no call stays text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_plane.text.reasoning import ReasoningSplitter
from data_plane.text.tool_calls import HERMES, LLAMA3, MISTRAL, Call, Dialect, ToolCallParser, dialect_of

NAMES = frozenset({"get_weather", "add"})
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'

OTHER = CALL.replace("1", "2")


def parse(dialect: Dialect, pieces: list[str], most: int = 9) -> tuple[str, list[Call]]:
    parser = ToolCallParser(dialect, NAMES, most)
    text = ""
    calls: list[Call] = []
    for piece in pieces:
        shown, found = parser.feed(piece)
        text, calls = text + shown, calls + found
    shown, found = parser.finish()
    return text + shown, calls + found


@pytest.mark.parametrize(
    ("dialect", "text", "shown", "calls"),
    [
        (HERMES, "plain text", "plain text", []),
        (HERMES, CALL, "", [Call("add", '{"a":1}')]),
        (HERMES, f"Sure. {CALL}\n{OTHER}\n", "Sure. ", [Call("add", '{"a":1}'), Call("add", '{"a":2}')]),
        (HERMES, f"{CALL}{OTHER}{CALL}", "", [Call("add", '{"a":1}'), Call("add", '{"a":2}')]),
        (HERMES, "a < b <tool_cal", "a < b <tool_cal", []),
        (HERMES, "<tool_call>not json</tool_call>!", "<tool_call>not json</tool_call>!", []),
        (HERMES, '<tool_call>{"name": "rm"}</tool_call>', '<tool_call>{"name": "rm"}</tool_call>', []),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1', "", [Call("add", '{"a": 1')]),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>\\"</tool_call>"}}</tool_call>', "",
         [Call("add", '{"a":"</tool_call>\\"</tool_call>"}')]),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": "\\\\"}}</tool_call>x', "x",
         [Call("add", '{"a":"\\\\"}')]),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": "</tool_call> and on', "",
         [Call("add", '{"a": "</tool_call> and on')]),
        (HERMES, "<tool_call>", "<tool_call>", []),
        (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}</tool_call>', "", [Call("add", '{"a": 2}')]),
        (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": "é"}}, {"name": "get_weather", "arguments": {}}]',
         "", [Call("add", '{"a":"é"}'), Call("get_weather", "{}")]),
        (MISTRAL, "No tools here [1]", "No tools here [1]", []),
        (LLAMA3, ' {"name": "add", "parameters": {"a": 1}}', "", [Call("add", '{"a":1}')]),
        (LLAMA3, '<|python_tag|>{"name": "add", "parameters": {}}', "", [Call("add", "{}")]),
        (LLAMA3, '{"answer": 42}', '{"answer": 42}', []),
        (LLAMA3, "Hello {x}", "Hello {x}", []),
    ],
)  # fmt: skip
def test_what_is_a_call(dialect: Dialect, text: str, shown: str, calls: list[Call]) -> None:
    assert parse(dialect, [text]) == (shown, calls)
    assert parse(dialect, list(text)) == (shown, calls)


@given(
    st.lists(
        st.sampled_from([CALL, "<tool_call>", "</tool_call>", "<", "tool", "{", "}", "é", "\n", " text "]), max_size=8
    ),
    st.randoms(),
)
def test_any_split_gives_the_same(parts: list[str], random: object) -> None:
    text = "".join(parts)
    pieces, at = [], 0
    while at < len(text):
        size = random.randint(1, 7)  # type: ignore[attr-defined]
        pieces.append(text[at : at + size])
        at += size
    whole, whole_calls = parse(HERMES, [text])
    split, split_calls = parse(HERMES, pieces)
    assert (split, split_calls) == (whole, whole_calls)


def test_only_so_many_calls_are_kept() -> None:
    _, calls = parse(HERMES, [CALL * 5], most=1)
    assert calls == [Call("add", '{"a":1}')]


def test_a_long_reply_is_parsed_in_linear_steps() -> None:
    body = json.dumps({"name": "add", "arguments": {"a": "x" * 200_000}})
    text = "<tool_call>" + body + "</tool_call>"
    _, calls = parse(HERMES, [text[at : at + 5] for at in range(0, len(text), 5)])
    assert len(calls[0].arguments) == 200_008


@pytest.mark.parametrize(
    ("source", "knows", "name"),
    [
        ("{{ messages }}", False, "generic"),
        ("{{ tools }}<tool_call>", True, "hermes"),
        ("{{ tools }}[TOOL_CALLS]", True, "mistral"),
        ("{{ tools }}<|python_tag|>", True, "llama3"),
    ],
)
def test_the_dialect_is_read_off_the_template(source: str, knows: bool, name: str) -> None:
    assert dialect_of(source, knows).name == name


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("hello", False, ("", "hello")),
        ("<think>why\n</think>\n\nbecause", False, ("why\n", "because")),
        ("\n<think>cut", False, ("cut", "")),
        ("still</think>done", True, ("still", "done")),
        ("<thin ice", False, ("", "<thin ice")),
        ("a</think>b</think>c", True, ("a", "b</think>c")),
    ],
)
def test_reasoning_is_told_apart(text: str, inside: bool, expected: tuple[str, str]) -> None:
    for pieces in ([text], list(text)):
        splitter = ReasoningSplitter(inside)
        parts = [splitter.feed(piece) for piece in pieces] + [splitter.finish()]
        assert ("".join(part[0] for part in parts), "".join(part[1] for part in parts)) == expected
