"""`ingle plan` as people and scripts meet it. It needs no installation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from control_plane.planning.shapes import known_shape
from tests.control_plane.harness import ingle

DAY = "".join(f"{hour * 3600 + place * 20},400,80\n" for hour in range(8, 18) for place in range(60))
TRACE = "arrival_s,input_tokens,output_tokens\n" + DAY


def rows(home: Path, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    run = ingle(home, *arguments, "-o", "json")
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout), run.stderr


def test_a_trace_becomes_hours_and_money(tmp_path: Path) -> None:
    trace = tmp_path / "day.csv"
    trace.write_text(TRACE)
    found, said = rows(
        tmp_path, "plan", "-m", "llama-3.1-8b-instruct", "--trace", str(trace), "-a", "L4", "--ttft", "2s"
    )
    by_rung = {row["rung"]: row for row in found}
    assert list(by_rung) == ["cold", "ember", "asleep", "hot"]
    cold, hot = by_rung["cold"], by_rung["hot"]
    assert cold["cost"] == pytest.approx(cold["accelerator_hours"] * 0.684, abs=0.01)
    assert hot["within"] == 1.0
    assert hot["cost"] > cold["cost"]
    assert by_rung["ember"]["start_seconds"] < cold["start_seconds"]
    assert by_rung["asleep"]["wakes"] > 0
    assert "600 requests over" in said
    assert "assumed, not measured" in said
    assert "cheapest" in said


def test_own_prices_and_several_accelerators_of_a_replica(tmp_path: Path) -> None:
    trace, book = tmp_path / "day.csv", tmp_path / "book.yaml"
    trace.write_text(TRACE)
    book.write_text("currency: EUR\nmodels: {}\naccelerators: {h100: 2.0, '*': 9.0}\n")
    plan = ("plan", "-m", "llama-3.1-70b-instruct", "--trace", str(trace), "--rung", "cold", "--prices", str(book))
    found, _ = rows(tmp_path, *plan, "-a", "H100", "--count", "2", "--cold-start", "90s")
    (row,) = found
    assert row["accelerator"] == "H100x2"
    assert row["start_seconds"] == 90
    assert row["accelerator_hours"] == pytest.approx(2 * row["replica_hours"], abs=0.02)
    assert row["cost"] == pytest.approx(row["accelerator_hours"] * 2.0, abs=0.03)


def test_a_book_that_prices_rungs_is_believed(tmp_path: Path) -> None:
    trace, book = tmp_path / "day.csv", tmp_path / "book.yaml"
    trace.write_text(TRACE)
    plan = ["plan", "-m", "llama-3.1-8b-instruct", "--trace", str(trace), "-a", "L4", "--prices", str(book)]
    plan += ["--rung", "ember", "--rung", "asleep"]
    book.write_text("accelerators: {l4: 1.0, l4/ember: 0.5, '*/asleep': 0.25}\n")
    (ember, asleep), said = rows(tmp_path, *plan)
    for row, price in ((ember, 0.5), (asleep, 0.25)):
        assert row["resting_hours"] > 1
        assert row["cost"] == pytest.approx(row["replica_hours"] + price * row["resting_hours"], abs=0.02)
    assert "share of its accelerator" not in said, "nothing is assumed that the book says"
    book.write_text("accelerators: {l4: 1.0, l4/ember: 0.5}\n")
    (again, shared), said = rows(tmp_path, *plan)
    assert again == ember
    assert shared["cost"] == pytest.approx(shared["replica_hours"] + 0.1 * shared["resting_hours"], abs=0.02)
    assert "where the price book doesn't say: asleep 10%" in said
    book.write_text("accelerators: {l4: 1.0, l4/tepid: 0.5}\n")
    wrong = ingle(tmp_path, *plan)
    assert (wrong.returncode, "accelerators.l4/tepid: 'tepid' isn't one of" in wrong.stderr) == (2, True)


def test_a_profile_and_a_shape_of_ones_own(tmp_path: Path) -> None:
    shape, demo = tmp_path / "shape.json", known_shape("smollm2-135m-instruct")
    assert demo is not None
    shape.write_text(json.dumps(demo.model_dump()))
    plan = ("plan", "--shape", str(shape), "--rate", "0.05", "--days", "1", "--day", "office", "-a", "cpu")
    found, said = rows(tmp_path, *plan, "--rung", "hot")
    assert found[0]["cost"] is None, "nobody knows what this machine costs"
    assert "none keeps the bound" in said
    assert rows(tmp_path, *plan, "--rung", "hot")[0] == found, "the same seed gives the same plan"


def test_what_fits_and_what_is_known(tmp_path: Path) -> None:
    found, _ = rows(tmp_path, "plan", "fit", "-m", "llama-3.1-70b-instruct", "--count", "1")
    assert {row["accelerator"] for row in found if row["fits"]} == {"MI300X"}
    edge, _ = rows(
        tmp_path, "plan", "fit", "-m", "llama-3.1-8b-instruct", "-a", "H100", "--count", "1", "--preset", "edge"
    )
    assert (edge[0]["cache_tokens"], edge[0]["users"]) == (16_384, 2)
    known, _ = rows(tmp_path, "plan", "accelerators")
    assert {"RTX4090", "L4", "A10G", "L40S", "A100-40GB", "A100-80GB", "H100", "H200", "MI300X", "cpu"} <= {
        row["name"] for row in known
    }
    assert all(row["source"] for row in known)
    table = ingle(tmp_path, "plan", "accelerators")
    assert table.stdout.splitlines()[0].startswith("name")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give --model or --shape"),
        (("-m", "m", "--shape", "x.json"), "give --model or --shape"),
        (("-m", "smollm2-135m-instruct"), "give --trace or --rate"),
        (("-m", "unheard-of"), "the shape of 'unheard-of' isn't known"),
        (("-m", "qwen3-8b", "-a", "Z80"), "'Z80' isn't one of cpu"),
        (("-m", "qwen3-8b", "--rung", "tepid"), "rung must be one of cold"),
        (("-m", "qwen3-8b", "--preset", "fast"), "preset must be one of chat"),
        (("-m", "qwen3-8b", "--day", "dull"), "day must be one of flat"),
        (("-m", "qwen3-8b", "--context", "999999"), "context must lie between 1 and the model's 40960"),
        (("-m", "llama-3.1-70b-instruct", "-a", "L4"), "doesn't fit L4"),
        (("-m", "qwen3-8b", "--prices", "none.yaml"), "none.yaml can't be read"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_says_why(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    traffic = () if "--trace" in says else ("--rate", "0.01", "--days", "0.2")
    run = ingle(tmp_path, "plan", "--day", "flat", *traffic, *arguments)
    assert run.returncode == 2
    assert says in run.stderr
    assert run.stdout == ""


def test_a_bad_trace_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text(TRACE + "100,many,3\n")
    run = ingle(tmp_path, "plan", "-m", "qwen3-8b", "--trace", str(tmp_path / "bad.csv"))
    assert run.returncode == 2
    assert "bad.csv line 602: input_tokens must be a number, not 'many'" in run.stderr
