from __future__ import annotations

from pathlib import Path

import pytest

from control_plane.providers.last_logs import LastLogs

LINES = ["one", "zwölf", "three"]
END = len("one\nzwölf\nthree\n".encode())


@pytest.mark.parametrize(
    ("lines", "after", "found"),
    [
        (10, None, LINES),
        (2, None, ["zwölf", "three"]),
        (10, 100, LINES),  # the file was longer: all that is kept is new
        (10, 100 + len("one\n"), ["zwölf", "three"]),
        (10, 100 + END, []),
        (10, 1000, []),
        (1, 0, ["three"]),
    ],
)
def test_the_last_lines_or_those_after_a_position(
    tmp_path: Path, lines: int, after: int | None, found: list[str]
) -> None:
    logs = LastLogs(tmp_path / "logs")
    logs.keep("rep_a", LINES, 100 + END)
    assert logs.read("rep_a", lines, after) == (found, 100 + END)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    logs = LastLogs(tmp_path / "logs")
    for number in range(30):
        logs.keep(f"rep_{number}", ["x"], 2)
    assert len(list((tmp_path / "logs").iterdir())) == 20
    assert logs.read("rep_none", 10, 7) == ([], 7)
