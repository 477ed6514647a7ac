"""A real Prometheus, a real Alertmanager and somebody who listens to it, on ports of their own."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from control_plane.alerts.rules import text
from tests.control_plane.harness import free_port, serving, until

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("prometheus-alertmanager") is None,
    reason="needs Debian's packages prometheus and prometheus-alertmanager",
)


@dataclass
class Listener:
    """Keeps what is posted to it, as (path, headers, body)."""

    url: str
    posts: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    answer: int = 200
    """The status of its answers."""

    def told(self, alert: str, status: str) -> dict[str, Any] | None:
        """The first word of `alert` with that status, in Alertmanager's format."""
        for _, _, body in list(self.posts):
            for item in body.get("alerts", ()):
                if item["labels"].get("alertname") == alert and item["status"] == status:
                    return dict(item)
        return None


@contextmanager
def listening() -> Iterator[Listener]:
    listener = Listener("")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if listener.answer < 300:
                listener.posts.append((self.path, dict(self.headers.items()), body))
            self.send_response(listener.answer)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        listener.url = f"http://127.0.0.1:{server.server_port}/hook"
        with serving(server):
            yield listener


@dataclass(frozen=True)
class Prometheus:
    url: str

    def ask(self, expression: str) -> list[dict[str, Any]]:
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, trust_env=False).json()
        assert answer["status"] == "success", answer
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found


@contextmanager
def watching(folder: Path, admin_url: str, ca_file: str, hook: str, *, scale: float) -> Iterator[Prometheus]:
    """Prometheus scrapes the admin listener twice a second, by rules whose windows are `scale` of the real ones."""
    folder.mkdir(parents=True, exist_ok=True)
    port, alerts_port = free_port(), free_port()
    address = admin_url.removeprefix("https://")
    job = {"scheme": "https", "tls_config": {"ca_file": ca_file}, "static_configs": [{"targets": [address]}]}
    configuration = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
        "rule_files": ["rules.yml"],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{alerts_port}"]}]}]},
        "scrape_configs": [
            {"job_name": "ingle", **job},
            {"job_name": "ingle-replicas", "metrics_path": "/metrics/replicas", **job},
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    (folder / "rules.yml").write_text(text(scale=scale, interval=0.5 / scale))
    route = {"receiver": "hook", "group_by": ["..."], "group_wait": "0s", "group_interval": "500ms"}
    receivers = [{"name": "hook", "webhook_configs": [{"url": hook, "send_resolved": True}]}]
    (folder / "alertmanager.yml").write_text(yaml.safe_dump({"route": route, "receivers": receivers}))
    commands = [
        ["prometheus-alertmanager", "--config.file=alertmanager.yml", "--storage.path=alerts",
         f"--web.listen-address=127.0.0.1:{alerts_port}", "--cluster.listen-address="],
        ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data",
         f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage"],
    ]  # fmt: skip
    with (folder / "log").open("w") as log:
        processes = [subprocess.Popen(command, cwd=folder, stdout=log, stderr=log) for command in commands]
        try:
            for place in (port, alerts_port):
                until(lambda place=place: _ready(f"http://127.0.0.1:{place}"), "monitoring is up")  # type: ignore[misc]
            yield Prometheus(f"http://127.0.0.1:{port}")
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(20)


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
