"""A replica that costs next to nothing, and a proxy without any duties: what a gateway is measured against.

`… replica MODEL --host H --port P --name N` speaks the replica's contract. A body's `max_tokens` says how many frames a
stream has, its `pace_ms` how far they are apart. `… bare UPSTREAM PORT` passes every request on, and streams.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

import aiohttp
import uvloop
from aiohttp import web

USAGE = {"prompt_tokens": 8, "completion_tokens": 8, "cached_tokens": 0}
FRAME = {
    "id": "chatcmpl-1",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "bench",
    "choices": [{"index": 0, "delta": {"content": "word "}, "finish_reason": None}],
}
REPLY = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "bench",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "word " * 8}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 8, "completion_tokens": 8, "total_tokens": 16},
}
_FRAME = b"data: " + json.dumps(FRAME).encode() + b"\n\n"
_LAST = b": usage " + json.dumps(USAGE).encode() + b"\n\ndata: [DONE]\n\n"
_REPLY = json.dumps(REPLY).encode()


async def answer(request: web.BaseRequest) -> web.StreamResponse:
    if request.path == "/health":
        return web.json_response({"status": "ok", "running": 0, "waiting": 0, "kv_usage": 0.0})
    body = json.loads(await request.read() or b"{}")
    if not body.get("stream"):
        headers = {"content-type": "application/json", "x-ingle-usage": json.dumps(USAGE)}
        return web.Response(body=_REPLY, headers=headers)
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    pace = body.get("pace_ms", 0) / 1000
    for _ in range(body.get("max_tokens", 8)):
        await response.write(_FRAME)
        if pace:
            await asyncio.sleep(pace)
    await response.write(_LAST)
    await response.write_eof()
    return response


async def replica(host: str, port: int) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    runner = await _listen(answer, host, port)
    say(event="ready", host=host, port=runner.addresses[0][1], startup_ms=1, phases={}, pid=os.getpid())
    await stop.wait()
    await runner.cleanup()


async def bare(upstream: str, port: int) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def forward(request: web.BaseRequest) -> web.StreamResponse:
            body = await request.read()
            async with session.post(f"{upstream}{request.path}", data=body) as found:
                response = web.StreamResponse(status=found.status, headers={"content-type": found.content_type})
                await response.prepare(request)
                async for chunk in found.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response

        runner = await _listen(forward, "127.0.0.1", port)
        say(event="ready", port=runner.addresses[0][1], pid=os.getpid())
        await stop.wait()
        await runner.cleanup()


async def _listen(handler: Any, host: str, port: int) -> web.ServerRunner:
    runner = web.ServerRunner(web.Server(handler, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, host, port, backlog=4096, shutdown_timeout=0.1).start()
    return runner


def say(**entry: Any) -> None:
    print(json.dumps(entry), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "bare":
        asyncio.run(bare(sys.argv[2], int(sys.argv[3])))
    else:
        flags = dict(zip(sys.argv[3::2], sys.argv[4::2], strict=True))
        uvloop.run(replica(flags["--host"], int(flags["--port"])))
