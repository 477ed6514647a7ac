from __future__ import annotations

import json
from dataclasses import replace

import pytest

from control_plane.errors import InvalidInput
from control_plane.planning.accelerators import catalogue
from control_plane.planning.fit import Fit, Machine, Precision, fit, machines, nearest, precision_for
from control_plane.planning.shapes import Shape, known_shape, known_shapes, parse_shape

DEMO, BIG = "smollm2-135m-instruct", "llama-3.1-70b-instruct"


def machine(name: str, count: int = 1) -> Machine:
    found = catalogue().find(name)
    assert found is not None
    return Machine(found, count, catalogue().efficiency[found.kind])


def shape(name: str) -> Shape:
    found = known_shape(name)
    assert found is not None
    return found


def demo() -> Fit:
    return fit(shape(DEMO), Precision.PACKED, None, machine("cpu"))


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        (DEMO, 0.1345), ("smollm2-1.7b-instruct", 1.71), ("qwen3-0.6b", 0.596), ("qwen3-8b", 8.19),
        ("qwen3-32b", 32.8), ("qwen2.5-7b-instruct", 7.62), ("llama-3.2-1b-instruct", 1.24),
        ("llama-3.1-8b-instruct", 8.03), (BIG, 70.6), ("mistral-7b-instruct-v0.3", 7.25),
    ],
)  # fmt: skip
def test_parameters_are_those_that_the_models_makers_count(model: str, billions: float) -> None:
    assert shape(model).parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_a_model_is_known_by_its_name_on_the_hub_too() -> None:
    assert known_shape("Meta-Llama/Llama-3.1-8B-Instruct") is known_shapes()["llama-3.1-8b-instruct"]
    assert known_shape("my-own-model") is None


def test_memory() -> None:
    found = demo()
    assert found.weights == pytest.approx(98.4e6, rel=0.03), "its file has 98,362,432 bytes"
    assert found.kv_per_token == 23_040 / 2, "half of what `ingle model inspect` says for 16 bits"
    wide = fit(shape(DEMO), Precision.BFLOAT16, None, machine("L4"))
    assert wide.kv_per_token == 23_040
    assert wide.weights == shape(DEMO).parameters * 2


@pytest.mark.parametrize(
    ("what", "measured", "estimate"),
    [
        ("one stream, tokens/s", 229, lambda f: f.tokens_per_second(1, 192)),
        ("8 streams, tokens/s", 674, lambda f: f.tokens_per_second(8, 192)),
        ("32 streams, tokens/s", 1061, lambda f: f.tokens_per_second(32, 192)),
        ("64 streams, tokens/s", 1260, lambda f: f.tokens_per_second(64, 192)),
        ("prefill of 1,024 tokens, tokens/s", 2731, lambda f: 1024 / f.prefill_seconds(1024)),
        ("decode at 4,096 tokens of context, tokens/s", 164, lambda f: f.tokens_per_second(1, 4128)),
    ],
)
def test_the_roofline_agrees_with_what_the_readme_measured(what: str, measured: float, estimate: object) -> None:
    assert callable(estimate)
    assert estimate(demo()) == pytest.approx(measured, rel=0.25), what


@pytest.mark.parametrize(
    ("model", "context", "name", "count", "fits"),
    [
        ("llama-3.1-8b-instruct", 8192, "L4", 1, True),
        ("llama-3.1-8b-instruct", 131_072, "L4", 1, False),
        (BIG, 8192, "H100", 1, False),
        (BIG, 8192, "H100", 2, True),
        (BIG, 8192, "MI300X", 1, True),
    ],
)
def test_what_fits_where(model: str, context: int, name: str, count: int, fits: bool) -> None:
    found = fit(shape(model), Precision.BFLOAT16, context, machine(name, count))
    assert found.fits is fits
    assert (found.users >= 1) is fits


def test_the_nearest_that_fits_is_the_one_with_the_least_memory() -> None:
    every = machines(catalogue())
    single = nearest(shape(BIG), Precision.BFLOAT16, 8192, machines(catalogue(), [1]))
    assert single is not None
    assert single.name == "MI300X"
    small = nearest(shape("llama-3.1-8b-instruct"), Precision.BFLOAT16, 32_768, every)
    assert small is not None
    assert small.memory == min(one.memory for one in every if one.accelerator.memory_gb * one.count >= 24)
    huge = shape(BIG).model_copy(update={"num_layers": 4000})
    assert nearest(huge, Precision.BFLOAT16, 8192, every) is None


def test_more_at_once_is_slower_for_each_and_faster_for_all() -> None:
    for one in machines(catalogue()):
        found = fit(shape(DEMO), precision_for(one.accelerator.kind), 2048, one)
        assert found.step_seconds(64, 500) > found.step_seconds(1, 500)
        assert found.tokens_per_second(64, 500) > found.tokens_per_second(1, 500)
        assert found.prefill_seconds(2000) > found.prefill_seconds(200)


def test_the_engines_own_bounds_bind() -> None:
    bound = fit(shape(DEMO), Precision.PACKED, 1024, replace(machine("cpu"), kv_tokens=4096, max_seqs=3))
    assert (bound.kv_tokens, bound.users, bound.slots(1024), bound.slots(2048)) == (4096, 3, 3, 2)


def test_settings_that_cannot_be_are_named() -> None:
    for call, field in (
        (lambda: fit(shape(DEMO), Precision.PACKED, 8193, machine("cpu")), "context"),
        (lambda: fit(shape(DEMO), Precision.PACKED, None, machine("H100")), "precision"),
        (lambda: precision_for("gpu", "int3"), "precision"),
    ):
        with pytest.raises(InvalidInput) as caught:
            call()
        assert caught.value.param == field
    assert precision_for("gpu", "auto") is Precision.BFLOAT16
    assert precision_for("cpu") is Precision.PACKED


def test_a_shape_is_read_from_what_inspect_prints() -> None:
    printed = shape(DEMO).model_dump() | {"path": "/models/x.gguf", "rope": {"theta": 1e5}, "norm_eps": 1e-5}
    assert parse_shape(json.dumps(printed), "x.json") == shape(DEMO)
    with pytest.raises(InvalidInput, match=r"x\.json: num_layers"):
        parse_shape(json.dumps(printed | {"num_layers": 0}), "x.json")
    with pytest.raises(InvalidInput, match=r"x\.json"):
        parse_shape("[]", "x.json")
