"""`python -m tests.bench.step_loop`: what a step costs outside the model, and whether that grows with the queue."""

from __future__ import annotations

import random
import statistics
import sys
import time
from typing import Any

from data_plane.config import EngineConfig
from data_plane.engine.core import EngineCore
from data_plane.engine.loader import load
from data_plane.engine.messages import Add, SamplingParams
from tests.bench.peers import MODEL

BATCH, WARM, MEASURED = 32, 20, 150


class Timed:
    """The model, with the seconds spent in it."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *arguments: Any) -> Any:
        return self._timed(self._model, *arguments)

    def draw(self, *arguments: Any) -> Any:
        return self._timed(self._model.draw, *arguments)

    def _timed(self, call: Any, *arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            self.seconds += time.perf_counter() - started


def main() -> int:
    loaded = load(EngineConfig(model=MODEL, max_num_seqs=BATCH, prefix_cache=False).validate())
    model = Timed(loaded.runner._model)
    loaded.runner._model = model  # type: ignore[assignment]
    print("| waiting | step, ms | outside the model, ms | share |\n|---|---|---|---|")
    for waiting in (0, 10, 100, 1000, 10_000):
        core, chance = EngineCore(loaded), random.Random(0)
        params = SamplingParams(max_tokens=WARM + MEASURED + 50, temperature=0, ignore_eos=True)
        for number in range(BATCH + waiting):
            core.handle([Add(f"{number}", [chance.randrange(100, 49_000) for _ in range(32)], params)])
        steps, own = [], []
        for _ in range(WARM + MEASURED):
            model.seconds, started = 0.0, time.perf_counter()
            core.step()
            steps.append(time.perf_counter() - started)
            own.append(steps[-1] - model.seconds)
        step, outside = statistics.median(steps[WARM:]) * 1000, statistics.median(own[WARM:]) * 1000
        print(f"| {waiting} | {step:.2f} | {outside:.3f} | {outside / step:.1%} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
