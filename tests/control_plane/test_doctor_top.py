"""`ingle doctor` and `ingle top`."""

from __future__ import annotations

import datetime
import json
import os
import socket
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from control_plane.cli.checks import skew
from control_plane.cli.reach import certificate
from control_plane.store.health import measure
from tests.control_plane.harness import Installation, create, free_port, ingle

DAY = 86_400.0
NOW = 1_800_000_000.0


def examined(home: Path, **more: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    done = ingle(home, "doctor", "-o", "json", **more)
    found: dict[str, list[dict[str, Any]]] = {}
    for check in json.loads(done.stdout):
        found.setdefault(check["name"], []).append(check)
    return done.returncode, found


def addresses(platform: Installation) -> dict[str, str]:
    facts = platform.programs[0].facts
    regions = [{"name": name, "gateway": url.removeprefix("https://")} for name, url in facts["gateways"].items()]
    return {"INGLE_ADMIN": facts["admin"].removeprefix("https://"), "INGLE_REGIONS": json.dumps(regions)}


def test_an_installation_that_runs_is_well(platform: Installation) -> None:
    code, found = examined(platform.home, **addresses(platform))
    failed = [check for checks in found.values() for check in checks if check["status"] == "fail"]
    assert (code, failed) == (0, [])
    assert "answers" in found["admin"][0]["found"]
    assert "answers" in found["gateway local-eu"][0]["found"]
    assert [check["status"] for check in found["certificate"]] == ["ok", "ok", "ok"]
    assert len(found["clock"]) == 3
    assert found["database"][0]["found"].startswith("schema 0")
    assert found["region local-me"][0]["status"] == "ok"
    text = ingle(platform.home, "doctor", **addresses(platform))
    assert text.returncode == 0
    assert all(line.split()[0] in ("ok", "warn", "→") for line in text.stdout.splitlines())


def test_a_ray_cluster_is_looked_at(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        place = f"127.0.0.1:{head.getsockname()[1]}"
        token = tmp_path / "token"
        region = {"name": "fr-1", "provider": "ray", "ray": {"address": place, "token_file": str(token)}}
        more = {"INGLE_REGIONS": json.dumps([region]), "INGLE_REPLICA_TLS": "true"}
        _, found = examined(tmp_path / "home", **more)
        (check,) = found[f"ray {place}"]
        assert (check["status"], "can't be read" in check["found"]) == ("fail", True)
        assert [one["found"].split()[0] for one in found["provider"]] == ["ray"]
        token.write_text("secret")
        _, found = examined(tmp_path / "home", **more)
        assert found[f"ray {place}"][0]["status"] == "ok"
    _, found = examined(tmp_path / "home", **more)
    assert "doesn't answer" in found[f"ray {place}"][0]["found"]


def test_a_strange_listener_an_old_schema_and_a_missing_program_fail(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert ingle(home, "db", "upgrade").returncode == 0
    with sqlite3.connect(home / "ingle.db") as database:
        database.execute("UPDATE alembic_version SET version_num = '0001'")
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.settimeout(0.1)
        taken = f"127.0.0.1:{stranger.getsockname()[1]}"
        more = {"INGLE_ADMIN": f"127.0.0.1:{free_port()}", "INGLE_GATEWAY": taken}
        code, found = examined(home, **more, INGLE_REPLICA_COMMAND='["/none/such"]')
    assert code == 1
    assert found["admin"][0] == {"name": "admin", "status": "ok", "found": f"{more['INGLE_ADMIN']} is free", "do": ""}
    assert found["gateway local-eu"][0]["status"] == "fail"
    assert "isn't ingle" in found["gateway local-eu"][0]["found"]
    assert (found["database"][0]["status"], found["database"][0]["do"]) == ("fail", "run `ingle db upgrade`")
    assert (found["provider"][0]["status"], found["admin API"][0]["status"]) == ("fail", "warn")


def test_the_rights_at_aws_are_tried(tmp_path: Path, aws: Any) -> None:
    more = {
        "INGLE_KEYRING__KMS_KEY": "alias/none",
        "INGLE_KEYRING__AWS_REGION": aws.region,
        "INGLE_KEYRING__ENDPOINT_URL": aws.url,
    }
    code, found = examined(tmp_path / "home", **more, **aws.environment)
    assert code == 1
    assert (found["kms"][0]["status"], found["kms"][0]["do"]) == ("fail", "give these credentials kms:DescribeKey")
    key = aws.client("kms").create_key()["KeyMetadata"]["KeyId"]
    _, found = examined(tmp_path / "home", **{**more, "INGLE_KEYRING__KMS_KEY": key}, **aws.environment)
    assert found["kms"][0]["status"] == "ok"


@pytest.mark.parametrize(
    ("script", "status", "found"),
    [
        ("echo 'NVIDIA H200, 570.133.20, 143771 MiB'", "ok", "NVIDIA H200, 143771 MiB, driver 570.133.20"),
        ("echo 'NVIDIA-SMI has failed'; exit 9", "fail", "NVIDIA-SMI has failed"),
        ("echo 'no such column'", "fail", "nvidia-smi said 'no such column'"),
    ],
)
def test_the_driver_is_asked(tmp_path: Path, script: str, status: str, found: str) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    _, checks = examined(tmp_path / "home", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert [(check["status"], check["found"]) for check in checks["accelerator"]] == [(status, found)]


@pytest.mark.postgres
def test_a_server_has_a_clock_of_its_own(postgres_url: str) -> None:
    found = measure(f"{postgres_url}postgres")
    assert found.ahead is not None
    assert abs(found.ahead) < 5
    assert 0 < found.latency_ms < 5000


@pytest.mark.parametrize(
    ("ahead", "exact", "status"),
    [
        (0.0, 0.0, "ok"),
        (1.9, 0.0, "ok"),
        (-2.5, 0.0, "warn"),
        (2.5, 1.0, "ok"),
        (31.0, 0.0, "fail"),
        (-40.0, 1.0, "fail"),
    ],
)
def test_clocks_may_differ_a_little(ahead: float, exact: float, status: str) -> None:
    assert skew("x", ahead, exact).status == status


def made(begins: float, ends: float) -> tuple[bytes, bytes]:
    """A certificate of its own, as DER and as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "x")])
    times = [datetime.datetime.fromtimestamp(at, datetime.UTC) for at in (begins, ends)]
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    built = builder.serial_number(1).not_valid_before(times[0]).not_valid_after(times[1]).sign(key, hashes.SHA256())
    return built.public_bytes(serialization.Encoding.DER), built.public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize(
    ("begins", "ends", "status"),
    [
        (NOW - 10 * DAY, NOW + 80 * DAY, "ok"),
        (NOW - 80 * DAY, NOW + 10 * DAY, "warn"),
        (NOW - 80 * DAY, NOW - 1, "fail"),
        (NOW + 3600, NOW + 80 * DAY, "fail"),
    ],
)
def test_certificates_that_end_are_told(begins: float, ends: float, status: str) -> None:
    assert certificate("x", made(begins, ends)[0], None, NOW).status == status


def test_a_certificate_of_another_home_is_told(tmp_path: Path) -> None:
    der, pem = made(NOW - DAY, NOW + 80 * DAY)
    (tmp_path / "ca.pem").write_bytes(pem)
    assert certificate("x", der, tmp_path / "ca.pem", NOW).status == "ok"
    (tmp_path / "ca.pem").write_bytes(made(NOW - DAY, NOW + 80 * DAY)[1])
    assert certificate("x", der, tmp_path / "ca.pem", NOW).status == "fail"


def test_top_prints_one_frame(platform: Installation) -> None:
    with platform.admin() as admin:
        create(admin, "on-top")
    done = ingle(platform.home, "top", "--once", "--interval", "1s")
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("on-top"))
    assert row.split()[1:4] == ["local-eu", "ready", "1/1"]
    listed = json.loads(ingle(platform.home, "top", "--once", "--interval", "1s", "-o", "json").stdout)
    assert next(one for one in listed if one["endpoint"] == "on-top")["tokens_per_s"] is not None
    assert ingle(platform.home, "top", "--once", "--interval", "100ms").returncode == 2
    with platform.admin() as admin:
        admin.delete_endpoint("on-top")


def test_dashboard_says_where_the_page_is(platform: Installation) -> None:
    done = ingle(platform.home, "dashboard")
    assert done.stdout == f"{platform.programs[0].facts['admin']}/\n"
