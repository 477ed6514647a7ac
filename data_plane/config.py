"""The settings of one replica: one frozen object, validated once, passed to both of its processes."""

from __future__ import annotations

from typing import Literal

import msgspec

from data_plane.errors import InvalidArgument

Precision = Literal["auto", "packed", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine process needs to know.

    Sizes are in tokens unless the name says otherwise; 0 means "choose from the model and the machine".
    """

    model: str
    device: Device = "auto"
    precision: Precision = "auto"
    max_model_len: int = 0
    block_size: int = 16
    kv_cache_tokens: int = 0
    max_num_seqs: int = 256
    max_batched_tokens: int = 0
    max_waiting: int = 2048
    prefix_cache: bool = True
    threads: int = 0
    rung: Literal["ember", "asleep", "hot"] = "hot"
    """How warm it is once it has started."""
    seed: int = 0
    stages: int = 1
    """Parts that the layers are in, each on an accelerator of its own; see `engine.stages`."""
    stages_elsewhere: int = 0
    """So many of them come from other hosts, to `stage_listen` (HOST:PORT)."""
    stage_listen: str = ""
    stage_pair: str = ""
    """PEM file, a certificate chain and its key, that stages of other hosts are shown; none for plain TCP."""

    def validate(self) -> EngineConfig:
        """Return self; raise InvalidArgument naming the first flag that is off."""
        bounds: tuple[tuple[str, int, int], ...] = (
            ("max_model_len", 0, 1 << 24),
            ("block_size", 8, 256),
            ("kv_cache_tokens", 0, 1 << 30),
            ("max_num_seqs", 1, 4096),
            ("max_batched_tokens", 0, 1 << 20),
            ("max_waiting", 1, 1 << 20),
            ("threads", 0, 1024),
            ("stages", 1, 64),
            ("stages_elsewhere", 0, self.stages - 1),
            ("seed", 0, (1 << 63) - 1),
        )
        if self.stages == 1 and self.stages_elsewhere:
            raise InvalidArgument(
                "--stages-elsewhere says how many of --stages come from other hosts: give --stages too"
            )
        for field, low, high in bounds:
            value = getattr(self, field)
            if not low <= value <= high:
                raise InvalidArgument(f"--{field.replace('_', '-')} must be between {low} and {high}, not {value}")
        if self.block_size & (self.block_size - 1):
            raise InvalidArgument(f"--block-size must be a power of two, not {self.block_size}")
        if self.stages > 1 and self.precision == "packed":
            raise InvalidArgument("--precision packed runs a model whole: it has no --stages")
        host, _, port = self.stage_listen.rpartition(":")
        if self.stages_elsewhere and not self.stage_listen:
            raise InvalidArgument("--stage-listen is missing: HOST:PORT, where the stages of other hosts come to")
        if self.stage_listen and not self.stages_elsewhere:
            raise InvalidArgument("--stage-listen is for --stages-elsewhere, which says that no stage comes")
        if self.stages_elsewhere and not (host and port.isdigit() and int(port) <= 65535):
            raise InvalidArgument(f"--stage-listen must be HOST:PORT, not {self.stage_listen!r}")
        return self


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the HTTP process needs besides the engine's settings. Times are in seconds, sizes in bytes."""

    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 0
    name: str = ""
    max_body_bytes: int = 8 << 20
    liveness_s: float = 10.0
    drain_s: float = 30.0
    start_s: float = 600.0
    metrics_names: Literal["ingle", "vllm"] = "ingle"
    tls_pair: str = ""
    tls_authority: str = ""

    def validate(self) -> ServeConfig:
        if not 0 <= self.port <= 65535:
            raise InvalidArgument(f"--port must be between 0 and 65535, not {self.port}")
        if not 0.5 <= self.liveness_s <= 3600:
            raise InvalidArgument(f"--liveness must be between 0.5 and 3600 seconds, not {self.liveness_s}")
        if not 0 <= self.drain_s <= 86400:
            raise InvalidArgument(f"--drain must be between 0 and 86400 seconds, not {self.drain_s}")
        if not 1024 <= self.max_body_bytes <= 1 << 30:
            raise InvalidArgument(f"--max-body must be between 1024 and {1 << 30} bytes, not {self.max_body_bytes}")
        if bool(self.tls_pair) != bool(self.tls_authority):
            raise InvalidArgument("--tls-pair and --tls-authority: both or neither")
        self.engine.validate()
        return self
