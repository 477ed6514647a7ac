"""`ingle up` alone: an alert fires, is told, listed, silenced, outlives a restart and ends. And the live scrape."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import pytest

from control_plane.alerts.catalogue import CATALOGUE
from control_plane.client import trust
from control_plane.errors import NotFound, Unprocessable
from tests.control_plane.alerts.monitoring import Listener, listening
from tests.control_plane.harness import Installation, free_port, ingle, installed, until

TOKEN = "CANARY-hook-5f1"


def receivers(listener: Listener) -> str:
    return json.dumps([{"name": "ops", "kind": "webhook", "url": f"{listener.url}?token={TOKEN}"}])


def test_an_alert_from_its_first_sign_to_its_end(tmp_path: Path) -> None:
    with listening() as listener:
        more = {
            "INGLE_ALERTS__INTERVAL": "0.2",
            "INGLE_ALERTS__SCALE": "0.002",
            "INGLE_ALERTS__RECEIVERS": receivers(listener),
        }
        with installed(tmp_path / "home", **more) as installation:
            first = installation.up()
            with installation.admin() as client:
                client.create_endpoint({"name": "broken", "region": "local-eu", "model": "bad"})
            told = until(lambda: listener.told("ColdStartFails", "firing"), "it is told")
            assert told["labels"]["endpoint"] == "broken"
            listed = json.loads(ingle(installation.home, "alert", "list", "-o", "json").stdout)
            (one,) = [row for row in listed if row["name"] == "ColdStartFails"]
            assert (one["state"], one["severity"], one["silenced"]) == ("firing", "critical", False)
            assert one["summary"].startswith("broken in local-eu: ")
            assert one["id"] == told["fingerprint"]
            assert 'ingle_alerts_firing{alert="ColdStartFails",severity="critical"} 1.0' in scrape(installation, first)
            assert first.stop() == 0

            second = installation.up()
            done = ingle(installation.home, "alert", "silence", "endpoint=broken", "--for", "1h", "-o", "json")
            silence = json.loads(done.stdout)
            with installation.admin() as client:
                until(lambda: [row for row in client.alerts() if row.silenced], "the silence holds")
                until(
                    lambda: [row for row in client.alerts("firing") if row.name == "ColdStartFails"], "it still fires"
                )
                client.delete_endpoint("broken")
            until(lambda: listener.told("ColdStartFails", "resolved"), "its end is told, for its beginning was")
            assert ingle(installation.home, "alert", "unsilence", silence["id"]).returncode == 0
            assert second.stop() == 0
        words = [item["status"] for _, _, body in listener.posts for item in body["alerts"]
                 if item["labels"]["alertname"] == "ColdStartFails"]  # fmt: skip
        assert words == ["firing", "resolved"]
        for program in (first, second):
            assert TOKEN not in program.log()
            assert '"alert.state"' in program.log() or program is second


def scrape(installation: Installation, program: object, path: str = "/metrics") -> str:
    url = getattr(program, "facts")["admin"]  # noqa: B009
    return httpx.get(url + path, verify=trust(installation.ca_file), trust_env=False).text


def test_roles_that_run_apart_are_seen_from_the_controller(tmp_path: Path) -> None:
    port = free_port()
    url = f"sqlite+aiosqlite:///{tmp_path / 'home' / 'ingle.db'}"
    more = {"INGLE_ALERTS__INTERVAL": "0.2", "INGLE_ALERTS__SCALE": "0.01", "INGLE_DATABASE_URL": url}
    with installed(tmp_path / "home", **more) as installation:
        done = ingle(installation.home, "db", "upgrade", **more)
        assert done.returncode == 0, done.stderr
        installation.more = {**more, "INGLE_METRICS": f"127.0.0.1:{port}"}
        installation.start("serve", "controller")

        def firing() -> float:
            text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
            name = 'ingle_alerts_firing{alert="GatewayMetricsMissing",severity="critical"}'
            (value,) = [line.split()[-1] for line in text.splitlines() if line.startswith(name)] or ["-1"]
            return float(value)

        until(lambda: firing() == 1, "no gateway runs, and that is an alert")
        installation.more = more
        installation.start("serve", "gateway", "-r", "local-eu", "--gateway", "127.0.0.1:0")
        until(lambda: firing() == 0, "a gateway runs, and its metrics are read over TLS")


def test_rules_silences_and_history_over_the_api(platform: Installation) -> None:
    rows = json.loads(ingle(platform.home, "alert", "rules", "-o", "json").stdout)
    assert [row["name"] for row in rows] == [item.name for item in CATALOGUE]
    assert ingle(platform.home, "alert", "silence", "nonsense").returncode == 2
    with platform.admin() as client:
        with pytest.raises(Unprocessable, match="no alert 'Nonsense'"):
            client.silence({"alert": "Nonsense"}, 60, "")
        with pytest.raises(Unprocessable, match="matchers"):
            client.silence({}, 60, "")
        with pytest.raises(NotFound, match="no silence"):
            client.end_silence("sil_none")
        made = client.silence({"endpoint": "nobody"}, 60, "a test")
        assert [row.id for row in client.silences()] == [made.id]
        client.end_silence(made.id)
        assert client.silences() == []
        with pytest.raises(Unprocessable, match="from"):
            client.history("nobody", since=time.time(), until=0)
        with pytest.raises(NotFound):
            client.history("nobody", since=0, until=time.time())
