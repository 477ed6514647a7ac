"""What the whole suite shares: on CI a skipped test is a failed run."""

from __future__ import annotations

import os

import pytest

FORBID_SKIPS = "INGLE_FORBID_SKIPS"
# as an engine has it: threads that spin while they wait for each other starve whatever else runs, other tests too
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get(FORBID_SKIPS) and reporter is not None and reporter.stats.get("skipped"):
        reporter.write_line(f"{FORBID_SKIPS} is set and {len(reporter.stats['skipped'])} tests were skipped", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
