"""Presets and refusals where endpoints are made: over the admin API of a running platform."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from control_plane.client import AdminClient
from control_plane.errors import IngleError
from control_plane.planning.presets import SETTINGS, Preset
from tests.control_plane.harness import Installation, ingle

CHAT, EDGE = (list(SETTINGS[preset]) for preset in (Preset.CHAT, Preset.EDGE))

SPEC = {"region": "local-eu", "model": "fast"}


@pytest.fixture(scope="module")
def admin(platform: Installation) -> Iterator[AdminClient]:
    with platform.admin() as client:
        yield client


def test_a_preset_is_settings_that_own_arguments_go_before(admin: AdminClient) -> None:
    made = admin.create_endpoint({**SPEC, "name": "preset", "preset": "chat", "engine_args": ["--max-waiting=9"]})
    assert (made.preset, made.engine_args) == ("chat", [*CHAT[:2], "--max-waiting=9"])
    other = admin.update_endpoint("preset", {"preset": "edge"})
    assert other.generation == made.generation + 1, "a change of what runs"
    assert (other.preset, other.engine_args) == ("edge", [*EDGE[:-1], "--max-waiting=9"])
    own = admin.update_endpoint("preset", {"engine_args": ["--threads=1"]})
    assert own.engine_args == [*EDGE, "--threads=1"]
    assert admin.update_endpoint("preset", {"preset": "edge"}).generation == own.generation, "nothing changed"
    none = admin.update_endpoint("preset", {"preset": None})
    assert (none.preset, none.engine_args) == (None, ["--threads=1"])
    admin.delete_endpoint("preset")


def test_what_cannot_fit_is_refused_and_what_would_is_named(admin: AdminClient) -> None:
    spec = {"name": "big", "region": "local-eu", "model": "llama-3.1-70b-instruct", "gpu": "H100", "gpus": 1}
    with pytest.raises(IngleError) as refused:
        admin.create_endpoint(spec)
    assert (refused.value.param, refused.value.code) == ("gpu", "does_not_fit")
    assert "MI300X with 192 GB" in refused.value.message
    admin.create_endpoint({**SPEC, "name": "grows"})
    with pytest.raises(IngleError, match=r"takes 22\.4 GB"):
        admin.update_endpoint("grows", {"model": "qwen3-8b", "gpu": "L4", "engine_args": ["--max-model-len=40960"]})
    assert admin.endpoint("grows").model == "fast"
    admin.delete_endpoint("grows")


def test_presets_on_the_command_line(platform: Installation) -> None:
    home = platform.home
    made = ingle(
        home, "endpoint", "create", "cli-preset", "-r", "local-eu", "-m", "fast", "--preset", "edge", "-o", "json"
    )
    assert json.loads(made.stdout)["engine_args"] == EDGE
    changed = ingle(home, "endpoint", "update", "cli-preset", "--preset", "none", "-o", "json")
    assert json.loads(changed.stdout)["preset"] is None
    shown = ingle(home, "endpoint", "show", "cli-preset")
    assert any(line.split()[:2] == ["preset", "–"] for line in shown.stdout.splitlines())
    wrong = ingle(home, "endpoint", "update", "cli-preset", "--preset", "turbo")
    assert wrong.returncode == 2
    assert "preset" in wrong.stderr
    ingle(home, "endpoint", "delete", "cli-preset", "--yes")
