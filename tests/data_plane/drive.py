"""Drives an engine core in this process, a step at a time, with its books checked after each."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from data_plane.config import EngineConfig
from data_plane.engine.core import EngineCore
from data_plane.engine.loader import Loaded, load
from data_plane.engine.messages import Abort, Add, FromEngine, Output, Progress, SamplingParams, TokenLogprob

GREEDY = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)


@dataclass
class Reply:
    """What one sequence got."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None
    cached_tokens: int = 0
    error: str = ""


def load_model(path: Path, **settings: Any) -> Loaded:
    return load(EngineConfig(model=str(path), device="cpu", **{"kv_cache_tokens": 4096, **settings}).validate())


def new_core(loaded: Loaded, *, tokens: int | None = None, **limits: Any) -> EngineCore:
    """A core with empty books on a loaded model. `tokens` shrinks the pool; stale memory is made poisonous."""
    cache = loaded.runner.kv
    # bytes of 255 are no number in any format that is kept in them
    whole = isinstance(cache, np.ndarray) and cache.dtype.kind in "iu"
    cache[...] = np.array(-1).astype(cache.dtype) if whole else float("nan")
    size = loaded.limits.block_size
    blocks = loaded.num_blocks if tokens is None else tokens // size
    return EngineCore(
        dataclasses.replace(
            loaded,
            num_blocks=blocks,
            max_model_len=min(loaded.max_model_len, blocks * size),
            limits=dataclasses.replace(loaded.limits, **limits),
        )
    )


class Driver:
    """Sends work to a core and collects what comes back."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.replies: dict[str, Reply] = {}

    def add(self, id: str, prompt: list[int], params: SamplingParams = GREEDY, *, salt: bytes = b"") -> None:
        self.replies[id] = Reply()
        self.core.handle([Add(id, prompt, params, salt)])

    def abort(self, *ids: str) -> None:
        self.core.handle([Abort(list(ids))])

    def step(self) -> Progress:
        messages = self.core.step()
        for message in messages:
            if isinstance(message, Output):
                self._take(message)
        self.core.pool.check()
        return _last(messages)

    def _take(self, output: Output) -> None:
        reply = self.replies[output.id]
        assert reply.finish is None, f"{output.id} was heard of after its end"
        reply.tokens += output.tokens
        reply.logprobs += output.logprobs or []
        reply.prompt_logprobs += output.prompt_logprobs or []
        reply.cached_tokens += output.cached_tokens
        reply.finish = output.finish
        reply.error = output.error

    def finish(self, most_steps: int = 5000) -> dict[str, Reply]:
        """Step until nothing is left to do."""
        steps = 0
        while self.core.scheduler.has_work:
            self.step()
            steps += 1
            assert steps <= most_steps, "the engine makes no progress"
        assert self.core.pool.num_used == 0
        return self.replies


def generate(core: EngineCore, prompts: dict[str, list[int]], params: SamplingParams = GREEDY) -> dict[str, Reply]:
    driver = Driver(core)
    for id, prompt in prompts.items():
        driver.add(id, prompt, params)
    return driver.finish()


def changed(params: SamplingParams, **fields: Any) -> SamplingParams:
    return msgspec.structs.replace(params, **fields)


def _last(messages: list[FromEngine]) -> Progress:
    assert isinstance(messages[-1], Progress)
    return messages[-1]
