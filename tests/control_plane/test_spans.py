"""Times and periods as people write them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from control_plane import spans

NOW = datetime(2026, 12, 1, 12, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30d", datetime(2026, 11, 1, 12, tzinfo=UTC)),
        ("90", datetime(2026, 12, 1, 11, 58, 30, tzinfo=UTC)),
        ("2026-11-01", datetime(2026, 11, 1, tzinfo=UTC)),
        (" 2026-11-01T06:30 ", datetime(2026, 11, 1, 6, 30, tzinfo=UTC)),
        ("2026-11-01T06:30:00Z", datetime(2026, 11, 1, 6, 30, tzinfo=UTC)),
        ("2026-11-01T06:30+02:00", datetime(2026, 11, 1, 4, 30, tzinfo=UTC)),
    ],
)
def test_a_moment_is_a_time_or_how_long_ago(text: str, expected: datetime) -> None:
    assert spans.moment(text, NOW) == expected.timestamp()


@pytest.mark.parametrize("text", ["", "yesterday", "2026-13-01", "-3d"])
def test_what_is_no_moment_is_refused(text: str) -> None:
    with pytest.raises(spans.SpanError, match="isn't a time"):
        spans.moment(text, NOW)


@pytest.mark.parametrize(("text", "days"), [("2026-11", 30), ("2026-12", 31), ("2028-02", 29)])
def test_a_month_is_utcs_and_whole(text: str, days: int) -> None:
    start, end = spans.month(text)
    assert datetime.fromtimestamp(start, UTC).isoformat() == f"{text}-01T00:00:00+00:00"
    assert end - start == days * 86_400


@pytest.mark.parametrize("text", ["november", "2026", "2026-00", "2026-11-01"])
def test_what_is_no_month_is_refused(text: str) -> None:
    with pytest.raises(spans.SpanError, match="2026-11"):
        spans.month(text)
