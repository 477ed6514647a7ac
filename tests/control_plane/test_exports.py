"""Where spans and metrics of a region go: to its own collector, or nowhere that nobody vouched for."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from control_plane.client import AdminClient
from control_plane.config import RegionSettings
from control_plane.observe.exports import Export, Why, exports_of
from tests.control_plane.harness import chat, create, installed, until
from tests.control_plane.otlp import Collector, attributes, collecting
from tests.data_plane import tiny
from tests.data_plane.text.tokenizers_made import byte_level_fields

GLOBAL = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://g:4318"}
OWN = "http://c:4318"


@pytest.mark.parametrize(
    ("region", "environ", "expected"),
    [
        ({}, {}, Export(None, Why.OFF)),
        ({}, GLOBAL, Export("http://g:4318", Why.ENVIRONMENT)),
        ({}, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t"}, Export("http://t", Why.ENVIRONMENT)),
        ({"jurisdiction": "DE"}, {}, Export(None, Why.WITHHELD)),
        ({"jurisdiction": "DE"}, GLOBAL, Export(None, Why.WITHHELD)),
        ({"jurisdiction": "DE", "otlp_endpoint": OWN}, GLOBAL, Export(OWN, Why.REGION)),
        (
            {"otlp_endpoint": OWN},
            {**GLOBAL, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            Export(OWN, Why.REGION, "grpc"),
        ),
    ],
)
def test_where_a_region_sends(region: dict[str, Any], environ: Mapping[str, str], expected: Export) -> None:
    assert exports_of([RegionSettings(name="r", **region)], environ) == {"r": expected}


def test_a_replica_is_told_more_than_its_environment_says() -> None:
    assert Export("http://g:4318", Why.ENVIRONMENT).variables == {}
    assert Export(None, Why.OFF).variables == {}
    assert Export(None, Why.WITHHELD).variables == {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}
    own = Export(OWN, Why.REGION).variables
    assert own["OTEL_EXPORTER_OTLP_ENDPOINT"] == OWN
    assert own["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] == f"{OWN}/v1/traces"
    assert own["OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"] == f"{OWN}/v1/metrics"
    assert own["OTEL_EXPORTER_OTLP_HEADERS"] == own["OTEL_EXPORTER_OTLP_TRACES_HEADERS"] == ""
    assert Export(OWN, Why.REGION, "grpc").variables["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] == OWN


def settled(admin: AdminClient, name: str) -> dict[str, Any]:
    """What the evidence says of where it sends."""
    contents = [json.loads(line)["content"] for line in admin.evidence(name)]
    (said,) = (content for content in contents if content["kind"] == "exported")
    return {key: said[key] for key in ("region", "to", "why")}


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_nothing_of_a_region_comes_to_anothers_collector(protocol: str, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    tiny.write_gguf(tiny.make("llama"), model, **byte_level_fields(tiny.VOCABULARY))
    with ExitStack() as stack:
        collectors: dict[str, Collector] = {
            name: stack.enter_context(collecting()) for name in ("de-1", "fr-1", "environment")
        }
        where = {name: one.grpc if protocol == "grpc" else one.http for name, one in collectors.items()}
        regions = [
            {"name": "de-1", "jurisdiction": "DE", "otlp_endpoint": where["de-1"]},
            {"name": "fr-1", "jurisdiction": "FR", "otlp_endpoint": where["fr-1"]},
            {"name": "ae-1", "jurisdiction": "AE"},
            {"name": "any-1"},
        ]
        platform = stack.enter_context(
            installed(
                tmp_path / "home",
                INGLE_REPLICA_COMMAND=json.dumps([sys.executable, "-m", "data_plane", "serve"]),
                INGLE_REGIONS=json.dumps(regions),
                OTEL_EXPORTER_OTLP_ENDPOINT=where["environment"],
                OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
                OTEL_EXPORTER_OTLP_HEADERS="authorization=CANARY-environments",
                OTEL_BSP_SCHEDULE_DELAY="100",
                OTEL_METRIC_EXPORT_INTERVAL="300",
            )
        )
        program = platform.up()
        with platform.admin() as admin:
            for region in regions:
                name = region["name"].replace("-1", "-chat")
                url = create(admin, name, str(model), region=region["name"], idle_timeout=600)
                with platform.tenant(url, program.facts["key"], timeout=60) as tenant:
                    body = chat(f"CANARY-{name}", max_tokens=2, ignore_eos=True)
                    assert tenant.post("/chat/completions", json=body).status_code == 200
                (replica,) = admin.endpoint(name).replicas
                (said,) = admin.logs(name)
                assert said.replica == replica.id
            told = {name: settled(admin, f"{name[:-2]}-chat") for name in ("de-1", "fr-1", "ae-1", "any-1")}
        for name, collector in collectors.items():
            endpoint = "any-chat" if name == "environment" else name.replace("-1", "-chat")
            for span in (f"chat {endpoint}", f"cold_start {endpoint}", f"rollout {endpoint}", "POST /e/"):
                until(partial(collector.nth, span), f"{span} at {name}")
            until(partial(collector.metrics.issuperset, {"ingle.tokens.generated"}), f"metrics at {name}")
        assert program.stop() == 0
    withheld = [json.loads(line) for line in program.log().splitlines() if "telemetry.withheld" in line]
    assert [line["region"] for line in withheld] == ["ae-1"]
    expected = {"de-1": {"de-1"}, "fr-1": {"fr-1"}, "environment": {"any-1"}}
    assert {name: one.regions for name, one in collectors.items()} == expected
    for name, one in collectors.items():
        places = {attributes(span).get("ingle.region") for span in one.spans} - {None}
        assert places == expected[name]
        assert "CANARY" not in str(one.spans)
        if name != "environment":
            assert "CANARY" not in str(one.headers), "what one collector asks for is no other's to know"
    assert told == {
        "de-1": {"region": "de-1", "to": where["de-1"], "why": "region"},
        "fr-1": {"region": "fr-1", "to": where["fr-1"], "why": "region"},
        "ae-1": {"region": "ae-1", "to": None, "why": "withheld"},
        "any-1": {"region": "any-1", "to": where["environment"], "why": "environment"},
    }
