"""The engine process: `python -m data_plane.engine FD SETTINGS`, started by `client.EngineClient`.

FD is an inherited Unix socket; SETTINGS is an EngineConfig in JSON. It moves between rungs of warmth when told to.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from data_plane import log
from data_plane.config import EngineConfig
from data_plane.engine.ipc import EngineSocket
from data_plane.engine.messages import Counters, Failed, Progress, Ready, Rung, Stop, Warm, Warmed
from data_plane.errors import StartError

if TYPE_CHECKING:
    from data_plane.engine.core import EngineCore
    from data_plane.engine.encoder import EncoderCore
    from data_plane.engine.stages import Stages

_HEARTBEAT_S = 0.5
_AFTER_PEER_S = 2.0


def main(arguments: list[str]) -> int:
    started = time.monotonic()
    # the HTTP process decides when the engine ends; a Ctrl-C reaches the whole group and is its business
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=int(arguments[0]))
    threading.Thread(target=_end_with, args=(connection.fileno(),), name="end-with-peer", daemon=True).start()
    peer = EngineSocket(connection)
    engine = Engine(msgspec.json.decode(arguments[1], type=EngineConfig), started)
    try:
        engine.serve(peer)
    except StartError as error:
        peer.send([Failed(error.code, str(error))])
        return error.exit_code
    except ImportError as error:
        peer.send([Failed("engine_missing", f"{error}; install it with: pip install 'ingle[engine]'")])
        return 1
    log.event("engine_stopped", steps=engine.steps)
    return 0


def _end_with(peer: int) -> None:
    """Nobody is there to serve once the other side is gone, whatever is being loaded or waited for."""
    gone = select.poll()
    gone.register(peer, 0)  # what is there to read is no matter
    gone.poll()
    time.sleep(_AFTER_PEER_S)  # it may end by itself, and say how
    os._exit(1)


class Engine:
    """A core that comes and goes."""

    def __init__(self, config: EngineConfig, started: float) -> None:
        self._config = config
        self._began = started
        self._core: EngineCore | EncoderCore | None = None
        self._ready: Ready | None = None
        self._stages: Stages | None = None
        self.steps = 0

    def serve(self, peer: EngineSocket) -> None:
        """Until told to stop, or the other side is gone. Raises StartError, ImportError."""
        if self._config.stages > 1:
            from data_plane.engine.stages import Stages

            self._stages = Stages(self._config)
        rung: Rung = self._config.rung
        while True:
            phases = self._move(rung)
            if not peer.send([Warmed(rung, self._ready, phases)]):
                return
            told = self._core.run(peer) if self._core is not None and rung == "hot" else _hold(peer)
            if told is None:
                self.steps = self._core.counters.steps if self._core else 0
                return
            self._began = time.monotonic()
            rung = told

    def _move(self, rung: Rung) -> dict[str, float]:
        """Returns seconds by phase."""
        phases: dict[str, float] = {}
        if rung == "ember":
            self._core = self._ready = None
            gc.collect()
            if self._stages is not None:
                self._stages.shut()
            _import_all(self._config)
            phases["import"] = time.monotonic() - self._began
        elif self._core is None:
            self._core, self._ready = _load(self._config, self._began, self._stages)
            phases |= self._ready.phases
        began = time.monotonic()
        if self._core is not None:
            if rung == "asleep":
                self._core.release()
            else:
                self._core.restore()
            phases["restore" if rung == "hot" else "release"] = time.monotonic() - began
        return phases


def _hold(peer: EngineSocket) -> Rung | None:
    """Wait, and say so, until told where to go; None to stop."""
    while True:
        messages = peer.receive(timeout_s=_HEARTBEAT_S)
        if messages is None:
            return None
        for message in messages:
            if isinstance(message, Stop):
                return None
            if isinstance(message, Warm):
                return message.rung
        if not peer.send([Progress(0, 0, 0, 0, 0.0, 0, 0, Counters())]):
            return None


def _import_all(config: EngineConfig) -> None:
    """What a model of the usual kind needs: an ember has it all at hand."""
    from data_plane.engine import core, loader
    from kernels.cpu import CompilerMissing, library

    log.event("imported", core=core.__name__)
    try:
        if loader.device_of(config) != "cpu" or config.precision not in ("auto", "packed"):
            import torch

            log.event("imported", torch=torch.__version__)
        library()
    except CompilerMissing:  # then it isn't needed
        log.event("kernels_missing")


def _load(config: EngineConfig, started: float, stages: Stages | None) -> tuple[EngineCore | EncoderCore, Ready]:
    """The core that runs this kind of model. Imports are here because a StartError must reach the other side."""
    from data_plane.loading.files import is_encoder
    from data_plane.loading.sources import resolve

    if is_encoder(resolve(config.model)):
        from data_plane.engine.encoder import load_encoder

        return load_encoder(config, started)
    from data_plane.engine.core import EngineCore
    from data_plane.engine.loader import load

    imported = time.monotonic()
    loaded = load(config, stages)
    ready = Ready(
        device=loaded.device,
        precision=loaded.precision,
        kernels=loaded.kernels,
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.spec.vocab_size,
        num_blocks=loaded.num_blocks,
        block_size=loaded.limits.block_size,
        eos_token_ids=list(loaded.spec.eos_token_ids),
        phases={"import": imported - started, **loaded.phases},
    )
    return EngineCore(loaded), ready


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
