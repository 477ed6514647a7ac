"""Operations on what the controller's own watch keeps: alerts, silences, the history of endpoints."""

from __future__ import annotations

from dataclasses import asdict

from control_plane.alerts.catalogue import CATALOGUE, alert
from control_plane.alerts.states import matches
from control_plane.api import observed
from control_plane.api.operations import Answer, Call, Operation, Page, Parameter, number_of
from control_plane.domain import AlertState, Role
from control_plane.errors import Unprocessable
from control_plane.observe.logs import iso
from control_plane.store import alerts, endpoints, history
from control_plane.store.database import Store
from control_plane.store.models import SilenceRow

_STATES = ("pending", "firing", "resolved")
_DAY = 86_400.0
_FINE, _COARSE = sorted(history.KEPT)
_NAMES = frozenset(item.name for item in CATALOGUE)


class ObservingOperations:
    def __init__(self, store: Store) -> None:
        self._store = store

    def table(self) -> list[Operation]:
        path = "/admin/v1/alerts"
        return [
            Operation("listAlerts", "GET", path, Role.VIEWER, "Alerts: those that fire first, then by age", self.list,
                      observed.Alert, is_list=True,
                      parameters=(Parameter("state", "pending, firing or resolved; without it the first two"),)),
            Operation("listAlertRules", "GET", f"{path}/rules", Role.VIEWER, "What alerts there are", self.rules,
                      observed.AlertRule, is_list=True),
            Operation("listAlertSilences", "GET", f"{path}/silences", Role.VIEWER, "Silences in force", self.silences,
                      observed.AlertSilence, is_list=True),
            Operation("silenceAlerts", "POST", f"{path}/silences", Role.OPERATOR, "Tell nobody for a while",
                      self.silence, observed.AlertSilence, observed.AlertSilenceCreate, status=201, idempotent=True),
            Operation("endAlertSilence", "DELETE", f"{path}/silences/{{id}}", Role.OPERATOR, "End a silence now",
                      self.end_silence, observed.AlertSilence),
            Operation("showEndpointHistory", "GET", "/admin/v1/endpoints/{name}/history", Role.VIEWER,
                      "How it was, by the minute for a day, by the hour for six weeks", self.history,
                      observed.History, is_list=True,
                      parameters=(Parameter("from", "seconds since the epoch; a day ago by default", "number"),
                                  Parameter("to", "seconds since the epoch; now by default", "number"),
                                  Parameter("step", "seconds: 3600 or more for hours", "number"))),
        ]  # fmt: skip

    async def list(self, call: Call) -> Page:
        wanted = call.query.get("state")
        if wanted is not None and wanted not in _STATES:
            raise Unprocessable(f"state must be one of {', '.join(_STATES)}", param="state")
        async with self._store.read() as session:
            found = [state for state in await alerts.list_alerts(session) if state.alert in _NAMES]
            silences = await alerts.list_silences(session, call.now)
        shown = [state for state in found if (state.state == wanted if wanted else state.state != "resolved")]
        shown.sort(key=lambda state: (state.state != "firing", -state.since))
        return Page([_alert(state, silences) for state in shown])

    async def rules(self, call: Call) -> Page:
        return Page(
            [
                observed.AlertRule(
                    name=item.name,
                    severity=item.severity.value,
                    summary=item.summary,
                    for_seconds=item.lasting,
                    expression=item.expression.promql(),
                    runbook=item.runbook,
                )
                for item in CATALOGUE
            ]
        )

    async def silences(self, call: Call) -> Page:
        async with self._store.read() as session:
            return Page([_silence(row) for row in await alerts.list_silences(session, call.now)])

    async def silence(self, call: Call) -> Answer:
        asked: observed.AlertSilenceCreate = call.body
        named = asked.matchers.get("alert")
        if named is not None and named not in _NAMES:
            raise Unprocessable(f"no alert {named!r}: `ingle alert rules` shows what there is", param="matchers.alert")
        async with self._store.write() as session:
            again = await call.once.repeated(session)
            if again is not None:
                return Answer(observed.AlertSilence.model_validate(again), 201)
            if len(await alerts.list_silences(session, call.now)) >= alerts.MOST_SILENCES:
                raise Unprocessable(f"there are {alerts.MOST_SILENCES} silences: end some", param="matchers")
            row = await alerts.add_silence(
                session, asked.matchers, asked.comment, call.actor.name, call.now, call.now + asked.seconds
            )
            await call.audit(session, "alert.silence", row.id, **asked.model_dump())
            view = _silence(row)
            call.once.remember(session, 201, view.model_dump())
            return Answer(view, 201)

    async def end_silence(self, call: Call) -> Answer:
        async with self._store.write() as session:
            row = await alerts.end_silence(session, call.path["id"], call.now)
            await call.audit(session, "alert.unsilence", row.id)
            return Answer(_silence(row))

    async def history(self, call: Call) -> Page:
        since = number_of(call.query, "from", call.now - _DAY, 0, 2**40)
        until = number_of(call.query, "to", call.now, 0, 2**40)
        asked = number_of(call.query, "step", _FINE, 1, 2**40)
        if until < since:
            raise Unprocessable("from must not be after to", param="from")
        fine = asked < _COARSE and call.now - since <= history.KEPT[_FINE]
        step = _FINE if fine else _COARSE
        async with self._store.read() as session:
            found = await endpoints.get_endpoint(session, call.path["name"])
            points = await history.list_points(session, found.id, step, since, until)
        return Page([observed.History(step=step, **asdict(point)) for point in points])


def _alert(state: AlertState, silences: list[SilenceRow]) -> observed.Alert:
    item = alert(state.alert)
    return observed.Alert(
        id=state.fingerprint,
        name=state.alert,
        severity=item.severity.value,
        state=state.state,
        summary=state.summary,
        labels=dict(state.labels),
        value=state.value,
        since=iso(state.since),
        fired_at=None if state.fired_at is None else iso(state.fired_at),
        resolved_at=None if state.resolved_at is None else iso(state.resolved_at),
        silenced=any(matches(row.matchers, state) for row in silences),
        runbook=item.runbook,
    )


def _silence(row: SilenceRow) -> observed.AlertSilence:
    return observed.AlertSilence(
        id=row.id,
        matchers=row.matchers,
        comment=row.comment,
        created_by=row.created_by,
        created_at=iso(row.created_at),
        ends_at=iso(row.ends_at),
    )
