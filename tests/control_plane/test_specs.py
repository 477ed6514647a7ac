"""Spec files: what they may say, and that the platform is then as they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from control_plane import specs
from control_plane.client import AdminClient
from control_plane.errors import InvalidInput
from control_plane.spans import SpanError, duration, show_duration, show_window, window
from tests.control_plane.harness import Installation, chat, ingle, state_of, until

FILE = """\
kind: tenant
name: acme
requests_per_minute: 600
---
kind: endpoint
name: spec-a
region: local-eu
model: tokens-4
tenant: acme
idle_timeout: 10m
max_replicas: 2
schedule: [mon-fri 08:00-18:00 Europe/Berlin 1]
---
kind: endpoint
name: spec-b
region: local-eu
model: fast
tenant: acme
preset: chat
warmth: ember
ttft_slo: 500ms
"""


@given(st.integers(1, 10**7).map(lambda ms: ms / 1000))
def test_durations_are_read_as_they_are_shown(seconds: float) -> None:
    assert duration(show_duration(seconds)) == pytest.approx(seconds, rel=1e-5)


@pytest.mark.parametrize(
    ("text", "days", "start", "end", "zone", "count"),
    [
        ("mon-fri 08:00-18:00 Europe/Berlin 2", [0, 1, 2, 3, 4], 480, 1080, "Europe/Berlin", 2),
        ("sat,sun 9:30-24:00 1", [5, 6], 570, 1440, "UTC", 1),
        ("fri-mon 22:00-06:00 Etc/GMT+3 3", [0, 4, 5, 6], 1320, 360, "Etc/GMT+3", 3),
        ("daily 00:00-23:59 1", list(range(7)), 0, 1439, "UTC", 1),
    ],
)
def test_parts_of_the_week(text: str, days: list[int], start: int, end: int, zone: str, count: int) -> None:
    read = window(text)
    assert read == {"days": days, "start": start, "end": end, "min_replicas": count, "zone": zone}
    assert window(show_window(read)) == read


@pytest.mark.parametrize(
    "text", ["", "mon 8-18 1", "someday 08:00-18:00 1", "mon 08:61-18:00 1", "mon-fry 08:00-18:00 1"]
)
def test_what_is_no_part_of_the_week_is_refused(text: str) -> None:
    with pytest.raises(SpanError, match="mon-fri 08:00-18:00"):
        window(text)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("- 1", "document 1: it isn't a mapping"),
        ("name: x", "document 1 (x): kind: must be endpoint or tenant"),
        ("kind: endpoint\nname: x\nregion: local-eu", "document 1 (x): model: is missing"),
        ("kind: endpoint\nname: x\nregion: r\nmodel: m\nmax_replicsa: 3", "max_replicsa: there is no such field"),
        ("kind: endpoint\nname: x\nregion: r\nmodel: m\nengine_args: x", "engine_args: must be a list"),
        ("kind: endpoint\nname: x\nregion: r\nmodel: m\nmax_replicas: 0", "max_replicas: must be greater than"),
        ("kind: endpoint\nname: x\nregion: r\nmodel: m\nidle_timeout: soon", "idle_timeout: 'soon' isn't a duration"),
        ("kind: endpoint\nname: x\nregion: r\nmodel: m\nschedule: [never]", "schedule.0"),
        ("kind: endpoint\nname: x\nregion: r\nmodel: m\nmin_replicas: 3", "min_replicas 3 is more than max_replicas 1"),
        ("kind: tenant\nname: X y", "name"),
        ("kind: [", "file.yaml: while parsing"),
        ("!!python/object/apply:os.system [true]", "could not determine a constructor"),
    ],
)
def test_what_is_off_is_named(document: str, said: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        specs.parse(document, "file.yaml")
    assert said in caught.value.message


def test_all_that_is_off_is_told_at_once() -> None:
    with pytest.raises(InvalidInput) as caught:
        specs.parse("kind: tenant\n---\nkind: no\n---\nkind: tenant\nname: fine", "f")
    assert "document 1" in caught.value.message
    assert "document 2" in caught.value.message
    with pytest.raises(InvalidInput, match="tenant a is described twice"):
        specs.check(specs.parse("kind: tenant\nname: a\n---\nkind: tenant\nname: a", "f"))


def test_the_schema_for_editors_agrees() -> None:
    schema = specs.json_schema()
    jsonschema_rs.meta.validate(schema)
    validator = jsonschema_rs.Draft202012Validator(schema)
    for document in yaml.safe_load_all(FILE):
        validator.validate(document)
    for wrong in ({"kind": "endpoint", "name": "x"}, {"kind": "tenant", "name": "x", "speed": 1}, {"kind": "key"}):
        assert not validator.is_valid(wrong), wrong


def run(platform: Installation, *arguments: str, file: Path) -> Any:
    return ingle(platform.home, arguments[0], "-f", str(file), *arguments[1:], **platform.more)


def test_files_make_it_so(platform: Installation, admin: AdminClient, tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(FILE)
    assert run(platform, "diff", "--exit-code", file=file).returncode == 1
    done = run(platform, "apply", file=file)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line[0] == "+"] == [
        "+ tenant acme", "+ endpoint spec-a", "+ endpoint spec-b",
    ]  # fmt: skip
    a, b = admin.endpoint("spec-a"), admin.endpoint("spec-b")
    assert (a.tenant, a.idle_timeout, a.max_replicas, a.schedule[0].zone) == ("acme", 600, 2, "Europe/Berlin")
    assert (b.preset, b.warmth, b.ttft_slo) == ("chat", "ember", 0.5)
    assert admin.tenant("acme").limits.requests_per_minute == 600

    # again: nothing differs, nothing happens
    assert run(platform, "diff", "--exit-code", file=file).returncode == 0
    run(platform, "apply", file=file)
    assert (admin.endpoint("spec-a").generation, admin.endpoint("spec-b").generation) == (1, 1)

    # what is exported says the same
    exported = ingle(platform.home, "export", "spec-a", "spec-b", **platform.more)
    again = tmp_path / "again.yaml"
    again.write_text(exported.stdout)
    assert run(platform, "diff", "--exit-code", file=again).returncode == 0, exported.stdout

    # what a file leaves out has its default again
    file.write_text(FILE.replace("max_replicas: 2\n", "").replace("preset: chat\n", ""))
    changed = run(platform, "apply", file=file)
    assert changed.returncode == 0, changed.stderr
    assert "    max_replicas: 2 → 1" in changed.stdout
    assert "    preset: chat → none" in changed.stdout
    assert (admin.endpoint("spec-a").max_replicas, admin.endpoint("spec-b").engine_args) == (1, [])

    # one that fails leaves what served
    file.write_text(FILE.replace("tokens-4", "bad"))
    failed = run(platform, "apply", file=file)
    assert failed.returncode == 1
    assert "spec-a failed: " in failed.stderr
    again = run(platform, "apply", file=file)
    assert (again.returncode, "spec-a failed before: " in again.stderr) == (1, True), again.stderr
    key = admin.create_key({"name": "spec", "tenant": "acme"})
    with platform.tenant(admin.endpoint("spec-a").url, key.secret) as tenant:
        assert tenant.post("/chat/completions", json=chat()).json()["usage"]["completion_tokens"] == 4

    # another region: it ends here and begins there, once that was said, and with nothing that wasn't proved
    file.write_text(FILE.replace("region: local-eu\nmodel: tokens-4", "region: local-me\nmodel: tokens-4"))
    for command in (("apply", "--yes"), ("diff",)):
        refused = run(platform, *command, file=file)
        assert (refused.returncode, "before model was proved in local-me" in refused.stderr) == (2, True)
    file.write_text(FILE)
    assert run(platform, "apply", file=file).returncode == 0
    file.write_text(FILE.replace("region: local-eu\nmodel: tokens-4", "region: local-me\nmodel: tokens-4"))
    refused = run(platform, "apply", file=file)
    assert refused.returncode != 0
    assert admin.endpoint("spec-a").region == "local-eu"
    moved = run(platform, "apply", "--yes", file=file)
    assert moved.returncode == 0, moved.stderr
    assert (admin.endpoint("spec-a").region, state_of(admin, "spec-a")) == ("local-me", "ready")

    # what would be refused once it had ended is refused before
    before = admin.endpoint("spec-a")
    moved_away = FILE.replace("region: local-eu\nmodel: tokens-4", "region: local-xx\nmodel: tokens-4")
    no_such_gpu = FILE.replace("region: local-eu\nmodel: tokens-4", "region: local-eu\nmodel: tokens-4\ngpu: H100")
    for wrong, said in (
        (moved_away, "endpoint spec-a: there is no region 'local-xx'"),
        (
            no_such_gpu.replace("kind: tenant\nname: acme\n", "kind: tenant\nname: spare\n"),
            "endpoint spec-a: region local-eu offers cpu, not H100",
        ),
        (FILE.replace("tenant: acme\nidle", "tenant: nobody\nidle"), "there is no tenant 'nobody'"),
    ):
        file.write_text(wrong)
        for command in (("apply", "--yes"), ("diff",)):
            refused = run(platform, *command, file=file)
            assert (refused.returncode, said in refused.stderr) == (2, True), refused.stderr
    assert admin.endpoint("spec-a").id == before.id
    assert "spare" not in {tenant.name for tenant in admin.tenants()}

    # what is in no file goes, of those tenants alone
    file.write_text(FILE.partition("---\nkind: endpoint\nname: spec-b")[0])
    others = {endpoint.name for endpoint in admin.endpoints()} - {"spec-a", "spec-b"}
    pruned = run(platform, "apply", "--prune", "--yes", file=file)
    assert "- endpoint spec-b" in pruned.stdout, pruned.stdout
    until(lambda: "spec-b" not in {endpoint.name for endpoint in admin.endpoints()}, "it is gone")
    assert others <= {endpoint.name for endpoint in admin.endpoints()}
    admin.delete_endpoint("spec-a")


def test_the_schema_is_printed(platform: Installation) -> None:
    printed = ingle(platform.home, "export", "--schema", **platform.more)
    assert json.loads(printed.stdout)["title"] == "ingle spec"


def test_a_file_that_is_not_there(platform: Installation, tmp_path: Path) -> None:
    done = run(platform, "apply", file=tmp_path / "none.yaml")
    assert (done.returncode, "none.yaml can't be read" in done.stderr) == (2, True)
