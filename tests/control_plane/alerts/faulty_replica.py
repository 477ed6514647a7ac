"""A real replica whose engine can be told to be slow or to run out of memory, by a file that `INGLE_FAULTS` names.

The file holds words: `slow-50ms` (each step is that much longer), `oom-N` (the N-th fault; each N fails one step).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def faults() -> dict[str, str]:
    try:
        words = Path(os.environ["INGLE_FAULTS"]).read_text().split()
    except OSError:
        return {}
    return dict(word.split("-", 1) for word in words)


def engine(arguments: list[str]) -> int:
    from data_plane.engine.__main__ import main
    from data_plane.engine.runner import Runner

    run = Runner.run
    done = {"oom": faults().get("oom", "")}

    def faulty(self: Runner, plan: Any) -> Any:
        told = faults()
        if "slow" in told:
            time.sleep(float(told["slow"].removesuffix("ms")) / 1000)
        if told.get("oom", "") != done["oom"]:
            done["oom"] = told["oom"]
            raise MemoryError
        return run(self, plan)

    Runner.run = faulty  # type: ignore[method-assign]
    return main(arguments)


def serve(arguments: list[str]) -> int:
    from data_plane.__main__ import main
    from data_plane.engine import client

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, command: list[str], **options: Any) -> None:
            super().__init__([sys.executable, __file__, "engine", *command[3:]], **options)

    client.subprocess.Popen = Popen  # type: ignore[attr-defined]
    return main(["serve", *arguments])


if __name__ == "__main__":
    sys.exit(engine(sys.argv[2:]) if sys.argv[1] == "engine" else serve(sys.argv[1:]))
