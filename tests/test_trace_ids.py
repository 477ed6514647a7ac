"""Log lines and traces find each other: both halves read a request's trace id alike, and a fault's line keeps it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping

import pytest

from control_plane.observe import logs
from data_plane import log

Reader = Callable[[Mapping[str, str]], str | None]
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.parametrize("trace_of", [logs.trace_of, log.trace_of])
@pytest.mark.parametrize(
    ("header", "found"),
    [
        (f"00-{TRACE}-b7ad6b7169203331-01", TRACE),
        (f"00-{TRACE}-b7ad6b7169203331", None),
        (f"00-{TRACE.upper()}-b7ad6b7169203331-01", None),
        ("nonsense\n", None),
        ("", None),
    ],
)
def test_a_trace_id_is_read(
    trace_of: Callable[[Mapping[str, str]], str | None], header: str, found: str | None
) -> None:
    assert trace_of({"traceparent": header}) == found


def test_the_line_of_a_fault_keeps_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the traceback, which has a field of its own."""
    root, ours = logging.getLogger(), logging.getLogger("ingle")
    before = (root.handlers[:], root.level, ours.level)
    try:
        logs.set_up_logs("info")
        logs.event("gateway.fault", level=logging.ERROR, trace_id=TRACE, error=ValueError("broken"))
    finally:
        root.handlers[:], root.level = before[0], before[1]
        ours.setLevel(before[2])
    line = json.loads(capsys.readouterr().err)
    assert line["trace_id"] == TRACE
    assert "ValueError" in line["trace"]
