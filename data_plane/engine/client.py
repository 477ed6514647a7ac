"""The HTTP process's side of the engine: starts it, sends it requests, hands out what comes back, judges its health."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec

from data_plane import log
from data_plane.config import ServeConfig
from data_plane.engine.messages import (
    FRAME,
    MOST_FRAME_BYTES,
    Abort,
    Add,
    Failed,
    FromEngine,
    Output,
    Progress,
    Rung,
    SamplingParams,
    Stop,
    Warm,
    Warmed,
    frame,
    from_engine_decoder,
)
from data_plane.errors import START_ERRORS, EngineDied, RequestError, StageLost, StartError

Sink = Callable[[Output], None]

_STOP_SECONDS = 5.0


def start_process(config: ServeConfig) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the engine; cheap and early, so that its imports run beside ours. Returns it and our end of the socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    environment = dict(os.environ)
    # threads that spin at barriers starve the HTTP process on a small machine
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    settings = msgspec.json.encode(config.engine).decode()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "data_plane.engine", str(theirs.fileno()), settings],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=environment,
        )
    return process, ours


class EngineClient:
    """One engine process. Every method belongs to the event loop's thread."""

    def __init__(self, config: ServeConfig, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self._config = config
        self._process = process
        self._connection = connection
        self._writer: asyncio.StreamWriter | None = None
        self._sinks: dict[str, Sink] = {}
        self._pump: asyncio.Task[None] | None = None
        self._heard_at = time.monotonic()
        self._stopping = False
        self._ended = "the engine process ended"
        """Why it did, in words for whoever's request it takes with it."""
        self._warmed: asyncio.Future[Warmed] = asyncio.get_running_loop().create_future()
        """Of the move that is under way, or was the last one."""
        self._moved_at = time.monotonic()
        self.progress: Progress | None = None
        self.died = asyncio.Event()
        self.on_progress: Callable[[Progress], None] = lambda progress: None

    async def start(self) -> Warmed:
        """Wait until the engine is as warm as it is to start. Raises the StartError that it failed with."""
        reader, self._writer = await asyncio.open_connection(sock=self._connection)
        self._pump = asyncio.create_task(self._read(reader), name="engine-reader")
        return await self._arrival()

    async def warm(self, rung: Rung) -> Warmed:
        """Have it go to a rung, and wait until it is there; nothing may be in flight. Raises StartError."""
        if self.died.is_set() or self._writer is None:
            raise StartError("the engine is not running")
        self._warmed = asyncio.get_running_loop().create_future()
        self._moved_at = time.monotonic()
        self._writer.write(frame(Warm(rung)))
        return await self._arrival()

    async def _arrival(self) -> Warmed:
        try:
            return await asyncio.wait_for(asyncio.shield(self._warmed), self._config.start_s)
        except TimeoutError as error:
            raise StartError(f"the engine was not there within {self._config.start_s:.0f} s") from error

    @property
    def in_flight(self) -> int:
        return len(self._sinks)

    @property
    def pid(self) -> int:
        return self._process.pid

    def unhealthy(self) -> str | None:
        """Why the engine cannot be trusted to answer, or None. Judged by the last sign of the loop itself."""
        if self.died.is_set():
            return "the engine process ended"
        if not self._warmed.done():
            late = time.monotonic() - self._moved_at > self._config.start_s
            return "the engine does not arrive at its rung" if late else None
        silent = time.monotonic() - self._heard_at
        if silent > self._config.liveness_s:
            return f"no step for {silent:.1f} s"
        return None

    def submit(self, id: str, prompt: list[int], params: SamplingParams, salt: bytes, sink: Sink) -> None:
        """Queue a sequence. `sink` gets its outputs, the last with a finish reason, unless it is aborted.

        Raises RequestError when the engine is gone or its queue is full.
        """
        if self.died.is_set() or self._writer is None:
            raise RequestError("the engine is not running", code="engine_died", status=503, type="server_error")
        engine = self._config.engine
        if len(self._sinks) >= engine.max_num_seqs + engine.max_waiting:
            raise RequestError(
                "too many requests are waiting", code="overloaded", status=503, type="server_error", retry_after_s=1
            )
        self._sinks[id] = sink
        self._writer.write(frame(Add(id, prompt, params, salt)))

    def abort(self, ids: list[str]) -> None:
        """Forget sequences and stop their work; unknown ids are fine."""
        live = [id for id in ids if self._sinks.pop(id, None) is not None]
        if live and self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(Abort(live)))

    async def stop(self) -> None:
        """End the engine process: ask, then insist. What still runs ends with an error."""
        self._stopping = True
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(Stop()))
        try:
            await asyncio.to_thread(self._process.wait, _STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        if self._pump is not None:
            self._pump.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._pump
        if self._writer is not None:
            self._writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (size,) = FRAME.unpack(await reader.readexactly(FRAME.size))
                if size > MOST_FRAME_BYTES:
                    self._ended = "the engine sent a frame that is too large"
                    break
                self._take(from_engine_decoder.decode(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except msgspec.DecodeError:
            self._ended = "the engine sent what is no message"
        finally:
            self._end(self._ended)

    def _take(self, messages: list[FromEngine]) -> None:
        self._heard_at = time.monotonic()
        for message in messages:
            if isinstance(message, Output):
                sink = self._sinks.get(message.id)
                if sink is not None:
                    if message.finish is not None:
                        del self._sinks[message.id]
                    sink(message)
            elif isinstance(message, Progress):
                self.progress = message
                self.on_progress(message)
            elif isinstance(message, Warmed):
                if not self._warmed.done():
                    self._warmed.set_result(message)
            elif isinstance(message, Failed) and not self._warmed.done():
                self._fail(START_ERRORS.get(message.code, StartError)(message.message))
            elif isinstance(message, Failed):
                log.event("engine_failed", level="error", code=message.code, reason=message.message)
                if message.code == StageLost.code:
                    self._ended = "the engine lost a part of the model"

    def _fail(self, error: StartError) -> None:
        self._warmed.set_exception(error)
        self._warmed.exception()  # asyncio complains of errors that nobody fetched; here another may have come first

    def _end(self, reason: str) -> None:
        self.died.set()
        if not self._warmed.done():
            self._fail(StartError(f"{reason} before it was ready; see its log above"))
        lost, self._sinks = self._sinks, {}
        if self._stopping:
            reason = "the replica was stopped before this was done"
        elif lost:
            log.event("engine_died", level="error", reason=reason, requests=len(lost))
        for id, sink in lost.items():
            sink(Output(id, [], "error", error=reason))


__all__ = ["EngineClient", "EngineDied", "start_process"]
