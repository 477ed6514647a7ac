"""One platform with a real engine: what it says of itself exists, is well-formed, and agrees with what happened."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families

from control_plane.alerts.catalogue import series_needed
from control_plane.alerts.rollup import READ
from control_plane.client import trust
from control_plane.observe import grafana
from tests.control_plane.harness import Installation, create, installed, replica_pids, until
from tests.data_plane import tiny
from tests.data_plane.text.tokenizers_made import byte_level_fields

TELEMETRY = {
    "gen_ai_server_request_duration_seconds_count", "gen_ai_server_time_to_first_token_seconds_count",
    "gen_ai_server_time_per_output_token_seconds_count",
    "ingle_requests_running", "ingle_requests_waiting", "ingle_requests_held",
    "ingle_tokens_prompt_total", "ingle_tokens_generated_total", "ingle_tokens_cached_total", "ingle_tokens_total",
    "ingle_kv_usage", "ingle_prefix_hit_ratio", "ingle_engine_preemptions_total", "ingle_engine_batch_tokens",
    "ingle_engine_step_duration_seconds_count", "ingle_engine_bandwidth_utilization", "ingle_memory_used_bytes",
    "ingle_engine_out_of_memory_total", "ingle_errors_total", "ingle_requests_errors_total", "ingle_replicas_desired",
    "ingle_replicas_ready", "ingle_cold_start_seconds_count", "ingle_certificate_not_after_seconds",
    "ingle_cost_per_second",
}  # fmt: skip
"""What the interface promises."""


@dataclass
class Live:
    platform: Installation
    admin: str
    base: str
    key: str

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(self.admin + path, headers=headers, verify=trust(self.platform.ca_file), trust_env=False)

    def samples(self) -> list[Any]:
        texts = [self.get(path).text for path in ("/metrics", "/metrics/replicas")]
        return [
            sample for text in texts for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def total(self, name: str, **labels: str) -> float:
        wanted = labels.items()
        return sum(float(s.value) for s in self.samples() if s.name == name and wanted <= s.labels.items())

    def chat(self, tenant: httpx.Client, **fields: Any) -> httpx.Response:
        body = {"model": "m", "messages": [{"role": "user", "content": "count"}], "ignore_eos": True, **fields}
        return tenant.post("/chat/completions", json=body)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("live")
    model = folder / "model.gguf"
    tiny.write_gguf(tiny.make("llama"), model, **byte_level_fields(tiny.VOCABULARY))
    command = json.dumps([sys.executable, "-m", "data_plane", "serve"])
    more = {"INGLE_REPLICA_COMMAND": command, "INGLE_ALERTS__INTERVAL": "0.5"}
    with installed(folder / "home", **more) as platform:
        program = platform.up()
        with platform.admin() as client:
            base = create(client, "chat", str(model), min_replicas=1, max_replicas=1)
            tenant = client.tenants()[0].name
            client.limit_tenant(tenant, {"monthly_budget": 5.0})
        live = Live(platform, program.facts["admin"], base, program.facts["key"])
        with platform.tenant(base, live.key) as tenant_client:
            assert live.chat(tenant_client, max_tokens=5).status_code == 200
            assert live.chat(tenant_client, max_tokens=5, stream=True).status_code == 200
            assert live.chat(tenant_client, max_tokens=-1).status_code == 400
            assert tenant_client.post("/nonsense", json={}).status_code == 404
        yield live


def test_every_name_of_the_interface_is_there(live: Live) -> None:
    def missing() -> set[str]:
        return TELEMETRY - {sample.name for sample in live.samples()}

    until(lambda: not missing(), f"{missing()} are scraped")


def test_every_series_of_the_dashboards_and_the_alerts_is_there(live: Live) -> None:
    wanted = grafana.queried() | series_needed() | READ

    def missing() -> set[str]:
        return wanted - {sample.name for sample in live.samples()}

    until(lambda: not missing(), f"{missing()} are scraped")


@pytest.mark.parametrize("board", grafana.DASHBOARDS, ids=lambda board: board.name)
def test_the_dashboards_in_the_repository_are_the_codes(board: grafana.Dashboard) -> None:
    text = (grafana.FOLDER / f"{board.name}.json").read_text()
    assert text == grafana.render(board), "run: python -m control_plane.observe.grafana"
    body = json.loads(text)
    variables = {variable["name"] for variable in body["templating"]["list"]} | {
        "__rate_interval",
        "__range",
        "__range_s",
    }
    used = {name for panel in body["panels"] for target in panel["targets"]
            for name in re.findall(r"\$(\w+)", target["expr"])}  # fmt: skip
    assert used <= variables


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's package prometheus")
def test_prometheus_understands_every_query(tmp_path: Path) -> None:
    lines = []
    for board in grafana.DASHBOARDS:
        for panel in json.loads(grafana.render(board))["panels"]:
            for target in panel["targets"]:
                text = target["expr"].replace("$__rate_interval", "5m").replace("$__range_s", "3600")
                lines.append(text.replace("$__range", "1h"))
    rules = [{"record": f"q{index}", "expr": text} for index, text in enumerate(lines)]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "g", "rules": rules}]}))
    for arguments in (
        ["check", "rules", str(file)],
        ["check", "config", "--syntax-only", "infra/prometheus/prometheus.yml"],
    ):
        done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_both_formats_are_well_formed_and_labels_are_bounded(live: Live) -> None:
    text = live.get("/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert text.headers["content-type"].startswith("application/openmetrics-text")
    families = {family.name for family in open_metrics(text.text)}  # type: ignore[no-untyped-call]
    assert {"ingle_requests", "ingle_requests_running", "gen_ai_server_time_to_first_token_seconds"} <= families
    replicas = live.get("/metrics/replicas").text
    helps = Counter(line.split()[2] for line in replicas.splitlines() if line.startswith("# HELP"))
    assert set(helps.values()) == {1}
    with live.platform.admin() as client:
        (replica,) = client.endpoint("chat").replicas
    for family in text_string_to_metric_families(replicas):
        for sample in family.samples:
            assert sample.labels["replica"] == replica.id
            assert (sample.labels["endpoint"], sample.labels["region"]) == ("chat", "local-eu")


def test_series_of_an_endpoint_go_with_it(live: Live) -> None:
    with live.platform.admin() as client:
        client.create_endpoint({"name": "passing", "region": "local-eu", "model": "no-such-model"})
        until(lambda: client.endpoint("passing").state == "failed", "it failed")
        until(lambda: live.total("ingle_endpoint_failed", endpoint="passing") == 1, "it shows")
        assert live.total("ingle_start_failures_total", endpoint="passing") >= 1
        client.delete_endpoint("passing")
    until(lambda: not [s for s in live.samples() if s.labels.get("endpoint") == "passing"], "its series are gone")


def lines_of(reply: httpx.Response) -> Iterator[str]:
    """Lines as event streams have them; httpx would also end one at U+2028 and its like, which a random model says."""
    rest = ""
    for text in reply.iter_text():
        *lines, rest = (rest + text).split("\n")
        yield from lines


def test_totals_agree_with_the_ledger_and_with_what_was_sent(live: Live) -> None:
    """Plain replies, streams, refusals, clients that leave, and a replica that is killed under them."""
    names = ("requests", "prompt_tokens", "completion_tokens")

    def ledger() -> dict[str, int]:
        with live.platform.admin() as client:
            (row,) = client.usage(endpoint="chat")
            return {name: getattr(row, name) for name in names}

    def scraped() -> dict[str, float]:
        kinds = {f"{kind}_tokens": live.total("ingle_tokens_total", endpoint="chat", kind=kind)
                 for kind in ("prompt", "completion")}  # fmt: skip
        return {"requests": live.total("ingle_requests_total", endpoint="chat"), **kinds}

    def settled() -> bool:
        return live.total("ingle_requests_running", endpoint="chat") == 0 and live.total("ingle_usage_pending") == 0

    until(settled, "nothing is under way")
    books, metrics = ledger(), scraped()
    sent: Counter[str] = Counter()
    lock = threading.Lock()

    def plain(tenant: httpx.Client) -> None:
        reply = live.chat(tenant, max_tokens=7)
        with lock:
            sent["requests"] += 1
            sent[f"status_{reply.status_code}"] += 1
            if reply.status_code == 200:
                for name in names[1:]:
                    sent[name] += reply.json()["usage"][name]

    def stream(tenant: httpx.Client, leave_after: int) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "count"}], "max_tokens": 60, "stream": True}
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        usage, frames = None, 0
        with tenant.stream("POST", "/chat/completions", json=body) as reply, contextlib.suppress(httpx.HTTPError):
            for line in lines_of(reply):
                if line.startswith("data: {"):
                    frames += 1
                    usage = json.loads(line[6:]).get("usage") or usage
                if leave_after and frames >= leave_after:
                    break
        with lock:
            sent["requests"] += 1
            sent["left" if leave_after else "whole"] += 1
            if usage:
                for name in names[1:]:
                    sent[name] += usage[name]

    def work(index: int) -> None:
        with live.platform.tenant(live.base, live.key) as tenant:
            for turn in range(6):
                if (index + turn) % 3 == 0:
                    plain(tenant)
                else:
                    stream(tenant, leave_after=0)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(settled, "all has ended")

    def grown(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
        return {name: after[name] - before[name] for name in names}

    wanted = {name: sent[name] for name in names}
    assert sent["requests"] == 36
    until(lambda: grown(books, ledger()) == wanted, f"the ledger has {wanted}")
    assert grown(metrics, scraped()) == wanted

    assert live.total("ingle_requests_total", outcome="refused") == 0
    # with faults the driver can't know what was billed, but ledger and metrics must still be the same
    books, metrics = ledger(), scraped()
    with live.platform.tenant(live.base, live.key, timeout=30) as tenant:
        for _ in range(5):
            stream(tenant, leave_after=3)
        assert live.chat(tenant, max_tokens=-1).status_code == 400
        cut = threading.Thread(target=stream, args=(tenant, 0))
        cut.start()
        (pid,) = replica_pids(live.platform).values()
        os.kill(pid, signal.SIGKILL)
        cut.join()
        until(lambda: live.chat(tenant, max_tokens=3).status_code == 200, "another replica serves")
    until(settled, "all has ended")

    def sent_on() -> dict[str, float]:
        """What the metrics say, without requests that were refused before they went to a replica."""
        return scraped() | {"requests": scraped()["requests"] - live.total("ingle_requests_total", outcome="refused")}

    until(lambda: grown(books, ledger()) == grown(metrics, sent_on()), "ledger and metrics agree")
    assert grown(books, ledger())["requests"] >= 8
