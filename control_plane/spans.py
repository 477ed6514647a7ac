"""Spans of time as people write them: durations, and parts of the week. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)?")
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_WINDOW = re.compile(
    r"(?P<days>[a-z,-]+)\s+(?P<start_h>\d\d?):(?P<start_m>[0-5]\d)-(?P<end_h>\d\d?):(?P<end_m>[0-5]\d)"
    r"(?:\s+(?P<zone>[a-z][\w/+-]*))?\s+(?P<count>\d{1,3})"
)


class SpanError(ValueError):
    """Text that is no span of time; says how one is written."""


def duration(text: str | float) -> float:
    """`90`, `90s`, `5m`, `2h`, `30d` → seconds. Raises SpanError."""
    match = _DURATION.fullmatch(str(text).strip())
    if match is None:
        raise SpanError(f"{text!r} isn't a duration: write 30s, 5m, 2h or 7d")
    return float(match[1]) * _UNITS[match[2] or "s"]


def show_duration(seconds: float) -> str:
    """As `duration` reads it, in the largest unit that makes it whole."""
    for unit in ("d", "h", "m", "s"):
        if seconds >= _UNITS[unit] and seconds % _UNITS[unit] == 0:
            return f"{int(seconds / _UNITS[unit])}{unit}"
    return f"{seconds:g}s"


def moment(text: str, now: float) -> float:
    """`30d` (that long ago), `2026-11-01`, `2026-11-01T12:00+01:00` (UTC, where nothing else is said) → seconds since
    the epoch. Raises SpanError."""
    if _DURATION.fullmatch(text.strip()):
        return now - duration(text)
    try:
        at = datetime.fromisoformat(text.strip())
    except ValueError:
        raise SpanError(f"{text!r} isn't a time: write 30d for that long ago, 2026-11-01 or 2026-11-01T12:00") from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def month(text: str) -> tuple[float, float]:
    """`2026-11` → when that UTC month begins and ends. Raises SpanError."""
    try:
        first = datetime.strptime(text.strip(), "%Y-%m").replace(tzinfo=UTC)
    except ValueError:
        raise SpanError(f"{text!r} isn't a month: write it as 2026-11") from None
    after = first.replace(year=first.year + first.month // 12, month=first.month % 12 + 1)
    return first.timestamp(), after.timestamp()


def window(text: str) -> dict[str, Any]:
    """`mon-fri 08:00-18:00 Europe/Berlin 2` → a part of the week and its minimum; the zone may be left out.

    Raises SpanError.
    """
    match = _WINDOW.fullmatch(text.strip().lower())
    days = _days(match["days"]) if match else None
    if match is None or days is None:
        raise SpanError(f"{text!r}: write it as 'mon-fri 08:00-18:00 Europe/Berlin 2'")
    zone = text.split()[2] if match["zone"] else "UTC"
    start, end = (60 * int(match[f"{which}_h"]) + int(match[f"{which}_m"]) for which in ("start", "end"))
    return {"days": days, "start": start, "end": end, "min_replicas": int(match["count"]), "zone": zone}


def show_window(item: dict[str, Any]) -> str:
    """As `window` reads it."""
    days = "daily" if len(item["days"]) == 7 else ",".join(_DAYS[day] for day in item["days"])
    start, end = (f"{item[which] // 60:02}:{item[which] % 60:02}" for which in ("start", "end"))
    return f"{days} {start}-{end} {item['zone']} {item['min_replicas']}"


def _days(text: str) -> list[int] | None:
    """`mon-fri`, `sat,sun`, `daily`."""
    if text == "daily":
        return list(range(7))
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if first not in _DAYS or (dash and last not in _DAYS):
            return None
        start, end = _DAYS.index(first), _DAYS.index(last or first)
        found.update((start + step) % 7 for step in range((end - start) % 7 + 1))
    return sorted(found)
