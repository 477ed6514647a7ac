"""Structured logs: one JSON object a line on stderr, with secrets taken out before they are written."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

_logger = logging.getLogger("ingle")

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.{0,64}")
_SECRETS = re.compile(
    r"ingle_[A-Za-z0-9]{4,64}_[A-Za-z0-9_-]{8,}"  # our API keys
    r"|ingleadm_[A-Za-z0-9_-]{8,}"  # our admin tokens
    r"|sk-[A-Za-z0-9_-]{8,}"
    r"|(?i:bearer)\s+[^\s\"',]+"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"  # user:password in URLs
)


def trace_of(headers: Mapping[str, str]) -> str | None:
    """The id of the trace that a request belongs to (W3C traceparent), to find its log lines by."""
    found = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    return found[1] if found else None


def redact(text: str) -> str:
    """`text` with everything that looks like a credential replaced."""
    return _SECRETS.sub("[redacted]", text)


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {str(key): _clean(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(inner) for inner in value]
    if isinstance(value, bool | int | float) or value is None:
        return value
    return redact(str(value))


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "ts": round(record.created, 3),
            "level": record.levelname.lower(),
            "event": redact(record.getMessage()),
        }
        fields = getattr(record, "fields", None)
        if fields:
            entry.update(_clean(fields))
        if record.name != "ingle":
            entry["logger"] = record.name
        if record.exc_info and record.exc_info[0] is not None:
            entry["error"] = record.exc_info[0].__name__
            entry["trace"] = redact("".join(traceback.format_exception(*record.exc_info)))[-4000:]
        return json.dumps(entry, ensure_ascii=False)


def set_up_logs(level: str) -> None:
    """Send every log of this process to stderr as JSON lines. Libraries speak from warning upwards only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    _logger.setLevel(level.upper())


def event(name: str, *, level: int = logging.INFO, error: BaseException | None = None, **fields: Any) -> None:
    """Log that `name` happened, with its facts."""
    if _logger.isEnabledFor(level):
        _logger.log(level, name, extra={"fields": fields}, exc_info=error)


def iso(at: float) -> str:
    """Seconds since the epoch as ISO 8601 in UTC, to the millisecond."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))
    return f"{whole}.{int(at % 1 * 1000):03d}Z"
