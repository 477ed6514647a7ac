"""Alerts: one catalogue, as rules for Prometheus and as what the controller's own evaluator fires."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from control_plane.alerts.evaluator import Evaluator
from control_plane.alerts.facts import Facts
from control_plane.alerts.scrape import Scraper
from control_plane.config import AlertSettings
from control_plane.security.audit import AuditSigner
from control_plane.security.mesh import Link
from control_plane.security.secret import Secret
from control_plane.store.database import Store

__all__ = ["watch"]


def watch(
    store: Store,
    secret: Secret,
    settings: AlertSettings,
    owner: str,
    ca_file: Path,
    link: Link,
    own: Mapping[str, str],
) -> Callable[[], Awaitable[None]]:
    """The controller's watch, as a loop to run. `own` are the gateways of this process, by region."""
    trust = ssl.create_default_context()
    trust.load_verify_locations(ca_file)
    scraper = Scraper(store, secret, link=link, trust=trust, own=own)
    return Evaluator(store, scraper, Facts(store, AuditSigner(secret)), settings, owner=owner).run
