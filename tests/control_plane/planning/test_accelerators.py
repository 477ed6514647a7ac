from __future__ import annotations

import pytest

from control_plane.domain import Rung
from control_plane.errors import ConfigError
from control_plane.planning.accelerators import catalogue, label, parse

ENTRY = """
counts = [1, 2]
[efficiency.gpu]
prefill = 0.5
bandwidth = 0.7
step_overhead_s = 0.0
sequence_overhead_s = 0.0
stage_s = 0.001
overlaps = true
measured = false
note = "assumed"
[starts.gpu]
place_s = 10.0
import_s = 5.0
load_gb_s = 2.0
wake_s = 0.5
wake_gb_s = 20.0
[[accelerator]]
name = "X1"
title = "an X1"
memory_gb = 8.0
bandwidth_gb_s = 100.0
bf16_tflops = 10.0
eight_bit_tflops = 20.0
source = "its maker"
"""


def test_what_the_platform_promises_is_in_the_catalogue() -> None:
    asked = ["RTX 4090", "L4", "A10G", "L40S", "A100 40GB", "A100 80GB", "H100", "H200", "MI300X", "cpu"]
    assert all(catalogue().find(name) is not None for name in asked)
    assert {count for one, count in catalogue().sizes() if one.name == "H100"} == {1, 2, 4, 8}
    assert [count for one, count in catalogue().sizes() if one.kind == "cpu"] == [1]


def test_every_figure_says_where_it_was_read() -> None:
    for one in catalogue().accelerator:
        assert one.source
        assert (one.price_per_hour is None) == (one.price_source is None)
        assert one.eight_bit_tflops > one.bf16_tflops
    assert not catalogue().efficiency["gpu"].measured


def test_the_warmer_the_sooner() -> None:
    starts = parse(ENTRY).starts["gpu"]
    assert [starts.seconds(rung, 8e9) for rung in Rung] == [19.5, 4.5, 0.9, 0.0]


@pytest.mark.parametrize("name", ["h100", "H-100", "H 100"])
def test_a_name_is_found_however_it_is_written(name: str) -> None:
    found = catalogue().find(name)
    assert found is not None
    assert (label(found, 1), label(found, 4)) == ("H100", "H100x4")
    assert catalogue().find("H1000") is None


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (("memory_gb = 8.0", "memory_gb = -1"), "accelerator.0.memory_gb"),
        (("memory_gb = 8.0", "memory = 8.0"), "accelerator.0.memory"),
        (("prefill = 0.5", "prefill = 1.5"), "efficiency.gpu.prefill"),
        (('source = "its maker"', 'source = ""'), "accelerator.0.source"),
        (('source = "its maker"', 'source = "its maker"\nprice_per_hour = 1.0'), "price_source"),
        (('source = "its maker"', 'source = "its maker"\nregions = ["here"]'), "regions_source"),
        (('name = "X1"', 'name = "X1"\naliases = ["x-1"]'), "given twice"),
        (('source = "its maker"', 'source = "its maker"\nkind = "cpu"'), "no efficiency or starts for cpu"),
        (("counts = [1, 2]", "counts = [1, 2"), "can't be read"),
    ],
)
def test_a_catalogue_that_is_wrong_names_the_field(change: tuple[str, str], field: str) -> None:
    assert parse(ENTRY).find("x1") is not None
    with pytest.raises(ConfigError, match=field.replace(".", r"\.")):
        parse(ENTRY.replace(*change))
