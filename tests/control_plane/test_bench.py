"""The load driver against a real server whose timing and tokens are known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from control_plane.bench.driver import Driver, Target
from control_plane.bench.report import Slo, percentile, plot, spread, summarize
from control_plane.bench.workload import Lengths, Workload, from_trace, poisson
from control_plane.errors import InvalidInput

TOKENS = 5


class FakeServer:
    """Streams TOKENS chunks and counts how many requests are open at once."""

    def __init__(self) -> None:
        self.open = self.most_open = self.seen = 0
        self.bodies: list[dict[str, object]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.seen += 1
        if self.bodies[-1]["prompt"] == "refuse":
            return web.json_response({"error": {"message": "no"}}, status=429)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(TOKENS):
            await response.write(b'data: {"choices":[{"text":"x"}]}\n\n')
            await asyncio.sleep(0.002)
        usage = {"prompt_tokens": 7, "completion_tokens": TOKENS}
        await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
        self.open -= 1
        return response


@pytest.fixture
async def server() -> AsyncIterator[tuple[FakeServer, str]]:
    fake = FakeServer()
    app = web.Application()
    app.router.add_post("/v1/completions", fake.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    yield fake, f"http://{host}:{port}/v1"
    await runner.cleanup()


WORKLOAD = Workload(Lengths(4, 4), Lengths(8, 8))


async def test_closed_loop_keeps_the_concurrency_and_counts_every_token(server: tuple[FakeServer, str]) -> None:
    fake, url = server
    async with Driver(Target(url, "m", extra={"seed": 3}), 100) as driver:
        outcomes = await driver.closed(WORKLOAD.requests(), 20, 4)
    summary = summarize("4", outcomes, Slo())
    assert (fake.seen, fake.most_open) == (20, 4)
    assert (summary.requests, summary.errors, summary.output_tokens, summary.input_tokens) == (20, 0, 100, 140)
    assert all(len(outcome.arrivals) == TOKENS and outcome.ttft > 0 and outcome.tpot > 0 for outcome in outcomes)
    assert fake.bodies[0]["seed"] == 3
    assert fake.bodies[0]["max_tokens"] == 8


async def test_open_loop_does_not_wait_for_answers(server: tuple[FakeServer, str]) -> None:
    fake, url = server
    async with Driver(Target(url, "m"), 100) as driver:
        outcomes = await driver.open(WORKLOAD.requests(iter([0.0] * 12)))
    assert len(outcomes) == 12
    assert fake.most_open == 12


async def test_failures_are_counted_by_kind_and_are_never_good(server: tuple[FakeServer, str]) -> None:
    _, url = server
    async with Driver(Target(url, "m"), 10) as driver:
        request = next(WORKLOAD.requests())
        refused = await driver.send(type(request)(0, "refuse", 1))
    async with Driver(Target("http://127.0.0.1:9/v1", "m"), 10) as driver:
        lost = await driver.send(request)
    summary = summarize("x", [refused, lost], Slo(ttft=10))
    assert summary.error_kinds == {"HTTP 429": 1, "ClientConnectorError": 1}
    assert summary.goodput_per_s == 0


def test_same_seed_same_requests_and_lengths_within_bounds() -> None:
    workload = Workload(Lengths.parse("10-20", "--input"), Lengths.parse("8~3", "--output"), shared_prefix=5, seed=4)
    first = [request for request, _ in zip(workload.requests(), range(50), strict=False)]
    again = [request for request, _ in zip(workload.requests(), range(50), strict=False)]
    assert first == again
    assert {len(request.prompt.split()) for request in first} <= set(range(10, 21))
    assert len({tuple(request.prompt.split()[:5]) for request in first}) == 1
    assert all(1 <= request.max_tokens <= 20 for request in first)


@pytest.mark.parametrize("text", ["", "a", "0", "5-2", "-3", "1.5", "9999999"])
def test_bad_lengths_name_their_option(text: str) -> None:
    with pytest.raises(InvalidInput, match="--input"):
        Lengths.parse(text, "--input")


def test_poisson_arrivals_have_the_rate() -> None:
    times = list(poisson(50, 100, seed=1))
    assert times == sorted(times)
    assert all(0 < at < 100 for at in times)
    assert 4700 < len(times) < 5300


def test_a_trace_keeps_order_and_names_a_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 3000, "input_length": 5, "output_length": 2}, {"timestamp": 1000, "input_length": 3,
            "output_length": 9}]  # fmt: skip
    path.write_text("\n".join(json.dumps(row) for row in rows))
    requests = list(from_trace(path, WORKLOAD))
    assert [(r.at, len(r.prompt.split()), r.max_tokens) for r in requests] == [(0.0, 3, 9), (2.0, 5, 2)]
    path.write_text('{"timestamp": 1}')
    with pytest.raises(InvalidInput, match="line 1"):
        list(from_trace(path, WORKLOAD))


def test_percentiles_interpolate() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert percentile([5.0], 0.99) == 5.0
    assert spread([0.001, 0.003]).p50 == 2.0
    assert spread([]).p99 == 0.0


async def test_the_plot_is_a_page_of_its_own(server: tuple[FakeServer, str]) -> None:
    _, url = server
    async with Driver(Target(url, "m"), 10) as driver:
        outcomes = await driver.closed(WORKLOAD.requests(), 2, 1)
    page = plot("<m>", [summarize("1", outcomes, Slo())])
    assert page.count("<polyline") == 4
    assert "&lt;m&gt;" in page
    assert "http" not in page
