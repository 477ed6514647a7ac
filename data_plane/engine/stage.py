"""A stage after the first: `python -m data_plane.engine.stage FD`, or `ingle engine stage` on another host.

It does what the first stage says, a message at a time, and ends when the connection does. See `engine.stages`.
"""

from __future__ import annotations

import os
import signal
import socket
import ssl
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from data_plane import log
from data_plane.engine.stage_link import (
    Cache,
    Done,
    Fault,
    Hello,
    Joined,
    Message,
    Open,
    Opened,
    Refused,
    Release,
    Restore,
    Shut,
    StageLink,
    Step,
)
from data_plane.engine.stages import OUT_OF_MEMORY, TOKEN_VARIABLE
from data_plane.errors import InvalidArgument, StageLost, StageRefused, StartError
from data_plane.models.batch import Array, Batch

if TYPE_CHECKING:
    from data_plane.models.llama import LlamaLayers

_CONNECT_SECONDS = 300.0
_TRY_SECONDS = 5.0
_ANSWER_SECONDS = 60.0
_SAY_SECONDS = 30.0
_AGAIN_SECONDS = 0.25


def main(arguments: list[str]) -> int:
    # the first stage decides when this ends; a Ctrl-C reaches the whole group and is its business
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return run(StageLink(socket.socket(fileno=int(arguments[0]))))


def join(address: str, name: str, authority: str) -> int:
    """Be a stage of the engine that listens at `address` (HOST:PORT).

    With `authority`, a PEM file, by TLS, where it must show a certificate for `name`. Raises StartError.
    """
    link = StageLink(_connect(address, name, authority))
    try:
        link.patience(_ANSWER_SECONDS)
        link.send(Hello(os.environ.get(TOKEN_VARIABLE, "")))
        answer, _ = link.receive()
    except StageLost as error:
        raise StageLost(
            f"what listens at {address} doesn't answer as an engine that waits for stages: {error}"
        ) from None
    if isinstance(answer, Refused):
        raise StageRefused(f"the engine at {address} doesn't take this stage: {answer.message}")
    if not isinstance(answer, Joined):
        raise StageLost(f"the engine at {address} said {type(answer).__name__} where Joined was due")
    log.event("stage_joined", address=address)
    return run(link)


def run(link: StageLink) -> int:
    """Serve until the connection ends."""
    from data_plane.engine import loader
    from data_plane.models import llama

    # at hand before they are needed, as in an engine that is an ember
    log.event("imported", loader=loader.__name__, model=llama.__name__)
    link.patience(None)
    stage = Stage()
    while True:
        try:
            message, arrays = link.receive()
        except StageLost as error:
            log.event("stage_ended", reason=str(error))
            return 0
        try:
            answer = stage.take(message, arrays)
        except StartError as error:
            answer = Refused(error.code, str(error)), []
        except Exception as error:
            answer = _fault(message, error), []
        try:
            link.send(*answer)
        except StageLost:
            return 0


class Stage:
    """Layers that come and go."""

    def __init__(self) -> None:
        self._part: _Part | None = None

    def take(self, message: Message, arrays: list[bytearray]) -> tuple[Message, list[memoryview]]:
        """Do what a message asks. Returns the answer; raises StartError where a model can't be loaded."""
        if isinstance(message, Open):
            self._part, opened = _load(message)
            return opened, []
        if isinstance(message, Shut):
            self._part = None
            return Done(), []
        part = self._part
        if part is None:
            raise StageLost(f"{type(message).__name__} before Open")
        if isinstance(message, Step):
            return Done(), [part.step(message, arrays)]
        if isinstance(message, Cache):
            part.kv = part.layers.new_cache(message.num_blocks, message.block_size)
        elif isinstance(message, Release):
            part.kv = None
            part.move("cpu")
        elif isinstance(message, Restore):
            part.move(part.device)
        return Done(), []


@dataclass
class _Part:
    layers: LlamaLayers
    device: str
    dtype: str
    kv: Any = None

    def step(self, step: Step, arrays: list[bytearray]) -> memoryview:
        """The next pair of hidden states, as bytes. Raises ValueError where the arrays aren't what the step says."""
        import torch

        from data_plane.engine.tensors import to_bytes, to_pair
        from data_plane.models.llama import DeviceBatch

        batch = _batch(step, arrays)
        like = torch.empty((0, self.layers.spec.hidden_size), dtype=getattr(torch, self.dtype), device=self.device)
        with torch.inference_mode():
            x, residual = to_pair(arrays[6], step.tokens, like)
            x, residual = self.layers(x, residual, self.kv, there := DeviceBatch(batch, like.device))
            if step.last:
                x, residual = x[there.logit_rows], residual[there.logit_rows]
            return to_bytes(torch.stack((x, residual)))

    def move(self, device: str) -> None:
        import torch

        from data_plane.layers.residence import move

        move(self.layers, torch.device(device))


def _batch(step: Step, arrays: list[bytearray]) -> Batch:
    def array(index: int, kind: type[np.generic]) -> Array:
        return np.frombuffer(arrays[index], kind)

    positions, slots, rows = array(0, np.int64), array(1, np.int64), array(5, np.int64)
    tables, starts, lengths = array(2, np.int32), array(3, np.int32), array(4, np.int32)
    if positions.size != step.tokens or slots.size != step.tokens or lengths.size != step.sequences:
        raise ValueError("the arrays of a step differ from its sizes")
    return Batch(
        tokens=np.empty(0, np.int64),
        positions=positions,
        slot_mapping=slots,
        block_tables=tables.reshape(step.sequences, -1),
        cu_seqlens_q=starts,
        seq_lens=lengths,
        max_query_len=step.max_query_len,
        logit_rows=rows,
    )


def _load(asked: Open) -> tuple[_Part, Opened]:
    import torch

    from data_plane.engine.loader import is_out_of_memory, room_for
    from data_plane.errors import NotEnoughMemory
    from data_plane.loading.formats import open_checkpoint
    from data_plane.loading.sources import resolve
    from data_plane.models.llama import LlamaLayers
    from data_plane.models.registry import check_family
    from kernels import select

    started = time.monotonic()
    checkpoint = open_checkpoint(resolve(asked.model))
    check_family(checkpoint)
    if not 0 <= asked.start < asked.stop <= checkpoint.spec.num_layers:
        raise InvalidArgument(f"layers {asked.start} to {asked.stop} of {checkpoint.spec.num_layers}: another model?")
    if asked.device == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument("a stage is to run on cuda, and torch sees no GPU for it")
    if asked.device == "cpu":
        torch.set_num_threads(asked.threads or len(os.sched_getaffinity(0)))
    device = torch.device(asked.device)
    which = range(asked.start, asked.stop)
    try:
        layers = LlamaLayers(
            checkpoint, select(device), getattr(torch, asked.precision), device, asked.max_model_len, which
        )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise NotEnoughMemory(f"layers {asked.start} to {asked.stop} don't fit on a stage's {asked.device}") from error
    log.event("stage_loaded", start=asked.start, stop=asked.stop, seconds=round(time.monotonic() - started, 3))
    room = room_for(asked.device, layers.kv_token_bytes, asked.here)
    return _Part(layers, asked.device, asked.precision), Opened(room, layers.weight_bytes())


def _fault(message: Message, error: Exception) -> Message:
    from data_plane.engine.loader import is_out_of_memory

    kind = OUT_OF_MEMORY if is_out_of_memory(error) else type(error).__name__
    log.event("stage_failed", level="error", kind=kind, asked=type(message).__name__)
    return Refused("start_failed", f"a stage could not load: {kind}") if isinstance(message, Open) else Fault(kind, "")


def _connect(address: str, name: str, authority: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise InvalidArgument(f"--connect must be HOST:PORT, not {address}")
    context = None
    if authority:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_verify_locations(authority)
        except OSError as error:
            raise InvalidArgument(f"--tls-authority doesn't load: {error}") from None
    deadline = time.monotonic() + _CONNECT_SECONDS
    say_at = 0.0
    while True:
        try:
            connection = socket.create_connection((host, int(port)), timeout=_TRY_SECONDS)
            return context.wrap_socket(connection, server_hostname=name) if context else connection
        except OSError as error:
            if isinstance(error, ssl.SSLCertVerificationError) or time.monotonic() > deadline:
                raise StageLost(f"no engine at {address}: {error}") from None
            if time.monotonic() >= say_at:
                say_at = time.monotonic() + _SAY_SECONDS
                left = round(deadline - time.monotonic())
                log.event("engine_awaited", address=address, seconds=left, reason=error.strerror or str(error))
        time.sleep(_AGAIN_SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
