"""What replicas logged last, kept by the control plane once their node has nothing to ask any more."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from control_plane.security.files import private_folder, write_private

_KEPT = 20


class LastLogs:
    """A file a replica in `folder`, of the replicas that ended last."""

    def __init__(self, folder: Path) -> None:
        self._folder = private_folder(folder)

    def keep(self, replica_id: str, lines: Sequence[str], position: int) -> None:
        """`position` is that of the end of `lines`, in bytes of all that the replica logged to its file."""
        write_private(self._file(replica_id), json.dumps({"lines": list(lines), "position": position}).encode())
        files = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in files[_KEPT:]:
            path.unlink(missing_ok=True)

    def read(self, replica_id: str, lines: int, after: int | None) -> tuple[list[str], int]:
        """The last `lines`, or those that came `after` a position, and the position of their end."""
        try:
            kept = json.loads(self._file(replica_id).read_bytes())
        except OSError:
            return [], after or 0
        return tail(kept["lines"], kept["position"], lines, after), kept["position"]

    def _file(self, replica_id: str) -> Path:
        return self._folder / f"{replica_id}.json"


def tail(kept: Sequence[str], position: int, lines: int, after: int | None) -> list[str]:
    """Of `kept` lines that end at `position`, the last `lines`, or those that came `after` a position."""
    if after is not None:
        text = "".join(f"{line}\n" for line in kept).encode()
        new = text[max(0, len(text) - max(0, position - after)) :]
        kept = new.decode("utf-8", "replace").splitlines()
    return list(kept[-lines:])
