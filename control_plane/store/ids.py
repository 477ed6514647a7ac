"""Identifiers: a prefix that says what it names, then 80 random bits."""

from __future__ import annotations

import base64
import os


def new_id(prefix: str) -> str:
    return f"{prefix}_{base64.b32encode(os.urandom(10)).decode().lower()}"
