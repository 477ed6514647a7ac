"""The command line as people and scripts meet it: what it prints where, and how it exits."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from control_plane.cli.options import duration
from tests.control_plane.harness import COMMAND, Installation, environment, ingle, until


def data(run: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert run.returncode == 0, run.stderr
    value = json.loads(run.stdout)
    assert isinstance(value, dict)
    return value


def test_an_endpoint_from_create_to_delete(platform: Installation) -> None:
    home = platform.home
    made = ingle(
        home, "endpoint", "create", "cli", "-r", "local-eu", "-m", "fast+tokens-5", "--idle-timeout", "10m",
        "--max-wait", "30s", "--wait", "-o", "json",
    )  # fmt: skip
    shown = data(made)
    assert {"name", "url", "region", "model", "state", "generation"} <= shown.keys()
    assert (shown["name"], shown["state"], shown["generation"]) == ("cli", "ready", 1)
    assert (shown["idle_timeout"], shown["max_wait"]) == (600, 30)
    assert "cli: ready" in made.stderr
    assert data(ingle(home, "endpoint", "show", "cli", "-o", "json"))["url"] == shown["url"]
    listed = ingle(home, "endpoint", "list", "-o", "json")
    assert "cli" in {item["name"] for item in json.loads(listed.stdout)}
    assert yaml.safe_load(ingle(home, "endpoint", "show", "cli", "-o", "yaml").stdout)["name"] == "cli"
    table = ingle(home, "endpoint", "list")
    assert any(line.split()[:2] == ["cli", "local-eu"] for line in table.stdout.splitlines())
    assert "\x1b" not in table.stdout
    tried = data(ingle(home, "endpoint", "test", "cli", "--max-tokens", "4", "-o", "json"))
    assert tried["reply"] == "t0 t1 t2 t3 "
    updated = data(ingle(home, "endpoint", "update", "cli", "--model", "fast", "--wait", "-o", "json"))
    assert (updated["generation"], updated["observed_generation"]) == (2, 2)
    assert data(ingle(home, "endpoint", "sleep", "cli", "--wait", "-o", "json"))["state"] == "zero"
    assert data(ingle(home, "endpoint", "wake", "cli", "--wait", "-o", "json"))["state"] == "ready"
    events = json.loads(ingle(home, "endpoint", "events", "cli", "-o", "json").stdout)
    assert {"created", "updated", "sleep_requested", "wake_requested"} <= {event["kind"] for event in events}
    assert "starting" in ingle(home, "endpoint", "logs", "cli").stdout
    gone = ingle(home, "endpoint", "delete", "cli", "--yes", "--wait")
    assert (gone.returncode, gone.stdout) == (0, "")
    assert ingle(home, "endpoint", "show", "cli").returncode == 4


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["endpoint", "show", "none"], 4, "no endpoint named 'none'"),
        (["endpoint", "create", "x", "-r", "mars", "-m", "m"], 2, "choose one of local-eu, local-me"),
        (["endpoint", "create", "No Name", "-r", "local-eu", "-m", "m"], 2, "name:"),
        (["endpoint", "create", "x", "-r", "local-eu", "-m", "m", "--idle-timeout", "soon"], 2, "isn't a duration"),
        (["endpoint", "create", "x", "-r", "local-eu"], 2, "--model"),
        (["endpoint", "create", "x", "-r", "local-eu", "-m", "m", "--warmth", "tepid"], 2, "warmth"),
        (["endpoint", "update", "none"], 2, "say what to change"),
        (["endpoint", "delete", "none"], 2, "--yes"),
        (["endpoint", "delete", "none", "--yes"], 4, "no endpoint named"),
        (["nonsense"], 2, "nonsense"),
        (["key", "revoke", "none", "--yes"], 4, "no key with id"),
        (["key", "create", "--tenant", "none"], 4, "no tenant named"),
        (["key", "create", "--region", "none"], 4, "no region named"),
        (["tenant", "create", "default"], 1, "exists"),
        (["cert", "show", "none"], 4, "no certificate"),
        (["cert", "rotate", "none"], 4, "no certificate named"),
        (["region", "show", "none"], 4, "there are local-eu, local-me"),
        (["serve", "gateway", "--region", "none"], 2, "isn't one of local-eu, local-me"),
        (["usage", "--tenant", "none"], 4, "no tenant named"),
    ],
)
def test_a_fault_is_one_clear_line_and_its_exit_code(
    platform: Installation, arguments: list[str], code: int, says: str
) -> None:
    run = ingle(platform.home, *arguments)
    assert run.returncode == code, run.stderr
    assert says in run.stderr
    assert "Traceback" not in run.stderr
    assert run.stdout == ""


def test_a_model_that_is_not_there_fails_the_wait_with_its_reason(platform: Installation) -> None:
    run = ingle(platform.home, "endpoint", "create", "bad-model", "-r", "local-eu", "-m", "bad", "--wait")
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == (
        "ingle: bad-model failed: no model called bad: name one that exists (model_not_found)"
    )
    assert ingle(platform.home, "endpoint", "delete", "bad-model", "--yes").returncode == 0


def test_giving_up_waiting_has_a_code_of_its_own(platform: Installation) -> None:
    arguments = ["create", "slow", "-r", "local-eu", "-m", "fast+start-30000ms", "--wait", "--timeout", "300ms"]
    run = ingle(platform.home, "endpoint", *arguments)
    assert run.returncode == 5
    assert "gave up waiting for slow" in run.stderr
    assert ingle(platform.home, "endpoint", "delete", "slow", "--yes", "--wait").returncode == 0


def test_an_interrupted_wait_exits_130(platform: Installation) -> None:
    arguments = ["endpoint", "create", "patient", "-r", "local-eu", "-m", "fast+start-30000ms", "--wait"]
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        env=environment(platform.home),
        stderr=subprocess.PIPE,
        text=True,
        # a shell that runs the tests in the background has them ignore it, and what they start too
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    assert process.stderr.readline()
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=30)[1]
    assert process.returncode == 130
    assert "Traceback" not in rest
    assert ingle(platform.home, "endpoint", "delete", "patient", "--yes").returncode == 0


def test_keys_in_every_format(platform: Installation) -> None:
    home = platform.home
    made = data(ingle(home, "key", "create", "--name", "cli", "--expires", "1d", "-o", "json"))
    assert {"id", "secret", "prefix", "expires_at"} <= made.keys()
    rotated = data(ingle(home, "key", "rotate", str(made["id"]), "--grace", "1m", "-o", "json"))
    assert {"id", "secret", "prefix", "expires_at"} <= rotated.keys()
    assert rotated["secret"] != made["secret"]
    listed = {item["id"]: item for item in json.loads(ingle(home, "key", "list", "-o", "json").stdout)}
    assert "secret" not in listed[rotated["id"]]
    assert data(ingle(home, "key", "revoke", str(made["id"]), "--yes", "-o", "json"))["state"] == "revoked"
    env = ingle(home, "key", "create", "-o", "env", "--region", "local-me")
    pairs = [shlex.split(line)[1].partition("=") for line in env.stdout.splitlines()]
    values = {name: value for name, _, value in pairs}
    assert values.keys() == {"OPENAI_BASE_URL", "OPENAI_API_KEY", "SSL_CERT_FILE"}
    assert values["OPENAI_BASE_URL"] == platform.programs[0].facts["gateways"]["local-me"] + "/v1"
    assert Path(values["SSL_CERT_FILE"]).exists()


def test_an_unmodified_sdk_works_after_eval(platform: Installation) -> None:
    made = ingle(platform.home, "endpoint", "create", "sdk", "-r", "local-eu", "-m", "fast", "--wait")
    assert made.returncode == 0, made.stderr
    exports = ingle(platform.home, "key", "create", "-o", "env", "-r", "local-eu").stdout
    program = (
        "import openai\n"
        "client = openai.OpenAI()\n"
        "messages = [{'role': 'user', 'content': 'x'}]\n"
        "stream = client.chat.completions.create(model='sdk', stream=True, messages=messages)\n"
        "print(''.join(chunk.choices[0].delta.content for chunk in stream))\n"
    )
    script = f"{exports}\nexec {shlex.quote(sys.executable)} -c {shlex.quote(program)}"
    run = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (0, "t0 t1 t2 \n"), run.stderr
    assert ingle(platform.home, "endpoint", "delete", "sdk", "--yes").returncode == 0


def test_other_lists(platform: Installation) -> None:
    home = platform.home
    regions = json.loads(ingle(home, "region", "list", "-o", "json").stdout)
    assert [region["name"] for region in regions] == ["local-eu", "local-me"]
    certificates = {item["name"]: item for item in json.loads(ingle(home, "cert", "list", "-o", "json").stdout)}
    assert {"ca", "admin", "gateway-local-eu", "gateway-local-me"} <= certificates.keys()
    rotated = json.loads(ingle(home, "cert", "rotate", "-o", "json").stdout)
    assert {item["name"] for item in rotated} == {"gateway-local-eu", "gateway-local-me"}
    assert all(item["serial"] != certificates[item["name"]]["serial"] for item in rotated)
    assert isinstance(json.loads(ingle(home, "usage", "-o", "json").stdout), list)
    assert json.loads(ingle(home, "audit", "list", "-o", "json", "--limit", "1").stdout)[0]["action"] == "cert.rotate"
    assert "default" in ingle(home, "tenant", "list").stdout
    assert data(ingle(home, "region", "show", "local-eu", "-o", "json"))["provider"] == "local"


def test_the_schema_commands(tmp_path: Path) -> None:
    home = tmp_path / "new"
    before = ingle(home, "db", "check", "-o", "json")
    assert (before.returncode, json.loads(before.stdout)["up_to_date"]) == (1, False)
    assert "ingle db upgrade" in before.stderr
    refused = ingle(home, "serve", "controller")
    assert (refused.returncode, "ingle db upgrade" in refused.stderr) == (2, True)
    assert data(ingle(home, "db", "upgrade", "-o", "json"))["up_to_date"] is True
    assert ingle(home, "db", "check").returncode == 0


def test_without_a_platform(tmp_path: Path) -> None:
    run = ingle(tmp_path / "none", "endpoint", "list")
    assert run.returncode == 2
    assert "ingle up" in run.stderr
    (tmp_path / "profile.toml").write_text("admin_url = 3")
    assert ingle(tmp_path, "endpoint", "list").returncode == 2
    (tmp_path / "certs").mkdir()
    ca = Path(__file__)
    (tmp_path / "profile.toml").write_text(f'admin_url = "https://127.0.0.1:1"\ntoken = "t"\nca_file = "{ca}"\n')
    assert ingle(tmp_path, "endpoint", "list").returncode == 2


def test_an_admin_api_that_does_not_answer_or_does_not_know_us(platform: Installation, tmp_path: Path) -> None:
    text = (platform.home / "profile.toml").read_text()
    token = text.split('token = "')[1].split('"')[0]
    dead, stranger = tmp_path / "dead.toml", tmp_path / "stranger.toml"
    admin = platform.programs[0].facts["admin"]
    dead.write_text(text.replace(admin, "https://127.0.0.1:1"))
    stranger.write_text(text.replace(token, "ingleadm_wrong"))
    for path, code, says in ((dead, 1, "is `ingle up` running?"), (stranger, 3, "admin token")):
        run = ingle(platform.home, "endpoint", "list", "--profile", str(path))
        assert (run.returncode, says in run.stderr, run.stdout) == (code, True, "")


def test_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for home in (tmp_path / "file" / "home", Path("/proc/nowhere")):
        for command in (["up"], ["db", "upgrade"], ["serve", "controller"]):
            run = ingle(home, *command)
            assert run.returncode == 2
            assert "choose a writable --home" in run.stderr
            assert "Traceback" not in run.stderr


def test_the_engine_is_another_program(platform: Installation) -> None:
    run = ingle(platform.home, "engine", "--help")
    assert run.returncode == 0
    assert "serve" in run.stdout
    hidden = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.modules['torch'] = None\nfrom control_plane.cli import main; main()",
            "model",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(platform.home),
    )
    assert hidden.returncode == 2
    assert "pip install 'ingle[engine]'" in hidden.stderr


def test_the_control_plane_loads_no_tensor_library_and_the_cli_little() -> None:
    program = (
        "import sys, control_plane.app\n"
        "assert not {'torch', 'numpy', 'data_plane', 'kernels'} & set(sys.modules), 'heavy'\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
    light = (
        "import sys, control_plane.cli.root\n"
        "assert not {'sqlalchemy', 'aiohttp', 'httpx', 'cryptography', 'alembic', 'opentelemetry'} & set(sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", light], timeout=60).returncode == 0


def test_help_of_every_command() -> None:
    from typer.main import get_command

    from control_plane.cli.root import app

    seen = []

    def walk(command: object, path: str) -> None:
        children = getattr(command, "commands", None)
        if children is None:
            assert getattr(command, "help", None), path
            seen.append(path)
        for name, child in (children or {}).items():
            walk(child, f"{path} {name}".strip())

    walk(get_command(app), "")
    assert {"up", "endpoint create", "key create", "serve gateway", "db upgrade", "usage"} <= set(seen)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("250ms", 0.25), ("30s", 30), ("5m", 300), ("1.5h", 5400), ("7d", 604_800)]
)
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == seconds


def test_a_closed_pipe_is_no_fault(platform: Installation) -> None:
    until(lambda: ingle(platform.home, "audit", "list", "-o", "json").returncode == 0, "the platform answers")
    command = " ".join(shlex.quote(part) for part in [*COMMAND, "audit", "list", "--limit", "1000"])
    run = subprocess.run(
        ["bash", "-c", f"{command} | head -c 1"],
        env=environment(platform.home),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in run.stderr
