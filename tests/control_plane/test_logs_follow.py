"""Following the logs of an endpoint's replicas."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from control_plane.errors import Unprocessable
from control_plane.providers.local import LocalProvider
from control_plane.security.secret import Secret
from tests.control_plane.harness import COMMAND, Installation, create, environment, replica_pids, until


@pytest.fixture
def provider(tmp_path: Path) -> LocalProvider:
    return LocalProvider(
        tmp_path, Secret(bytes(32)), regions=["r"], command=("true",), terminate_grace=1.0, log_bytes=4096
    )


@pytest.fixture
def log(tmp_path: Path, provider: LocalProvider) -> Path:
    folder = tmp_path / "replicas" / "rep_a"
    folder.mkdir(parents=True)
    return folder / "stderr.log"


def test_positions_go_on_where_they_ended(provider: LocalProvider, log: Path) -> None:
    assert provider.logs("rep_a", 10) == ([], 0)
    log.write_text("one\ntwo\nthr")
    assert provider.logs("rep_a", 1) == (["two"], 8)
    lines, position = provider.logs("rep_a", 10)
    with log.open("a") as file:
        file.write("ee\nfour\n")
    assert (lines, provider.logs("rep_a", 10, position)) == (["one", "two"], (["three", "four"], 19))
    assert provider.logs("rep_a", 10, 19) == ([], 19)
    assert provider.logs("rep_none", 10, 19) == ([], 0)


def test_an_emptied_log_loses_nothing(provider: LocalProvider, log: Path) -> None:
    log.write_text("one\n")
    _, position = provider.logs("rep_a", 10)
    with log.open("a") as file:
        file.write("two\n")
    log.rename(log.with_name("stderr.log.1"))
    log.write_text("3\n")
    assert provider.logs("rep_a", 10, position) == (["two", "3"], 2)


def test_new_lines_of_old_and_new_replicas_redacted(platform: Installation) -> None:
    def write(replica: str, text: str) -> None:
        with (platform.home / "replicas" / replica / "stderr.log").open("a") as file:
            file.write(text)

    with platform.admin() as admin:
        create(admin, "followed")
        replica = next(item.id for item in admin.endpoint("followed").replicas)
        _, cursor = admin.logs_since("followed", None)
        write(replica, "a line\nkey ingle_abcdefgh_CANARYCANARY given\n")
        ((found,), cursor) = admin.logs_since("followed", cursor)
        assert (found.replica, found.lines) == (replica, ["a line", "key [redacted] given"])
        assert admin.logs_since("followed", cursor) == ([], cursor)
        with pytest.raises(Unprocessable) as refused:
            admin.logs_since("followed", "rep_a:x")
        assert refused.value.param == "after"

        follower = subprocess.Popen(
            [*COMMAND, "endpoint", "logs", "-f", "followed", "-n", "1"],
            env=environment(platform.home),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert follower.stdout is not None
        try:
            assert follower.stdout.readline() == "key [redacted] given\n"
            write(replica, "and another\n")
            assert follower.stdout.readline() == "and another\n"
            # its successor's lines follow by themselves
            os.kill(replica_pids(platform)[replica], 9)
            assert '"event": "starting"' in follower.stdout.readline()
        finally:
            follower.terminate()
            follower.wait(10)
            follower.stdout.close()
        until(lambda: admin.endpoint("followed").state == "ready", "it is mended")
        admin.delete_endpoint("followed")
