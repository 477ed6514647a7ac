"""The profile: where an installation's admin API is and how to be let in. `ingle up` writes it, the CLI reads it."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from control_plane.errors import ConfigError


@dataclass(frozen=True)
class Profile:
    """`token` is an admin token: the file is private."""

    admin_url: str
    token: str
    ca_file: str

    def to_toml(self) -> bytes:
        # A JSON string is a TOML basic string.
        lines = [f"{name} = {json.dumps(getattr(self, name))}\n" for name in ("admin_url", "token", "ca_file")]
        return "".join(lines).encode()


def profile_path(given: Path | None, environ: Mapping[str, str] = os.environ) -> Path:
    """`--profile` > `INGLE_PROFILE` > `profile.toml` in the home."""
    if given is not None:
        return given.expanduser()
    if environ.get("INGLE_PROFILE"):
        return Path(environ["INGLE_PROFILE"]).expanduser()
    home = Path(environ["INGLE_HOME"]) if environ.get("INGLE_HOME") else Path.home() / ".ingle"
    return home.expanduser() / "profile.toml"


def read_profile(path: Path) -> Profile:
    """Raises ConfigError."""
    try:
        values = tomllib.loads(path.read_text())
        return Profile(**{name: str(values[name]) for name in ("admin_url", "token", "ca_file")})
    except FileNotFoundError:
        raise ConfigError(
            f"no profile at {path}: start the platform with `ingle up`, or name a profile with --profile",
            code="no_profile",
        ) from None
    except (OSError, tomllib.TOMLDecodeError, KeyError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} isn't a profile ({error}): `ingle up` writes a new one", code="bad_profile"
        ) from None
