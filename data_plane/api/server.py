"""The replica's HTTP side: routes, errors, health, drain, and its life from start to exit."""

from __future__ import annotations

import asyncio
import errno
import hmac
import json
import os
import secrets
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from aiohttp import web

from data_plane import log
from data_plane.api.chat import chat_completions
from data_plane.api.completions import completions
from data_plane.api.connection import Runner
from data_plane.api.context import REPLICA, Handler, Replica, header_bytes
from data_plane.api.embeddings import embeddings
from data_plane.api.openapi import document
from data_plane.api.responses import create_response
from data_plane.api.tls import PeerTls
from data_plane.api.warmth import Warmth, move, rung_of, view
from data_plane.config import ServeConfig
from data_plane.engine.client import EngineClient, start_process
from data_plane.engine.messages import Warmed
from data_plane.errors import EngineDied, InvalidArgument, PortInUse, RequestError, StartError
from data_plane.loading.sources import resolve
from data_plane.observe import Telemetry

_AFTERLIFE_S = 1.5
_MOST_LABEL = 128
_OPEN_PATHS = ("/health", "/openapi.json", "/")


def serve(config: ServeConfig) -> int:
    """Run a replica until SIGTERM (0 after draining) or the engine's end (non-zero). Raises StartError."""
    started = time.monotonic()
    log.capture_libraries()
    path = resolve(config.engine.model)
    listener = _bind(config)
    process, connection = start_process(config)
    try:
        return asyncio.run(_serve(config, path, listener, EngineStart(process, connection), started))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


class EngineStart:
    """An engine process that was started before the event loop was."""

    def __init__(self, process: Any, connection: socket.socket) -> None:
        self.process, self.connection = process, connection


def _bind(config: ServeConfig) -> socket.socket:
    """Bind before the model is loaded: a taken port is said at once."""
    try:
        family = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
    except OSError as error:
        raise _cannot_listen(config, error) from error
    return listener


def _cannot_listen(config: ServeConfig, error: OSError) -> StartError:
    if error.errno == errno.EADDRINUSE:
        return PortInUse(
            f"port {config.port} on {config.host} is in use; stop what listens there or give another --port"
        )
    return InvalidArgument(f"cannot listen on {config.host}:{config.port}: {error.strerror or error}")


async def _serve(config: ServeConfig, path: Path, listener: socket.socket, start: EngineStart, started: float) -> int:
    engine = EngineClient(config, start.process, start.connection)
    telemetry = Telemetry(config.name, lambda: engine.progress, names=config.metrics_names)
    engine.on_progress = telemetry.stepped
    token = os.environ.get("INGLE_REPLICA_TOKEN") or None
    replica = Replica(config, engine, Warmth(engine, path), telemetry, token)
    warmed = await replica.warmth.start(config.engine.rung)
    runner = Runner(make_app(replica), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    tls = PeerTls(Path(config.tls_pair), Path(config.tls_authority)) if config.tls_pair else None
    watching = asyncio.create_task(tls.watch()) if tls else None
    site = web.SockSite(runner, listener, backlog=1024, ssl_context=tls.context if tls else None)
    try:
        await site.start()
    except OSError as error:  # another took the port after we had bound it: two may bind, one may listen
        raise _cannot_listen(config, error) from error
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    host, port = listener.getsockname()[:2]
    say_ready(replica, warmed, host, port, time.monotonic() - started)
    code = await _until_over(replica, stop)
    # the engine first: streams that are still open end with an error instead of a cut
    await engine.stop()
    await runner.cleanup()
    if watching is not None:
        watching.cancel()
    telemetry.shutdown()
    return code


def say_ready(replica: Replica, warmed: Warmed, host: str, port: int, seconds: float) -> None:
    ready = warmed.ready
    loaded = (
        {}
        if ready is None
        else {
            "device": ready.device,
            "precision": ready.precision,
            "kernels": ready.kernels,
            "max_model_len": ready.max_model_len,
        }
    )
    line = {
        "event": "ready",
        "host": host,
        "port": port,
        "model": replica.name,
        "pid": os.getpid(),
        "engine_pid": replica.engine.pid,
        "rung": warmed.rung,
        **loaded,
        "startup_ms": round(seconds * 1000),
        "phases": {name: round(value * 1000, 1) for name, value in warmed.phases.items()},
    }
    print(json.dumps(line), flush=True)
    sys.stdout.flush()


async def _until_over(replica: Replica, stop: asyncio.Event) -> int:
    """Wait for a signal, then drain; or for the engine's death, then let the bad news out."""
    stopped = asyncio.create_task(stop.wait())
    died = asyncio.create_task(replica.engine.died.wait())
    await asyncio.wait((stopped, died), return_when=asyncio.FIRST_COMPLETED)
    if died.done():
        # open requests hear of it, and /health says so, before the port closes
        stopped.cancel()
        await asyncio.sleep(_AFTERLIFE_S)
        log.event("replica_stopped", level="error", reason=EngineDied.code)
        return 1
    replica.draining = True
    log.event("draining", requests=replica.open)
    if replica.open:
        try:
            await asyncio.wait_for(replica.idle.wait(), replica.config.drain_s)
        except TimeoutError:
            log.event("drain_timeout", level="warning", requests=replica.open)
    died.cancel()
    log.event("replica_stopped", reason="asked")
    return 0


def make_app(replica: Replica) -> web.Application:
    app = web.Application(middlewares=[_middleware], client_max_size=replica.config.max_body_bytes)
    app[REPLICA] = replica
    app.router.add_post("/v1/chat/completions", chat_completions)
    app.router.add_post("/v1/completions", completions)
    app.router.add_post("/v1/responses", create_response)
    app.router.add_post("/v1/embeddings", embeddings)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/v1/models/{id}", _model)
    app.router.add_get("/openapi.json", _openapi)
    app.router.add_get("/health", _health)
    app.router.add_get("/metrics", _metrics)
    app.router.add_post("/drain", _drain)
    app.router.add_post("/sleep", _sleep)
    app.router.add_post("/wake", _wake)
    return app


@web.middleware
async def _middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Identity, admission and the shape of every error."""
    replica = request.app[REPLICA]
    request["id"] = _label(request.headers.get("x-request-id", "")) or f"req-{secrets.token_hex(8)}"
    request["received_at"] = time.monotonic()
    generates = request.method == "POST" and request.path.startswith("/v1/")
    try:
        _authenticate(request, replica)
        if generates and replica.draining:
            raise RequestError("this replica is draining", code="draining", status=503, type="server_error",
                               retry_after_s=1)  # fmt: skip
        if replica.warmth.rung != "hot" and request.path.startswith("/v1/"):
            raise RequestError(f"this replica is {replica.warmth.rung}", code="asleep", status=503,
                               type="server_error", retry_after_s=1)  # fmt: skip
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise RequestError("compressed bodies are not accepted", status=415, code="unsupported_encoding")
        if not generates:
            response = await handler(request)
        else:
            replica.open += 1
            replica.idle.clear()
            try:
                response = await handler(request)
            finally:
                replica.open -= 1
                if not replica.open:
                    replica.idle.set()
    except RequestError as error:
        response = _error(request, error)
    except web.HTTPRequestEntityTooLarge:
        most = replica.config.max_body_bytes
        response = _error(request, RequestError(f"the body is over {most} bytes", status=413, code="body_too_large"))
    except web.HTTPException as error:
        if error.status < 400:
            raise
        said = f"{request.method} {request.path}: {error.reason.lower()}"
        response = _error(request, RequestError(said, status=error.status))
    except ConnectionError:
        return web.Response(status=499)  # nobody is there to read it
    except Exception as error:
        log.event(
            "request_failed",
            level="error",
            kind=type(error).__name__,
            path=request.path,
            id=request["id"],
            trace_id=log.trace_of(request.headers),
        )
        failure = RequestError("internal error", status=500, type="server_error", code="internal_error")
        response = _error(request, failure)
    if not response.prepared:
        response.headers["x-request-id"] = request["id"]
    return response


def _label(given: str) -> str:
    """A client's own name for a request, if it is one that can go into a header and a log."""
    return given if len(given) <= _MOST_LABEL and given.isascii() and given.isprintable() else ""


def _authenticate(request: web.Request, replica: Replica) -> None:
    if replica.token is None or request.path in _OPEN_PATHS:
        return
    given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(header_bytes(given), replica.token.encode()):
        raise RequestError("wrong or missing token", status=401, code="invalid_api_key", type="authentication_error")


def _error(request: web.Request, error: RequestError) -> web.Response:
    if not request.get("accounted"):
        request.app[REPLICA].telemetry.refused(error.code or "invalid_request")
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return web.json_response(error.body(), status=error.status, headers=headers)


def _card(replica: Replica) -> dict[str, Any]:
    return {
        "id": replica.name,
        "object": "model",
        "created": replica.started_at,
        "owned_by": "ingle",
        "max_model_len": replica.ready.max_model_len,
    }


async def _models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [_card(request.app[REPLICA])]})


async def _model(request: web.Request) -> web.Response:
    replica = request.app[REPLICA]
    if request.match_info["id"] != replica.name:
        raise RequestError(
            f"the model {request.match_info['id']!r} does not exist", param="model", code="model_not_found", status=404
        )
    return web.json_response(_card(replica))


async def _openapi(request: web.Request) -> web.Response:
    replica = request.app[REPLICA]
    return web.json_response(document(replica.limits if replica.loaded else None))


async def _health(request: web.Request) -> web.Response:
    replica = request.app[REPLICA]
    reason = replica.engine.unhealthy()
    progress = replica.engine.progress
    blocks = replica.ready.num_blocks if replica.loaded else 1
    fine = "ok" if replica.warmth.rung == "hot" else replica.warmth.rung
    body = {
        "status": fine if reason is None else "unhealthy",
        "reason": reason,
        "draining": replica.draining,
        "open": replica.open,
        "running": progress.running if progress else 0,
        "waiting": progress.waiting if progress else 0,
        "kv_usage": round(progress.blocks_used / blocks, 6) if progress else 0.0,
        "kv_blocks_used": progress.blocks_used if progress else 0,
        "kv_blocks": blocks,
        **view(replica.warmth),
    }
    return web.json_response(body, status=200 if reason is None else 503)


async def _metrics(request: web.Request) -> web.Response:
    return web.Response(body=request.app[REPLICA].telemetry.prometheus(), content_type="text/plain", charset="utf-8")


async def _drain(request: web.Request) -> web.Response:
    """Refuse new work from now on; what is under way goes on."""
    replica = request.app[REPLICA]
    replica.draining = True
    return web.json_response({"draining": True, "open": replica.open})


async def _sleep(request: web.Request) -> web.Response:
    """Go down to a rung, once nothing is under way."""
    replica = request.app[REPLICA]
    rung = rung_of(await request.read())
    if replica.open or replica.engine.in_flight:
        raise RequestError("requests are under way here", code="busy", status=409)
    return await move(replica.warmth, rung)


async def _wake(request: web.Request) -> web.Response:
    """Go up to where requests are taken."""
    return await move(request.app[REPLICA].warmth, "hot")
