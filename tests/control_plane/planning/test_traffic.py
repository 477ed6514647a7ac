from __future__ import annotations

from pathlib import Path

import pytest

from control_plane.errors import InvalidInput
from control_plane.planning.traffic import DAILY, DAY, OFFICE, Profile, generate, read_trace

WEEK = Profile(0.05, 300, 100, hours=DAILY, weekend=0.4, bursts_per_day=6)


def test_the_same_seed_gives_the_same_requests() -> None:
    first, again, other = generate(WEEK, 2, 7), generate(WEEK, 2, 7), generate(WEEK, 2, 8)
    assert (first.at, first.inputs, first.outputs) == (again.at, again.inputs, again.outputs)
    assert first.at != other.at


def test_a_profile_is_kept() -> None:
    found = generate(WEEK, 7, 1)
    assert len(found) == pytest.approx(0.05 * 7 * DAY, rel=0.03)
    assert sum(found.inputs) / len(found) == pytest.approx(300, rel=0.03)
    assert sum(found.outputs) / len(found) == pytest.approx(100, rel=0.03)
    assert list(found.at) == sorted(found.at)
    night = sum(1 <= at % DAY / 3600 < 5 for at in found.at)
    noon = sum(10 <= at % DAY / 3600 < 14 for at in found.at)
    assert night < noon / 20
    assert found.seconds == 7 * DAY


def test_offices_are_empty_at_night() -> None:
    found = generate(Profile(0.05, 10, 10, hours=OFFICE, weekend=0.0), 7, 3)
    assert all(6 <= at % DAY / 3600 < 20 and at < 5 * DAY for at in found.at)


def test_bursts_bring_more_at_once() -> None:
    def busiest(profile: Profile) -> int:
        cells: dict[int, int] = {}
        for at in generate(profile, 2, 5).at:
            cells[int(at // 60)] = cells.get(int(at // 60), 0) + 1
        return max(cells.values())

    assert busiest(Profile(0.5, 10, 10, bursts_per_day=20, burst_factor=10)) > 2 * busiest(Profile(0.5, 10, 10))


@pytest.mark.parametrize(
    ("changes", "days", "param"),
    [
        ({"rate": 0.0}, 1, "rate"),
        ({"rate": float("nan")}, 1, "rate"),
        ({"input_tokens": 0}, 1, "input_tokens"),
        ({"hours": (1.0,) * 23}, 1, "hours"),
        ({"hours": (0.0,) * 24}, 1, "hours"),
        ({"rate": 9000.0}, 7, "rate"),
        ({"rate": 0.00001}, 0.01, "rate"),
        ({}, 0, "days"),
        ({}, 400, "days"),
    ],
)
def test_a_profile_that_cannot_be_names_the_field(changes: dict[str, object], days: float, param: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        generate(Profile(**({"rate": 1.0, "input_tokens": 10, "output_tokens": 10} | changes)), days, 1)  # type: ignore[arg-type]
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", "arrival_s,input_tokens,output_tokens\n105,20,2\n100,10,1\n"),
        ("t.csv", "id,output_tokens,arrival_s,input_tokens\na,2,105.0,20\nb,1,100.0,10\n"),
        ("t.jsonl", '{"arrival_s": 105, "input_tokens": 20, "output_tokens": 2}\n\n'
                    '{"arrival_s": 100, "input_tokens": 10, "output_tokens": 1, "user": "x"}\n'),
        ("t.jsonl", '{"timestamp": 105000, "input_length": 20, "output_length": 2}\n'
                    '{"timestamp": 100000, "input_length": 10, "output_length": 1}\n'),
    ],
)  # fmt: skip
def test_a_trace_is_read_and_put_in_order(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    found = read_trace(tmp_path / name)
    assert (list(found.at), list(found.inputs), list(found.outputs)) == ([0.0, 5.0], [10, 20], [1, 2])
    assert found.seconds == 3600
    assert found.mean_context() == 15.75


HEAD = "arrival_s,input_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("t.csv", HEAD + "1,2,3\nsoon,2,3\n", "line 3: arrival_s must be a number, not 'soon'"),
        ("t.csv", HEAD + "1,0,3\n", "line 2: input_tokens must lie between 1 and"),
        ("t.csv", HEAD + "1,2,nan\n", "line 2: output_tokens must lie between"),
        ("t.csv", HEAD + "1,2\n", "line 2: output_tokens is missing"),
        ("t.csv", "at,in,out\n1,2,3\n", "line 2: arrival_s is missing"),
        ("t.csv", HEAD, "has no request in it"),
        ("t.jsonl", '{"arrival_s": 1, "input_tokens": 2, "output_tokens": 3}\n{"arr\n', "line 2 is not JSON"),
        ("t.jsonl", "[1]\n", "line 1 is not a JSON object"),
        ("t.jsonl", '{"arrival_s": 1, "input_tokens": [2], "output_tokens": 3}\n', "line 1: input_tokens must be a"),
        ("t.jsonl", "x" * 70_000, "line 1 is longer than"),
    ],
)
def test_a_bad_trace_names_line_and_field(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidInput, match=says):
        read_trace(tmp_path / name)


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot read the trace"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInput, match="cannot read the trace"):
        read_trace(tmp_path / "binary.csv")
