"""Typed client of the admin API. The CLI and the tests use only this."""

from __future__ import annotations

import ssl
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel

from control_plane.api import money, observed, schemas
from control_plane.errors import (
    ConfigError,
    Conflict,
    Forbidden,
    IngleError,
    InvalidInput,
    NotFound,
    PreconditionFailed,
    Unauthenticated,
    Unavailable,
    Unprocessable,
)
from control_plane.profile import Profile

Model = TypeVar("Model", bound=BaseModel)

TIMEOUT = 15.0
_LINE_SECONDS = 180.0
"""Providers are asked for a page of replicas between two lines of evidence."""
_ERRORS: Mapping[int, type[IngleError]] = {
    400: InvalidInput,
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    412: PreconditionFailed,
    422: Unprocessable,
    503: Unavailable,
}


def trust(ca_file: str) -> ssl.SSLContext:
    """A TLS context for a client that trusts this authority and no other. Raises ConfigError."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ConfigError(f"the CA file {ca_file} can't be read: {error.strerror or error}") from None


class AdminClient:
    """Every method raises an IngleError of the kind that the server answered with, or Unavailable."""

    def __init__(self, profile: Profile) -> None:
        self._url = profile.admin_url
        self._http = httpx.Client(
            base_url=f"{profile.admin_url}/admin/v1",
            headers={"Authorization": f"Bearer {profile.token}"},
            verify=trust(profile.ca_file),
            timeout=TIMEOUT,
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def status(self) -> schemas.Status:
        return self._one(schemas.Status, "GET", "/status")

    def regions(self) -> list[schemas.Region]:
        return self._all(schemas.Region, "/regions")

    def region(self, name: str) -> schemas.Region:
        return self._one(schemas.Region, "GET", f"/regions/{_part(name)}")

    def create_endpoint(self, spec: Mapping[str, Any]) -> schemas.Endpoint:
        return self._create(schemas.Endpoint, "/endpoints", spec)

    def check_endpoint(self, spec: Mapping[str, Any]) -> schemas.Accepted:
        """Raises what creating it would, but for its name and tenant."""
        return self._one(schemas.Accepted, "POST", "/endpoints/check", spec)

    def endpoints(self, **filters: str | None) -> list[schemas.Endpoint]:
        return self._all(schemas.Endpoint, "/endpoints", filters)

    def endpoint(self, name: str) -> schemas.Endpoint:
        return self._one(schemas.Endpoint, "GET", f"/endpoints/{_part(name)}")

    def update_endpoint(
        self, name: str, changes: Mapping[str, Any], *, if_generation: int | None = None
    ) -> schemas.Endpoint:
        headers = {} if if_generation is None else {"If-Match": f'"{if_generation}"'}
        return self._one(schemas.Endpoint, "PATCH", f"/endpoints/{_part(name)}", changes, headers)

    def generations(self, name: str) -> list[schemas.Generation]:
        """Newest first."""
        return self._page(schemas.Generation, f"/endpoints/{_part(name)}/generations", {"limit": "100"})[0]

    def roll_back(self, name: str, to: int | None = None) -> schemas.Endpoint:
        return self._one(schemas.Endpoint, "POST", f"/endpoints/{_part(name)}/rollback", {"to": to})

    def cost_lines(self, **filters: str | None) -> list[money.CostLine]:
        return self._all(money.CostLine, "/cost/lines", filters)

    def drift(self) -> list[money.Drift]:
        return self._page(money.Drift, "/cost/drift", {})[0]

    def evidence(self, name: str) -> Iterator[str]:
        """Lines, as they come."""
        timeout = httpx.Timeout(TIMEOUT, read=_LINE_SECONDS)
        try:
            with self._http.stream("GET", f"/endpoints/{_part(name)}/evidence", timeout=timeout) as response:
                if response.status_code >= 400:
                    response.read()
                    raise _error(response)
                yield from response.iter_lines()
        except httpx.ConnectError as error:
            raise self._unreachable(error) from None
        except httpx.HTTPError as error:
            message = f"the evidence of {name} ended before its time ({type(error).__name__})"
            raise Unavailable(message, code="cut_off") from None

    def promote(self, name: str) -> schemas.Endpoint:
        return self._one(schemas.Endpoint, "POST", f"/endpoints/{_part(name)}/promote")

    def rungs(self, name: str) -> list[schemas.RungFigures]:
        return self._page(schemas.RungFigures, f"/endpoints/{_part(name)}/warmth", {})[0]

    def delete_endpoint(self, name: str) -> schemas.Endpoint:
        return self._one(schemas.Endpoint, "DELETE", f"/endpoints/{_part(name)}")

    def wake_endpoint(self, name: str) -> schemas.Endpoint:
        return self._one(schemas.Endpoint, "POST", f"/endpoints/{_part(name)}/wake")

    def sleep_endpoint(self, name: str) -> schemas.Endpoint:
        return self._one(schemas.Endpoint, "POST", f"/endpoints/{_part(name)}/sleep")

    def events(self, name: str, *, limit: int = 100, after: int | None = None) -> list[schemas.Event]:
        query = {"limit": str(limit)} | ({} if after is None else {"after": str(after)})
        return self._page(schemas.Event, f"/endpoints/{_part(name)}/events", query)[0]

    def logs(self, name: str, *, lines: int = 100) -> list[schemas.Logs]:
        return self.logs_since(name, None, lines=lines)[0]

    def logs_since(self, name: str, cursor: str | None, *, lines: int = 1000) -> tuple[list[schemas.Logs], str | None]:
        """What came since an earlier call, and the cursor for the next one; without a cursor the last lines."""
        query = {"lines": str(lines)} | ({} if cursor is None else {"after": cursor})
        return self._page(schemas.Logs, f"/endpoints/{_part(name)}/logs", query)

    def live(self, endpoint: str | None = None) -> list[schemas.Live]:
        """How endpoints are right now."""
        return self._page(schemas.Live, "/live", {} if endpoint is None else {"endpoint": endpoint})[0]

    def cold_starts(self, name: str) -> list[schemas.ColdStart]:
        return self._page(schemas.ColdStart, f"/endpoints/{_part(name)}/cold-starts", {})[0]

    def create_tenant(self, name: str) -> schemas.Tenant:
        return self._create(schemas.Tenant, "/tenants", {"name": name})

    def tenants(self) -> list[schemas.Tenant]:
        return self._all(schemas.Tenant, "/tenants")

    def tenant(self, name: str) -> schemas.Tenant:
        return self._one(schemas.Tenant, "GET", f"/tenants/{_part(name)}")

    def limit_tenant(self, name: str, limits: Mapping[str, Any]) -> schemas.Tenant:
        return self._one(schemas.Tenant, "PATCH", f"/tenants/{_part(name)}", limits)

    def update_key(self, key_id: str, changes: Mapping[str, Any]) -> schemas.Key:
        return self._one(schemas.Key, "PATCH", f"/keys/{_part(key_id)}", changes)

    def create_key(self, spec: Mapping[str, Any]) -> schemas.NewKey:
        return self._create(schemas.NewKey, "/keys", spec)

    def keys(self, tenant: str | None = None) -> list[schemas.Key]:
        return self._all(schemas.Key, "/keys", {"tenant": tenant})

    def rotate_key(self, key_id: str, grace_seconds: float) -> schemas.NewKey:
        return self._one(schemas.NewKey, "POST", f"/keys/{_part(key_id)}/rotate", {"grace_seconds": grace_seconds})

    def revoke_key(self, key_id: str) -> schemas.Key:
        return self._one(schemas.Key, "DELETE", f"/keys/{_part(key_id)}")

    def certificates(self) -> list[schemas.Certificate]:
        return self._all(schemas.Certificate, "/certs")

    def certificate(self, name: str) -> schemas.Certificate:
        return self._one(schemas.Certificate, "GET", f"/certs/{_part(name)}")

    def rotate_certificates(self, name: str | None) -> list[schemas.Certificate]:
        body = self._send("POST", "/certs/rotate", {"name": name})
        return [schemas.Certificate.model_validate(item) for item in body["data"]]

    def usage(self, **filters: str | None) -> list[money.Usage]:
        return self._all(money.Usage, "/usage", filters)

    def cost(self, **filters: str | None) -> list[money.Cost]:
        return self._all(money.Cost, "/cost", filters)

    def prices(self) -> list[money.Prices]:
        """Newest first."""
        return self._all(money.Prices, "/prices")

    def set_prices(self, book: Mapping[str, Any]) -> money.Prices:
        return self._create(money.Prices, "/prices", book)

    def audit(self, limit: int) -> list[schemas.Audit]:
        return self._page(schemas.Audit, "/audit", {"limit": str(limit)})[0]

    def verify_audit(self, head: str | None = None) -> schemas.AuditCheck:
        """`head` is one from an earlier check, which must still be in the chain."""
        query = {} if head is None else {"head": head}
        return schemas.AuditCheck.model_validate(self._send("GET", "/audit/verify", query=query))

    def alerts(self, state: str | None = None) -> list[observed.Alert]:
        return self._all(observed.Alert, "/alerts", {"state": state})

    def alert_rules(self) -> list[observed.AlertRule]:
        return self._all(observed.AlertRule, "/alerts/rules")

    def silences(self) -> list[observed.AlertSilence]:
        return self._all(observed.AlertSilence, "/alerts/silences")

    def silence(self, matchers: Mapping[str, str], seconds: float, comment: str) -> observed.AlertSilence:
        spec = {"matchers": dict(matchers), "seconds": seconds, "comment": comment}
        return self._create(observed.AlertSilence, "/alerts/silences", spec)

    def end_silence(self, silence_id: str) -> observed.AlertSilence:
        return self._one(observed.AlertSilence, "DELETE", f"/alerts/silences/{_part(silence_id)}")

    def history(self, name: str, *, since: float, until: float, step: int = 60) -> list[observed.History]:
        query = {"from": str(since), "to": str(until), "step": str(step)}
        return self._page(observed.History, f"/endpoints/{_part(name)}/history", query)[0]

    def stream_events(self, *, after: int | None = None) -> Iterator[schemas.Event]:
        """Events of all endpoints as they happen, until the stream is closed."""
        query = {} if after is None else {"after": str(after)}
        timeout = httpx.Timeout(TIMEOUT, read=60.0)
        with self._http.stream("GET", "/events", params=query, timeout=timeout) as response:
            if response.status_code >= 400:
                response.read()
                raise _error(response)
            for line in response.iter_lines():
                if line.startswith("data: "):
                    yield schemas.Event.model_validate_json(line[6:])

    def _unreachable(self, error: httpx.ConnectError) -> Unavailable:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            message = f"{self._url} isn't the installation that the profile's CA file belongs to"
            return Unavailable(message, code="untrusted")
        return Unavailable(f"the admin API at {self._url} doesn't answer: is `ingle up` running?", code="unreachable")

    def _create(self, model: type[Model], path: str, spec: Mapping[str, Any]) -> Model:
        # The key makes the one repeat in `_send` safe.
        return self._one(model, "POST", path, spec, {"Idempotency-Key": uuid.uuid4().hex})

    def _one(
        self,
        model: type[Model],
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Model:
        return model.model_validate(self._send(method, path, body, headers=headers))

    def _all(self, model: type[Model], path: str, filters: Mapping[str, str | None] | None = None) -> list[Model]:
        """Every page of a list."""
        query = {name: value for name, value in (filters or {}).items() if value is not None}
        items, cursor = self._page(model, path, query)
        while cursor is not None:
            more, cursor = self._page(model, path, {**query, "after": cursor})
            items += more
        return items

    def _page(self, model: type[Model], path: str, query: Mapping[str, str]) -> tuple[list[Model], str | None]:
        body = self._send("GET", path, query=query)
        return [model.model_validate(item) for item in body["data"]], body["next"]

    def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> Any:
        repeatable = method == "GET" or "Idempotency-Key" in (headers or {})
        try:
            try:
                response = self._http.request(method, path, json=body, headers=headers, params=query)
            except (httpx.RemoteProtocolError, httpx.ReadError):
                # A kept connection that the server closed just then.
                if not repeatable:
                    raise
                response = self._http.request(method, path, json=body, headers=headers, params=query)
        except httpx.ConnectError as error:
            raise self._unreachable(error) from None
        except httpx.HTTPError as error:
            raise Unavailable(f"the admin API at {self._url} failed ({type(error).__name__})") from None
        if response.status_code >= 400:
            raise _error(response)
        return response.json()


def _error(response: httpx.Response) -> IngleError:
    kind = _ERRORS.get(response.status_code, IngleError)
    try:
        detail = schemas.Error.model_validate_json(response.content).error
    except ValueError:
        return kind(f"the admin API answered {response.status_code}")
    return kind(detail.message, code=detail.code, param=detail.param)


def _part(text: str) -> str:
    return quote(text, safe="")
