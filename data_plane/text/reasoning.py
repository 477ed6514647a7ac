"""Reasoning and answer, told apart by the marks that a model writes around its reasoning."""

from __future__ import annotations

from data_plane.text.tool_calls import overlap

OPEN, CLOSE = "<think>", "</think>"


class ReasoningSplitter:
    """Feed text, get (reasoning, answer). A reply may begin inside, where the template opened the mark."""

    def __init__(self, inside: bool) -> None:
        self._inside = inside
        self._begun = inside
        self._done = self._trims = False
        self._tail = ""

    def feed(self, text: str) -> tuple[str, str]:
        if self._done:
            return "", self._answer(text)
        self._tail += text
        if not self._begun:
            stripped = self._tail.lstrip()
            if len(stripped) < len(OPEN) and OPEN.startswith(stripped):
                return "", ""
            self._begun = True
            if not stripped.startswith(OPEN):
                self._done = True
                return "", self._take(len(self._tail))
            self._tail, self._inside = stripped[len(OPEN) :], True
        at = self._tail.find(CLOSE)
        if at >= 0:
            reasoning = self._take(at)
            self._tail = self._tail[len(CLOSE) :]
            self._done = self._trims = True
            return reasoning, self._answer(self._take(len(self._tail)))
        return self._take(len(self._tail) - overlap(self._tail, CLOSE)), ""

    def finish(self) -> tuple[str, str]:
        """What was held back, once no mark can complete."""
        rest, self._tail = self._tail, ""
        return (rest, "") if self._inside and not self._done else ("", rest)

    def _answer(self, text: str) -> str:
        # newlines between the mark and the answer are layout
        if self._trims:
            text = text.lstrip("\n")
            self._trims = not text
        return text

    def _take(self, count: int) -> str:
        taken, self._tail = self._tail[:count], self._tail[count:]
        return taken
