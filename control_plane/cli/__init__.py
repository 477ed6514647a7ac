"""The command line. `main` is the console script `ingle`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command; whatever goes wrong ends in one line on stderr and an exit code of the interface."""
    from control_plane.cli.root import app
    from control_plane.errors import IngleError

    try:
        app(prog_name="ingle")
    except IngleError as error:
        print(f"ingle: {error.message}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if os.environ.get("INGLE_DEBUG"):
            raise
        print(f"ingle: {type(error).__name__}: {error} (INGLE_DEBUG=1 shows where)", file=sys.stderr)
        sys.exit(1)
