"""The engine's loop for an encoder: texts in batches of like length, one vector each, nothing kept."""

from __future__ import annotations

import time
from collections import deque

from data_plane import log
from data_plane.config import EngineConfig
from data_plane.engine.ipc import EngineSocket
from data_plane.engine.messages import Abort, Add, Counters, FromEngine, Output, Progress, Ready, Rung, Stop, Warm
from data_plane.errors import InvalidArgument
from data_plane.loading.sources import resolve
from data_plane.models.bert import BertEncoder

IDLE_TICK_S = 0.5
BATCH_TOKENS = 4096


class EncoderCore:
    """See `core.EngineCore`, whose place it takes for encoders."""

    def __init__(self, encoder: BertEncoder) -> None:
        self._encoder = encoder
        self._waiting: deque[Add] = deque()
        self._aborted: set[str] = set()
        self.counters = Counters()
        self._going: Rung | None = None

    def release(self) -> None:
        self._encoder.release()

    def restore(self) -> None:
        self._encoder.restore()

    def run(self, socket: EngineSocket) -> Rung | None:
        while True:
            messages = socket.receive(timeout_s=0.0 if self._waiting else IDLE_TICK_S)
            if messages is None:
                return None
            for message in messages:
                if isinstance(message, Add):
                    self._waiting.append(message)
                elif isinstance(message, Abort):
                    self._aborted.update(message.ids)
                elif isinstance(message, Warm):
                    self._going = message.rung
                elif isinstance(message, Stop):
                    return None
            if self._going is not None and not self._waiting:
                rung, self._going = self._going, None
                return rung
            if not socket.send(self._turn()):
                return None

    def _turn(self) -> list[FromEngine]:
        started = time.monotonic()
        batch = self._next_batch()
        outputs: list[FromEngine] = []
        if batch:
            try:
                vectors = self._encoder.encode([add.prompt for add in batch])
                outputs = [
                    Output(add.id, [], "stop", scheduled_at=started, vector=vector.tobytes())
                    for add, vector in zip(batch, vectors, strict=True)
                ]
                self.counters.steps += 1
                self.counters.prompt_tokens += sum(len(add.prompt) for add in batch)
            except Exception as error:
                log.event("step_failed", level="error", kind=type(error).__name__, sequences=len(batch))
                self.counters.step_errors += 1
                outputs = [Output(add.id, [], "error", error="the engine failed on this request") for add in batch]
        tokens = sum(len(add.prompt) for add in batch)
        progress = Progress(
            running=0, waiting=len(self._waiting), blocks_used=0, blocks_cached=0,
            step_s=time.monotonic() - started if batch else 0.0, batch_tokens=tokens,
            bytes_moved=self._encoder.weight_bytes() if batch else 0, counters=self.counters,
        )  # fmt: skip
        return [*outputs, progress]

    def _next_batch(self) -> list[Add]:
        """In order of arrival, while padding to the longest stays within BATCH_TOKENS."""
        batch: list[Add] = []
        longest = 0
        while self._waiting:
            add = self._waiting[0]
            if add.id in self._aborted:
                self._aborted.discard(add.id)
                self._waiting.popleft()
                continue
            longest = max(longest, len(add.prompt))
            if batch and longest * (len(batch) + 1) > BATCH_TOKENS:
                break
            batch.append(self._waiting.popleft())
        if not self._waiting:
            self._aborted.clear()
        return batch


def load_encoder(config: EngineConfig, started: float) -> tuple[EncoderCore, Ready]:
    """Raises a StartError that says what to do."""
    import os

    import torch

    imported = time.monotonic()
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    device = torch.device("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")
    encoder = BertEncoder(resolve(config.model), device)
    spec = encoder.spec
    if config.max_model_len > spec.max_len:
        raise InvalidArgument(f"--max-model-len {config.max_model_len} exceeds the {spec.max_len} tokens of the model")
    ready = Ready(
        device=str(device),
        precision="float32",
        kernels="torch",
        max_model_len=config.max_model_len or spec.max_len,
        vocab_size=spec.vocab_size,
        num_blocks=1,
        block_size=config.block_size,
        eos_token_ids=[],
        phases={"import": imported - started, "load": time.monotonic() - imported},
        generates=False,
    )
    return EncoderCore(encoder), ready
