"""`python -m tests.bench.stages`: what it costs that a model runs in stages: steps of decoding, in turns."""

from __future__ import annotations

import statistics
import sys
import time

from data_plane.config import EngineConfig
from data_plane.engine.core import EngineCore
from data_plane.engine.loader import load
from data_plane.engine.messages import Add, SamplingParams
from data_plane.engine.stages import Stages
from tests.bench.peers import MODEL

_STEPS, _WARM, _TURNS = 24, 6, 3
_BATCHES, _COUNTS = (1, 16), (1, 2, 4)


def main() -> int:
    cores: dict[int, EngineCore] = {}
    pipelines: list[Stages] = []
    for count in _COUNTS:
        config = EngineConfig(
            model=MODEL, precision="float32", threads=1, stages=count, kv_cache_tokens=8192, prefix_cache=False
        ).validate()
        if count > 1:
            pipelines.append(Stages(config))
        cores[count] = EngineCore(load(config, pipelines[-1] if count > 1 else None))
    print("| streams | stages | step, ms | more than one device, ms a further stage |\n|---|---|---|---|")
    for batch in _BATCHES:
        found: dict[int, list[float]] = {count: [] for count in _COUNTS}
        for _ in range(_TURNS):
            for count, core in cores.items():
                found[count].append(_step_seconds(core, batch))
        alone = min(found[1])
        for count in _COUNTS:
            further = "" if count == 1 else f"{(min(found[count]) - alone) / (count - 1) * 1000:.2f}"
            print(f"| {batch} | {count} | {min(found[count]) * 1000:.2f} | {further} |", flush=True)
    for stages in pipelines:
        stages.close()
    return 0


def _step_seconds(core: EngineCore, batch: int) -> float:
    """The median step of decoding `batch` streams."""
    params = SamplingParams(max_tokens=_STEPS + _WARM + 2, temperature=0.0, ignore_eos=True)
    for number in range(batch):
        core.handle([Add(f"s{number}", [1, 2, 3, 4, 5 + number], params)])
    seconds: list[float] = []
    while core.scheduler.has_work:
        began = time.perf_counter()
        core.step()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[_WARM:-2])


if __name__ == "__main__":
    sys.exit(main())
