"""`python -m control_plane.providers.deadman PID REPLICA`: when process PID is gone, nothing of the replica stays.

A supervisor on another machine can be killed at any line, and what it started would go on computing and holding memory.
This process outlives it: it is nobody's child, so that what ends the supervisor's children doesn't end it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

from control_plane.providers.processes import MARK, marked, send

_LOOK_SECONDS = 0.05
_MOST_LOOKS = 600


def main() -> None:
    """Returns once the watch has begun."""
    pid, replica_id = int(sys.argv[1]), sys.argv[2]
    watched = os.pidfd_open(pid)
    if os.fork():
        os._exit(0)
    os.setsid()
    select.select([watched], [], [])
    for _ in range(_MOST_LOOKS):
        left = marked(MARK, replica_id)
        if not left:
            return
        for found in left:
            send(found, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)


if __name__ == "__main__":
    main()
