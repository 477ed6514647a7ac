"""A replica that speaks the whole contract over real HTTP and computes nothing: it echoes the last message.

Behaviour is chosen by the model's name, words joined by `+`: `fast`, `start-300ms` (slow to start), `bad`
(model_not_found), `unknown-code`, `tokens-50` (length of a reply), `pace-20ms` (between tokens), `child` (starts a
child process, as an engine would), `cut` (dies in mid-stream), `early` (closes before the first byte),
`once` (closes a kept connection as its second request comes), `full`, `engine`, `fault` (answers 5xx), `mute` (never
generates).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from data_plane.api.tls import PeerTls


def say(**entry: Any) -> None:
    print(json.dumps(entry), flush=True)


class Replica:
    def __init__(self, model: str, name: str) -> None:
        self.words = set(model.split("+"))
        self.name = name
        self.token = os.environ["INGLE_REPLICA_TOKEN"]
        self.running = 0
        self.served = 0
        self.cancelled = 0
        self.draining = False
        self.used: weakref.WeakSet[Any] = weakref.WeakSet()
        self.rung = "hot"
        self.seen: list[dict[str, str]] = []
        self.registry = CollectorRegistry()
        self.first_token = Histogram(
            "gen_ai_server_time_to_first_token_seconds", "Arrival to first token", registry=self.registry
        )

    def number(self, word: str, default: int) -> int:
        for item in self.words:
            match = re.fullmatch(rf"{word}-(\d+)(?:ms)?", item)
            if match:
                return int(match[1])
        return default

    async def health(self, request: web.Request) -> web.Response:
        body = {"status": "ok", "running": self.running, "waiting": 0, "kv_usage": 0.0}
        body |= {"rung": self.rung, "wake_phases": {"total": 1.0}}
        body |= {"served": self.served, "cancelled": self.cancelled, "pid": os.getpid()}
        return web.json_response(body)

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self.registry))

    async def requests(self, request: web.Request) -> web.Response:
        return web.json_response(self.seen)

    def refuse(self, request: web.Request) -> web.Response | None:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return problem(401, "invalid_token")
        return problem(503, "draining") if self.draining else None

    async def drain(self, request: web.Request) -> web.Response:
        refused = self.refuse(request)
        if refused is not None and refused.status == 401:
            return refused
        self.draining = True
        return web.json_response({"status": "draining"})

    async def move(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return problem(401, "invalid_token")
        if self.running:
            return problem(409, "busy")
        self.rung = (await request.json())["rung"] if request.path == "/sleep" else "hot"
        return web.json_response({"rung": self.rung})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        refused = self.refuse(request)
        if refused is not None:
            return refused
        if self.rung != "hot":
            return problem(503, "asleep")
        try:
            body = await request.json()
        except ValueError:
            return problem(400, "invalid_json")
        if body.get("prompt") == "One, two,":  # the controller's, before there is any traffic
            return problem(500, "internal_error") if "mute" in self.words else web.json_response({})
        self.seen.append({name.lower(): value for name, value in request.headers.items()})
        if request.headers.get("x-ingle-model") != "override" and body.get("model") != self.name:
            return problem(404, "model_not_found")
        if "full" in self.words:
            return problem(503, "overloaded")
        if "engine" in self.words:
            return problem(500, "engine_error")
        if "fault" in self.words:
            return problem(500, "internal_error")
        if "once" in self.words:
            assert request.transport is not None
            if request.transport in self.used:
                request.transport.abort()
                return web.Response()
            self.used.add(request.transport)
        if "early" in self.words:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        self.running += 1
        try:
            response = await self.reply(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        self.served += 1
        return response

    async def reply(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        count = int(body.get("max_tokens") or self.number("tokens", 3))
        pace = self.number("pace", 0) / 1000
        prompt = str(body["messages"][-1]["content"]) if body.get("messages") else str(body.get("prompt"))
        usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": count, "cached_tokens": 0}
        wanted = request.headers.get("x-ingle-usage") == "1"
        if not body.get("stream"):
            await asyncio.sleep(pace * count)
            message = {"role": "assistant", "content": f"echo {prompt}"}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            reply = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": self.name}
            headers = {"x-ingle-usage": json.dumps(usage)} if wanted else {}
            totals = {**usage, "total_tokens": usage["prompt_tokens"] + count}
            return web.json_response({**reply, "choices": [choice], "usage": totals}, headers=headers)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        began = time.monotonic()
        await response.prepare(request)
        for index in range(count):
            delta = {"role": "assistant", "content": f"t{index} "}
            choice = {"index": 0, "delta": delta, "finish_reason": None if index < count - 1 else "stop"}
            frame = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": self.name}
            await response.write(f"data: {json.dumps({**frame, 'choices': [choice]})}\n\n".encode())
            if index == 0:
                self.first_token.observe(time.monotonic() - began)
            if "cut" in self.words and index == 1:
                await response.write(b'data: {"id": "half a fr')
                os.kill(os.getpid(), signal.SIGKILL)
            await asyncio.sleep(pace)
        if wanted:
            await response.write(f": usage {json.dumps(usage)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


def problem(status: int, code: str) -> web.Response:
    error = {"message": code, "type": "server_error", "param": None, "code": code}
    return web.json_response({"error": error}, status=status)


async def main() -> int:
    arguments = sys.argv[1:]
    model = arguments[0]
    pairs = [argument for argument in arguments[1:] if "=" not in argument]
    flags = dict(zip(pairs[::2], pairs[1::2], strict=True))
    replica = Replica(model, flags["--name"])
    replica.rung = flags.get("--rung", "hot")
    print(json.dumps({"level": "info", "event": "starting", "model": model}), file=sys.stderr, flush=True)
    began = time.monotonic()
    await asyncio.sleep(replica.number("start", 0) / 1000)
    if "bad" in replica.words:
        say(event="failed", code="model_not_found", message=f"no model called {model}: name one that exists")
        return 1
    if "unknown-code" in replica.words:
        say(event="failed", code="out_of_memory", message="not enough memory")
        return 1
    if "child" in replica.words:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_get("/health", replica.health)
    app.router.add_get("/metrics", replica.metrics)
    app.router.add_get("/requests", replica.requests)
    app.router.add_post("/drain", replica.drain)
    app.router.add_post("/sleep", replica.move)
    app.router.add_post("/wake", replica.move)
    app.router.add_post("/v1/chat/completions", replica.chat)
    app.router.add_post("/v1/completions", replica.chat)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    tls = None
    if "--tls-pair" in flags:
        tls = PeerTls(Path(flags["--tls-pair"]), Path(flags["--tls-authority"]), look_s=0.1)
        watching = asyncio.create_task(tls.watch())
    context = tls.context if tls else None
    site = web.TCPSite(runner, flags["--host"], int(flags["--port"]), shutdown_timeout=5, ssl_context=context)
    await site.start()
    port = runner.addresses[0][1]
    startup = round((time.monotonic() - began) * 1000, 1)
    say(event="ready", host=flags["--host"], port=port, startup_ms=startup, phases={"load": startup})
    await stop.wait()
    await runner.cleanup()
    if tls is not None:
        watching.cancel()
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
