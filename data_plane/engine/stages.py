"""One model over several accelerators or hosts: a pipeline of stages, each with consecutive layers and their KV cache.

The first stage is the engine itself: it schedules, has the embedding, its own layers and the head, and samples. The
others only run layers. They are processes that it starts here, an accelerator each, or that come to it from other
hosts. A step visits one after the other, and what they compute is what one device would, to the bit. A stage that goes
takes the engine with it: half a model serves nobody.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from data_plane import log
from data_plane.config import EngineConfig
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
from data_plane.errors import START_ERRORS, InvalidArgument, PortInUse, StageLost, StageRefused, StartError
from data_plane.models.batch import Batch
from data_plane.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch

TOKEN_VARIABLE = "INGLE_REPLICA_TOKEN"  # noqa: S105  # its name
OUT_OF_MEMORY = "out_of_memory"
_JOIN_SECONDS = 300.0
_LOAD_SECONDS = 1800.0
_STEP_SECONDS = 120.0
_GREET_SECONDS = 5.0
_SAY_SECONDS = 30.0
_END_SECONDS = 5.0
_M = TypeVar("_M", Opened, Done)


class StageFault(RuntimeError):
    """A stage raised an error in a step, and stands as before."""


class Stages:
    """The stages after the first; what `models.llama.Rest` asks of them."""

    def __init__(self, config: EngineConfig) -> None:
        """Start those of this machine, and listen for the others. Raises StartError."""
        self._config = config
        self._token = os.environ.get(TOKEN_VARIABLE, "")
        _check(config, self._token)
        self._links: list[StageLink] = []
        self._children: list[subprocess.Popen[bytes]] = []
        self._opened: list[Opened] = []
        self._here = config.stages - config.stages_elsewhere
        self._listener = _listen(config.stage_listen) if config.stages_elsewhere else None
        self._tls = _tls(config) if self._listener else None
        for index in range(1, self._here):
            self._start(index)
        self._come = threading.Condition()
        if self._listener is not None:
            threading.Thread(target=self._take, args=(self._listener,), name="stages", daemon=True).start()

    def open(self, spec: ModelSpec, precision: str, device: str, max_model_len: int) -> range:
        """Have each load its part, without waiting for it. Returns the layers that stay with the first."""
        self._join()
        shares = split(spec, self._config.stages)
        for number, (link, share) in enumerate(zip(self._links, shares[1:], strict=True), 1):
            here = self._here if number < self._here else 1
            threads, model = self._config.threads, self._config.model
            link.send(Open(model, precision, device, threads, max_model_len, share.start, share.stop, here))
        return shares[0]

    def room(self) -> int:
        """Tokens that the smallest of them has room for. Waits until all have loaded; raises what kept one from it."""
        self._opened = [self._answer(link, Opened, _LOAD_SECONDS) for link in self._links]
        return min(opened.room for opened in self._opened)

    def new_cache(self, num_blocks: int, block_size: int) -> None:
        self._all(Cache(num_blocks, block_size))

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        from data_plane.engine.tensors import to_bytes, to_pair

        arrays = (
            batch.positions, batch.slot_mapping, batch.block_tables, batch.cu_seqlens_q, batch.seq_lens,
            batch.logit_rows,
        )  # fmt: skip
        views = [array.data for array in arrays]
        pair = to_bytes(torch.stack((x, residual)))
        last = len(self._links) - 1
        for number, link in enumerate(self._links):
            step = Step(batch.positions.size, batch.seq_lens.size, batch.max_query_len, number == last)
            link.patience(_STEP_SECONDS)
            link.send(step, [*views, pair])
            message, found = link.receive()
            _checked(message, Done)
            pair = memoryview(found[0])
        return to_pair(pair, batch.logit_rows.size, x)

    def weight_bytes(self) -> int:
        return sum(opened.weight_bytes for opened in self._opened)

    def release(self) -> None:
        self._all(Release())

    def restore(self) -> None:
        self._all(Restore())

    def shut(self) -> None:
        """Have them forget the model."""
        if self._opened:
            self._opened = []
            self._all(Shut())

    def check(self) -> None:
        for link in self._links:
            link.check()

    def close(self) -> None:
        """They end when their connection does."""
        for link in self._links:
            link.close()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for another
            self._listener.close()
        for child in self._children:
            try:
                child.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()

    def _all(self, message: Message) -> None:
        for link in self._links:
            link.patience(_STEP_SECONDS)
            link.send(message)
        for link in self._links:
            self._answer(link, Done, _STEP_SECONDS)

    def _answer(self, link: StageLink, kind: type[_M], seconds: float) -> _M:
        link.patience(seconds)
        return _checked(link.receive()[0], kind)

    def _start(self, index: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            child = subprocess.Popen(
                [sys.executable, "-m", "data_plane.engine.stage", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": _accelerator(index)},
            )
        self._children.append(child)
        self._links.append(StageLink(ours))

    def _join(self) -> None:
        """Wait until as many have come as there are to be."""
        deadline = time.monotonic() + _JOIN_SECONDS
        with self._come:
            while missing := self._config.stages - 1 - len(self._links):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise StageLost(f"{missing} of the stages did not come within {_JOIN_SECONDS:.0f} s")
                log.event("stages_awaited", missing=missing, listen=self._config.stage_listen, seconds=round(left))
                self._come.wait(min(left, _SAY_SECONDS))

    def _take(self, listener: socket.socket) -> None:
        """Take whoever comes, while this process has other things to do; one too many is told so."""
        while True:
            try:
                link, host = self._greet(listener)
            except OSError:  # it was closed
                return
            if link is None:
                continue
            with self._come, contextlib.suppress(StageLost):  # one that went at once
                if len(self._links) == self._config.stages - 1:
                    more = self._config.stages_elsewhere
                    log.event("stage_refused", level="warning", host=host, reason="one too many")
                    _refuse(link, f"the engine has the {more} that --stages-elsewhere asks for")
                    continue
                link.send(Joined())
                log.event("stage_joined", host=host)
                self._links.append(link)
                self._come.notify_all()

    def _greet(self, listener: socket.socket) -> tuple[StageLink | None, str]:
        """The next that comes, if it knows the replica's token, and its address. Raises OSError as `accept` does."""
        connection, address = listener.accept()
        try:
            connection.settimeout(_GREET_SECONDS)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            link = StageLink(connection)
            message, _ = link.receive()
            if not isinstance(message, Hello):
                raise StageLost("it is no stage")
            if not hmac.compare_digest(message.token.encode(), self._token.encode()):
                _refuse(link, f"the token in {TOKEN_VARIABLE} isn't the engine's")
                raise StageLost("wrong token" if message.token else "no token")
        except (OSError, StageLost) as error:
            connection.close()
            log.event("stage_refused", level="warning", host=address[0], reason=str(error))
            return None, address[0]
        return link, address[0]


def split(spec: ModelSpec, stages: int) -> list[range]:
    """Consecutive layers for each stage, so that each has about as many weights: the first has the tables, too."""
    layers = spec.num_layers
    if stages > layers:
        raise InvalidArgument(f"--stages {stages}: the model has {layers} layers, and each stage needs one")
    parts = ("q", "k", "v", "o", "gate", "up", "down")
    of_layer = sum(rows * width for rows, width in (spec.shape(f"layers.0.{part}.weight") for part in parts))
    tables = spec.vocab_size * spec.hidden_size * (1 if spec.tied_head else 2) / of_layer
    first = max(1, min(round((layers + tables) / stages - tables), layers - stages + 1)) if stages > 1 else layers
    each, more = divmod(layers - first, max(1, stages - 1))
    borders = [0, first]
    for number in range(stages - 1):
        borders.append(borders[-1] + each + (number < more))
    return [range(start, stop) for start, stop in pairwise(borders)]


def _check(config: EngineConfig, token: str) -> None:
    """Before anything is started. Raises StartError."""
    from data_plane.loading.files import is_encoder
    from data_plane.loading.formats import open_checkpoint
    from data_plane.loading.sources import resolve

    host = config.stage_listen.rpartition(":")[0].strip("[]")
    if config.stages_elsewhere and not token and not _is_loopback(host):
        raise InvalidArgument(
            f"--stage-listen {config.stage_listen}: others reach it, and have to be told from stages: set "
            f"{TOKEN_VARIABLE} to one secret here and there"
        )
    path = resolve(config.model)
    if is_encoder(path):
        raise InvalidArgument("--stages: an encoder runs whole, on one device")
    split(open_checkpoint(path).spec, config.stages)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _refuse(link: StageLink, why: str) -> None:
    link.send(Refused(StageRefused.code, why))
    link.close()


def _checked(message: Message, kind: type[_M]) -> _M:
    """The answer that was waited for. Raises what the stage says went wrong instead."""
    if isinstance(message, kind):
        return message
    if isinstance(message, Refused):
        raise START_ERRORS.get(message.code, StartError)(message.message)
    if isinstance(message, Fault):
        raise MemoryError("a stage has no memory left") if message.kind == OUT_OF_MEMORY else StageFault(message.kind)
    raise StageLost(f"a stage said {type(message).__name__} where {kind.__name__} was due")


def _accelerator(index: int) -> str:
    """Of those that this process may use, the one of a stage of this machine."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not visible:
        return str(index)
    names = visible.split(",")
    return names[index] if index < len(names) else ""


def _listen(where: str) -> socket.socket:
    host, _, port = where.rpartition(":")
    try:
        return socket.create_server((host, int(port)), backlog=64)
    except OSError as error:
        raise PortInUse(f"--stage-listen {where}: {error.strerror}") from error


def _tls(config: EngineConfig) -> ssl.SSLContext | None:
    if not config.stage_pair:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(config.stage_pair)
    except OSError as error:
        raise InvalidArgument(f"--tls-pair doesn't load: {error}") from None
    return context
