"""The OpenAPI document: valid, of the fields that are really read, and true of what a replica answers."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openapi_spec_validator import validate

from control_plane.gateway import server as gateway
from data_plane.api.openapi import document
from data_plane.api.parameters import ModelLimits
from data_plane.loading.sources import pull
from tests.contract import fuzz
from tests.data_plane.replica import Replica, running

API = Path(fuzz.__file__).parents[2] / "data_plane" / "api"
BASE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/embeddings": {"input": "x"},
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """Of little context: what a request asks for ends soon."""
    with running(pull(fuzz.MODEL), tmp_path_factory.mktemp("fuzz") / "log", *fuzz.FLAGS) as replica:
        yield replica


def properties(path: str, limits: ModelLimits | None = None) -> dict[str, Any]:
    body = document(limits)["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    found: dict[str, Any] = body["properties"]
    return found


@pytest.mark.parametrize("limits", [None, ModelLimits(2048, 1000)])
def test_it_is_valid(limits: ModelLimits | None) -> None:
    validate(document(limits))


def test_the_gateway_serves_it_for_any_model() -> None:
    kept = Path(gateway.__file__).with_name("openapi.json")
    assert json.loads(kept.read_text()) == document(), "write it anew: python -m data_plane.api.openapi > " + str(kept)


def test_bounds_are_the_models() -> None:
    told = properties("/v1/chat/completions", ModelLimits(2048, 1000))
    assert (told["max_tokens"]["maximum"], told["top_k"]["maximum"]) == (2048, 1000)
    assert "maximum" not in properties("/v1/chat/completions")["max_tokens"]


def test_every_field_that_is_read_by_name_is_told() -> None:
    told = {name for path in BASE for name in properties(path)}
    read = {
        call.args[0].value
        for file in API.glob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "fields"
        and call.args
        and isinstance(call.args[0], ast.Constant)
    }
    assert len(read) > 20
    assert read <= told


@pytest.mark.parametrize("path", BASE)
def test_every_field_that_is_told_is_read(path: str, small: Replica) -> None:
    """What no schema allows is refused, by the field's name."""
    for name in properties(path):
        answer = small.post(path, {**BASE[path], name: [{"no": {"such": "value"}}]})
        assert answer.status_code == 400, (name, answer.text)
        assert answer.json()["error"]["param"].split("[")[0].split(".")[0] == name, answer.text


def test_a_replica_serves_its_own(small: Replica) -> None:
    served = small.client.get("/openapi.json")
    limits = ModelLimits(small.ready["max_model_len"], 49152)
    assert served.json() == document(limits)
    assert httpx.get(f"{small.client.base_url}/openapi.json").status_code == 200


def test_no_request_that_it_allows_or_forbids_is_answered_with_a_fault(small: Replica) -> None:
    """`make fuzz` sends more of them."""
    statuses = fuzz.fuzz(small, 300, 7)
    assert statuses.total() >= 250
    assert {200, 400} <= statuses.keys()
    assert small.process.poll() is None
