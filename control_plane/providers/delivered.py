"""What a replica on another machine is given by the control plane, as the local provider there takes it."""

from __future__ import annotations

from pathlib import Path

from control_plane.security.files import write_private
from control_plane.security.mesh import PLAIN, Link


class OneToken:
    """Of the one replica that is there."""

    def __init__(self, token: str) -> None:
        self._token = token

    def replica_token(self, replica_id: str) -> str:
        return self._token


class Delivered:
    """The certificate that the control plane sent: its authority's key never leaves the control plane."""

    link: Link = PLAIN

    def __init__(self, folder: Path, pair: str, authority: str) -> None:
        self.ca_file = folder / "authority.pem"
        self.take(pair, authority)

    def take(self, pair: str, authority: str) -> None:
        """Use these from now on; both are PEM."""
        self._pair = pair.encode()
        write_private(self.ca_file, authority.encode())

    def equip(self, replica_id: str, host: str, path: Path) -> None:
        if not path.exists() or path.read_bytes() != self._pair:
            write_private(path, self._pair)

    def forget(self, path: Path) -> None:
        path.unlink(missing_ok=True)
