"""Structured logs: one JSON object a line on stderr. Prompts, replies and secrets are never passed in."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from typing import Literal

Level = Literal["debug", "info", "warning", "error"]
_ORDER: dict[str, int] = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.{0,64}")
_threshold = _ORDER.get(os.environ.get("INGLE_LOG_LEVEL", "info").lower(), 20)


def event(name: str, *, level: Level = "info", **fields: object) -> None:
    """Write one event. Fields must be JSON-able and free of tenant text."""
    if _ORDER[level] < _threshold:
        return
    record = {"ts": round(time.time(), 3), "level": level, "event": name, "pid": os.getpid(), **fields}
    sys.stderr.write(json.dumps(record, default=str) + "\n")
    sys.stderr.flush()


def trace_of(headers: Mapping[str, str]) -> str | None:
    """The id of the trace that a request belongs to (W3C traceparent), to find its log lines by."""
    found = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    return found[1] if found else None


def capture_libraries() -> None:
    """Make what libraries log through `logging`, from warnings up, events too; their tracebacks stay out."""
    logging.basicConfig(handlers=[_Events()], level=logging.WARNING, force=True)


class _Events(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        level: Level = "error" if record.levelno >= logging.ERROR else "warning"
        kind = {} if record.exc_info is None or record.exc_info[0] is None else {"kind": record.exc_info[0].__name__}
        event("library", level=level, logger=record.name, message=record.getMessage(), **kind)
