"""Chat templates: a sandboxed Jinja that may read messages and do nothing else.

What a tenant wrote is marked before rendering where it spells a control token, and encoded apart from the
template's own words after it: no text can forge a turn.
"""

from __future__ import annotations

import datetime
import json
import re
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.ext import Extension

from data_plane.errors import ModelUnreadable, RequestError
from data_plane.loading.files import read_json
from data_plane.text import reasoning
from data_plane.text.bounded_template import BoundedEnvironment, TemplateTooLarge, TemplateTooSlow, render_bounded
from data_plane.text.tokenizer import TextTokenizer
from data_plane.text.tool_calls import Dialect, dialect_of

_SLOW_S = 0.005
_MARKER = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")


class _GenerationTag(Extension):
    """Hugging Face's `{% generation %}` marks training spans; for inference it is a plain block."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Refused(jinja2.TemplateError):
    """The template itself refused the conversation (`raise_exception`)."""


def _refuse(message: str) -> None:
    raise _Refused(message)


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, autoescape=False, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, indent=None, **_: json.dumps(value, ensure_ascii=False, indent=indent)
    return environment


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled template and the tokenizer that it writes for. `variables`: the names that the template reads.

    markers: single tokens with which the template marks turns, and which its tokenizer does not list as control tokens.
    """

    template: jinja2.Template
    tokenizer: TextTokenizer
    variables: frozenset[str]
    dialect: Dialect
    markers: tuple[str, ...] = ()
    _slowest: list[float] = field(default_factory=lambda: [0.0])

    @property
    def slow(self) -> bool:
        """Whether rendering has been seen to take long enough to be felt on an event loop."""
        return self._slowest[0] > _SLOW_S

    @property
    def knows_tools(self) -> bool:
        return "tools" in self.variables

    def tokens(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None, **variables: Any
    ) -> list[int]:
        """Token ids of the conversation, ending where the assistant is to speak.

        messages: role and content as plain strings (see `api.chat`). Raises RequestError: 400 where the template
        refuses the conversation, 500 where it does not end in time.
        """
        mark = _Mark(self.tokenizer, self.markers)
        given = {
            "messages": [mark.guard(message) for message in messages],
            "tools": mark.guard(tools) if tools else None,
            "add_generation_prompt": True,
            "bos_token": self.tokenizer.tokens.bos or "",
            "eos_token": self.tokenizer.tokens.eos or "",
            **variables,
        }
        return mark.encode(self._render(given))

    def _render(self, given: dict[str, Any]) -> str:
        started = time.monotonic()
        try:
            return render_bounded(self.template, given)
        except _Refused as error:
            raise RequestError(f"the model's chat template refused: {error}", param="messages") from error
        except TemplateTooSlow as error:
            raise RequestError(
                f"the model's chat template does not end: {error}",
                param="messages", code="template_timeout", status=500, type="server_error",
            ) from error  # fmt: skip
        except TemplateTooLarge as error:
            raise RequestError(
                f"the rendered conversation is too long: {error}", param="messages", code="context_length_exceeded"
            ) from error
        except Exception as error:  # a template is a program of the model's makers: it may fail in any way
            raise RequestError(
                f"the model's chat template cannot render these messages ({type(error).__name__})", param="messages"
            ) from error
        finally:
            self._slowest[0] = max(self._slowest[0], time.monotonic() - started)


class _Mark:
    """Breaks control tokens in a tenant's text with a random word, and mends them after rendering."""

    def __init__(self, tokenizer: TextTokenizer, markers: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._markers = markers
        self._tokens = (*tokenizer.tokens.control, *markers)
        self._word = f"\ue000{secrets.token_hex(8)}\ue001"
        self._used = False

    def guard(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._break(value) if any(token in value for token in self._tokens) else value
        if isinstance(value, dict):
            return {key: self.guard(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.guard(item) for item in value]
        return value

    def _break(self, text: str) -> str:
        self._used = True
        for token in self._tokens:
            text = text.replace(token, token[0] + self._word + token[1:])
        return text

    def encode(self, text: str) -> list[int]:
        if not self._used:
            return self._tokenizer.encode(text, control=True)
        ids: list[int] = []
        for piece, written_by_tenant in self._pieces(text):
            if written_by_tenant and piece in self._markers:
                # to the tokenizer it is a word like any other: only in halves is it not that word
                ids += [*self._tokenizer.encode(piece[0]), *self._tokenizer.encode(piece[1:])]
            else:
                ids += self._tokenizer.encode(piece, control=not written_by_tenant)
        return ids

    def _pieces(self, text: str) -> list[tuple[str, bool]]:
        """Split at the marked tokens: each becomes a piece of its own that is encoded as plain text."""
        controls = sorted(self._tokens, key=len, reverse=True)
        pieces: list[tuple[str, bool]] = []
        parts = text.split(self._word)
        head = parts[0]
        for part in parts[1:]:
            token = next((t for t in controls if head.endswith(t[0]) and part.startswith(t[1:])), None)
            if token is None:
                head += part
                continue
            pieces += [(head[:-1], False), (token, True)]
            head = part[len(token) - 1 :]
        return [*[(piece, tenant) for piece, tenant in pieces if piece], *([(head, False)] if head else [])]


def compile_template(source: str, tokenizer: TextTokenizer) -> ChatTemplate:
    """Raises ModelUnreadable when the template does not parse."""
    try:
        environment = _environment()
        variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        dialect = dialect_of(source, "tools" in variables)
        template = environment.from_string(source)
        return ChatTemplate(template, tokenizer, variables, dialect, _turn_markers(template, tokenizer))
    except jinja2.TemplateError as error:
        raise ModelUnreadable(f"the model's chat template does not parse: {error}") from error


_PROBES: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "a"}],
    [{"role": "system", "content": "a"}, {"role": "user", "content": "a"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "a"}],
)


def _turn_markers(template: jinja2.Template, tokenizer: TextTokenizer) -> tuple[str, ...]:
    """What the template writes around turns, as far as it is one token and no control token; thinking is no turn."""
    control = {*tokenizer.tokens.control, reasoning.OPEN, reasoning.CLOSE}
    found: set[str] = set()
    for messages in _PROBES:
        try:
            text = render_bounded(template, {"messages": messages, "add_generation_prompt": True, "tools": None})
        except Exception:  # it may refuse a conversation of this kind; that is no fault of the model's
            text = ""
        for marker in _MARKER.findall(text):
            if marker not in control and tokenizer.id_of(marker) in tokenizer.encode(marker):
                found.add(marker)
    return tuple(sorted(found))


def source_in_folder(folder: Path) -> str | None:
    """The chat template of a model folder, from chat_template.jinja or tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text("utf-8")
    config = folder / "tokenizer_config.json"
    value = read_json(config).get("chat_template") if config.exists() else None
    if isinstance(value, list):
        named = {str(item.get("name")): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default") or next(iter(named.values()), None)
    return value if isinstance(value, str) else None
