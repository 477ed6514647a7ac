"""Stop strings over streamed text: what may still become a stop is held back."""

from __future__ import annotations


class StopMatcher:
    """Feed text, get what is safe to send. After a match nothing more comes out.

    Linear in the text: each feed looks at the new characters and at most the longest stop before them.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._reach = max((len(stop) for stop in stops), default=1) - 1
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        window = self._held + text
        # the one that is complete first, the longest of these: so the pieces that text comes in change nothing
        found = ((at + len(stop), at, stop) for stop in self._stops if (at := window.find(stop)) >= 0)
        first = min(found, default=None)
        if first is not None:
            _, at, self.matched = first
            self._held = ""
            return window[:at]
        keep = self._unsafe_tail(window)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep]

    def finish(self) -> str:
        """What was held back, once it is certain that no stop will complete."""
        held, self._held = self._held, ""
        return "" if self.matched is not None else held

    def _unsafe_tail(self, window: str) -> int:
        """Length of the longest end of `window` that begins a stop string."""
        for size in range(min(self._reach, len(window)), 0, -1):
            tail = window[len(window) - size :]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
