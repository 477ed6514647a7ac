"""Tells people: webhook, Slack, e-mail, PagerDuty. What a receiver is reached by is never logged or shown."""

from __future__ import annotations

import asyncio
import smtplib
import ssl
from collections.abc import Callable, Mapping, Sequence
from email.message import EmailMessage
from typing import Any

import aiohttp

from control_plane.alerts.catalogue import Severity, alert
from control_plane.config import ReceiverSettings
from control_plane.domain import Address, AlertState
from control_plane.errors import IngleError
from control_plane.observe.logs import iso

PAGERDUTY = "https://events.pagerduty.com/v2/enqueue"
MOST_AT_ONCE = 50
_TIMEOUT = 10.0
_COLOURS: Mapping[str, str] = {"critical": "#c0392b", "warning": "#e39b0b", "resolved": "#2e8b57"}


class NotTold(IngleError):
    """A receiver didn't take a message. The text names the receiver and the reason, never where it is."""

    default_code = "receiver_failed"


async def tell(receiver: ReceiverSettings, states: Sequence[AlertState], *, over: bool, session: Session) -> None:
    """Tell of `states` (at most `MOST_AT_ONCE`), all firing or all `over`. Raises NotTold."""
    send = {"webhook": _webhook, "slack": _slack, "email": _email, "pagerduty": _pagerduty}[receiver.kind]
    try:
        async with asyncio.timeout(2 * _TIMEOUT):
            await send(receiver, states, over, session)
    except (aiohttp.ClientError, TimeoutError, OSError, smtplib.SMTPException) as error:
        # the error's own text may hold the URL
        raise NotTold(f"receiver {receiver.name} can't be reached ({type(error).__name__})") from None


class Session:
    """HTTP for all receivers, opened at first use."""

    def __init__(self) -> None:
        self._http: aiohttp.ClientSession | None = None

    async def post(self, receiver: ReceiverSettings, url: str, body: Any) -> None:
        if self._http is None:
            self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT))
        trust = ssl.create_default_context(cafile=str(receiver.ca_file)) if receiver.ca_file else True
        async with self._http.post(url, json=body, ssl=trust, allow_redirects=False) as response:
            if response.status >= 300:
                raise NotTold(f"receiver {receiver.name} answered {response.status}")

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()


def _severity(state: AlertState) -> Severity:
    return alert(state.alert).severity


def _title(state: AlertState, over: bool) -> str:
    return f"[{'resolved' if over else _severity(state)}] {state.alert}: {state.summary}"


def _described(state: AlertState, over: bool) -> dict[str, Any]:
    """One alert as Alertmanager's webhooks have it."""
    return {
        "status": "resolved" if over else "firing",
        "labels": {"alertname": state.alert, "severity": str(_severity(state)), **state.labels},
        "annotations": {"summary": state.summary, "runbook": alert(state.alert).runbook},
        "startsAt": iso(state.fired_at or state.since),
        "endsAt": iso(state.resolved_at) if over and state.resolved_at else "0001-01-01T00:00:00Z",
        "fingerprint": state.fingerprint,
    }


async def _webhook(receiver: ReceiverSettings, states: Sequence[AlertState], over: bool, session: Session) -> None:
    body = {
        "version": "4",
        "receiver": receiver.name,
        "status": "resolved" if over else "firing",
        "alerts": [_described(state, over) for state in states],
    }
    await session.post(receiver, receiver.reached_by, body)


async def _slack(receiver: ReceiverSettings, states: Sequence[AlertState], over: bool, session: Session) -> None:
    attachments = [
        {
            "color": _COLOURS["resolved" if over else _severity(state)],
            "title": f"{'Resolved' if over else 'Firing'}: {state.alert}",
            "text": state.summary,
            "footer": alert(state.alert).runbook,
            "ts": int((state.resolved_at if over else state.fired_at) or state.since),
        }
        for state in states
    ]
    await session.post(receiver, receiver.reached_by, {"text": _title(states[0], over), "attachments": attachments})


async def _pagerduty(receiver: ReceiverSettings, states: Sequence[AlertState], over: bool, session: Session) -> None:
    for state in states:
        body: dict[str, Any] = {
            "routing_key": receiver.routing_key.get_secret_value() if receiver.routing_key else "",
            "event_action": "resolve" if over else "trigger",
            "dedup_key": state.fingerprint,
        }
        if not over:
            body["payload"] = {
                "summary": f"{state.alert}: {state.summary}"[:1024],
                "source": state.labels.get("endpoint") or "ingle",
                "severity": str(_severity(state)),
                "timestamp": iso(state.fired_at or state.since),
                "component": state.labels.get("region", ""),
                "class": state.alert,
                "custom_details": {**state.labels, "runbook": alert(state.alert).runbook},
            }
        await session.post(receiver, receiver.url.get_secret_value() if receiver.url else PAGERDUTY, body)


async def _email(receiver: ReceiverSettings, states: Sequence[AlertState], over: bool, session: Session) -> None:
    message = EmailMessage()
    more = f" (and {len(states) - 1} more)" if len(states) > 1 else ""
    message["Subject"] = (_title(states[0], over) + more).replace("\n", " ")[:200]
    message["From"], message["To"] = receiver.sender, ", ".join(receiver.to)
    lines = [f"{_title(state, over)}\n  since {iso(state.fired_at or state.since)}, {alert(state.alert).runbook}"
             for state in states]  # fmt: skip
    message.set_content("\n\n".join(lines))
    await asyncio.to_thread(_deliver, receiver, message)


def _deliver(receiver: ReceiverSettings, message: EmailMessage) -> None:
    address = Address.parse(receiver.smtp or "")
    trust = ssl.create_default_context(cafile=str(receiver.ca_file) if receiver.ca_file else None)
    connect: Callable[[], smtplib.SMTP]
    if receiver.tls == "always":
        connect = lambda: smtplib.SMTP_SSL(address.host, address.port, timeout=_TIMEOUT, context=trust)  # noqa: E731
    else:
        connect = lambda: smtplib.SMTP(address.host, address.port, timeout=_TIMEOUT)  # noqa: E731
    with connect() as server:
        if receiver.tls == "starttls":
            server.starttls(context=trust)
        if receiver.username and receiver.password:
            server.login(receiver.username, receiver.password.get_secret_value())
        server.send_message(message)
