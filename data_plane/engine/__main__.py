"""The engine process: `python -m data_plane.engine FD SETTINGS`, started by `client.EngineClient`.

FD is an inherited Unix socket; SETTINGS is an EngineConfig in JSON.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from data_plane import log
from data_plane.config import EngineConfig
from data_plane.engine.ipc import EngineSocket
from data_plane.engine.messages import Failed, Ready
from data_plane.errors import StartError

if TYPE_CHECKING:
    from data_plane.engine.core import EngineCore
    from data_plane.engine.encoder import EncoderCore


def main(arguments: list[str]) -> int:
    started = time.monotonic()
    # the HTTP process decides when the engine ends; a Ctrl-C reaches the whole group and is its business
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    peer = EngineSocket(socket.socket(fileno=int(arguments[0])))
    config = msgspec.json.decode(arguments[1], type=EngineConfig)
    try:
        core, ready = _load(config, started)
    except StartError as error:
        peer.send([Failed(error.code, str(error))])
        return error.exit_code
    except ImportError as error:
        peer.send([Failed("engine_missing", f"{error}; install it with: pip install 'ingle[engine]'")])
        return 1
    if peer.send([ready]):
        core.run(peer)
    log.event("engine_stopped", steps=core.counters.steps)
    return 0


def _load(config: EngineConfig, started: float) -> tuple[EngineCore | EncoderCore, Ready]:
    """The core that runs this kind of model. Imports are here because a StartError must reach the other side."""
    from data_plane.loading.files import is_encoder
    from data_plane.loading.sources import resolve

    if is_encoder(resolve(config.model)):
        from data_plane.engine.encoder import load_encoder

        return load_encoder(config, started)
    from data_plane.engine.core import EngineCore
    from data_plane.engine.loader import load

    imported = time.monotonic()
    loaded = load(config)
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
