"""Jinja that stops: a sandbox whose programs have a deadline, and whose texts and numbers have a size.

A template comes with a model, and is run on what tenants send. The compiler is made to look at the clock in every block
of statements, so every loop and every macro call does; operators that make much of little are checked before they work.
"""

from __future__ import annotations

import re
import time
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment

DEADLINE_S = 1.0
"""Of the processor, which is all that a template can take: a busy machine refuses none that ends."""
MOST_RENDERED = 32 << 20
_LARGEST_POWER = 64
_WIDE = re.compile(r"%[^a-zA-Z]*([0-9]{4}|\*)")
_deadline: ContextVar[float] = ContextVar("deadline")


class TemplateTooSlow(jinja2.TemplateError):
    """The deadline passed."""


class TemplateTooLarge(jinja2.TemplateError):
    """A text over MOST_RENDERED characters, or a number of its kind, was to be made."""


class _Generator(CodeGenerator):
    def blockvisit(self, nodes: Any, frame: Frame) -> None:
        self.writeline("environment.look_at_the_clock()")
        super().blockvisit(nodes, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join((")
        for child in node.nodes:
            self.visit(child, frame)
            self.write(", ")
        self.write("))")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Render with `render_bounded`."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def look_at_the_clock(self) -> None:
        if time.thread_time() > _deadline.get(float("inf")):
            raise TemplateTooSlow(f"it took over {DEADLINE_S:g} s")

    def join(self, parts: tuple[Any, ...]) -> str:
        texts = [str(part) for part in parts]
        _check(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.look_at_the_clock()
        if operator == "+" and isinstance(left, str | list) and isinstance(right, str | list):
            _check(len(left) + len(right))
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str | list | tuple) and isinstance(other, int):
                    _check(len(one) * other)
            _check_number(left, right)
        elif operator == "**" and isinstance(right, int | float) and abs(right) > _LARGEST_POWER:
            raise TemplateTooLarge(f"a power over {_LARGEST_POWER}")
        elif operator == "**":
            _check_number(left, 1)
        elif operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise TemplateTooLarge("a width over 999")
        return super().call_binop(context, operator, left, right)


def _check(size: int) -> None:
    if size > MOST_RENDERED:
        raise TemplateTooLarge(f"over {MOST_RENDERED} characters")


def _check_number(*numbers: Any) -> None:
    if any(isinstance(number, int) and number.bit_length() > 1 << 12 for number in numbers):
        raise TemplateTooLarge("a number over 4096 bits")


def render_bounded(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Raises TemplateTooSlow, TemplateTooLarge, and whatever the template raises."""
    token = _deadline.set(time.thread_time() + DEADLINE_S)
    try:
        pieces: list[str] = []
        size = 0
        for piece in template.generate(variables):
            size += len(piece)
            _check(size)
            pieces.append(piece)
        return "".join(pieces)
    finally:
        _deadline.reset(token)
