"""Spec files: YAML documents that say what endpoints and tenants are to be. Pure.

A document is the whole truth about its thing: what it leaves out has its default. Durations and schedules are written
as on the command line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from control_plane.api import schemas
from control_plane.api.fields import Name
from control_plane.config import describe_validation
from control_plane.errors import InvalidInput
from control_plane.planning import presets
from control_plane.spans import SpanError, duration, show_duration, show_window, window

MOST_BYTES = 4 << 20
MOST_DOCUMENTS = 1000
_DURATIONS = ("idle_timeout", "max_wait", "retention", "ttft_slo")
_LIMITS = tuple(schemas.Limits.model_fields)
_TENANT_LIMITS = tuple(schemas.TenantLimits.model_fields)
_KEPT = ("name", "region", "tenant")


class EndpointSpec(schemas.EndpointCreate):
    kind: Literal["endpoint"]


class TenantSpec(schemas.TenantLimits):
    kind: Literal["tenant"]
    name: Name


Spec = EndpointSpec | TenantSpec
_KINDS: dict[str, type[EndpointSpec] | type[TenantSpec]] = {"endpoint": EndpointSpec, "tenant": TenantSpec}


@dataclass(frozen=True)
class Change:
    """What a document comes to. `fields` has, by name, what is and what is to be; `move` is another region."""

    verb: Literal["create", "update", "move", "delete", "keep"]
    kind: str
    name: str
    fields: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    spec: Spec | None = None
    generation: int | None = None

    def __str__(self) -> str:
        sign = {"create": "+", "update": "~", "move": "!", "delete": "-", "keep": "="}[self.verb]
        lines = [f"{sign} {self.kind} {self.name}"]
        lines += [f"    {name}: {_brief(old)} → {_brief(new)}" for name, (old, new) in self.fields.items()]
        return "\n".join(lines)


def parse(text: str, where: str) -> list[Spec]:
    """All documents of a file. Raises InvalidInput that names each document and field that is off."""
    if len(text) > MOST_BYTES:
        raise InvalidInput(f"{where} is over {MOST_BYTES} bytes", param="file")
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise InvalidInput(f"{where}: {' '.join(str(error).split())}", param="file") from None
    if len(documents) > MOST_DOCUMENTS:
        raise InvalidInput(f"{where} has over {MOST_DOCUMENTS} documents", param="file")
    found, wrong = [], []
    for number, document in enumerate(documents, 1):
        try:
            found.append(_document(document))
        except (ValueError, SpanError) as error:
            told = describe_validation(error) if isinstance(error, ValidationError) else str(error)
            name = document.get("name") if isinstance(document, dict) else None
            wrong.append(f"{where}, document {number}{f' ({name})' if isinstance(name, str) else ''}: {told}")
    if wrong:
        raise InvalidInput("\n".join(wrong), param="file")
    return found


def check(specs: Sequence[Spec]) -> None:
    """Raises InvalidInput where a thing is described twice."""
    seen: set[tuple[str, str]] = set()
    for spec in specs:
        if (spec.kind, spec.name) in seen:
            raise InvalidInput(f"{spec.kind} {spec.name} is described twice", param="name")
        seen.add((spec.kind, spec.name))


def compare(
    specs: Sequence[Spec], endpoints: Iterable[schemas.Endpoint], tenants: Iterable[schemas.Tenant], *, prune: bool
) -> list[Change]:
    """What is to be done, tenants first. With `prune`, endpoints of the tenants in the files that aren't in them go.

    Raises InvalidInput where an endpoint's tenant is neither there nor in the files, or another one's.
    """
    there = {endpoint.name: endpoint for endpoint in endpoints}
    known = {tenant.name: tenant for tenant in tenants}
    changes = [_tenant(spec, known.get(spec.name)) for spec in specs if isinstance(spec, TenantSpec)]
    wanted = [spec for spec in specs if isinstance(spec, EndpointSpec)]
    owners = {spec.tenant for spec in wanted} | {change.name for change in changes}
    lacking = sorted(owners - known.keys() - {change.name for change in changes})
    if lacking:
        raise InvalidInput(f"there is no tenant {lacking[0]!r}, and no document makes it", param="tenant")
    changes += [_endpoint(spec, there.get(spec.name)) for spec in wanted]
    if prune:
        names = {spec.name for spec in wanted}
        changes += [
            Change("delete", "endpoint", endpoint.name)
            for endpoint in there.values()
            if endpoint.tenant in owners and endpoint.name not in names
        ]
    return changes


def body_of(spec: Spec) -> dict[str, Any]:
    """What the admin API takes to create it."""
    return spec.model_dump(mode="json", exclude={"kind"}, exclude_unset=True)


def changes_of(change: Change) -> dict[str, Any]:
    """What the admin API takes to update it: all of the document where anything differs, since fields hang together."""
    assert change.spec is not None  # noqa: S101 - an update has one
    whole = change.spec.model_dump(mode="json", exclude={"kind", *_KEPT})
    if "warmth" in whole and whole["warmth"] is None:
        whole["warmth"] = "auto" if "max_wait" in change.spec.model_fields_set else "cold"
    return whole


def export(endpoints: Iterable[schemas.Endpoint], tenants: Iterable[schemas.Tenant]) -> str:
    """Documents that say what is, without what is as it would be anyway."""
    documents = [
        _tenant_document(tenant) for tenant in tenants if tenant.name != "default" or any(_given(tenant.limits))
    ]
    documents += [_endpoint_document(endpoint) for endpoint in endpoints]
    return "---\n".join(yaml.safe_dump(document, sort_keys=False, allow_unicode=True) for document in documents)


def json_schema() -> dict[str, Any]:
    """For editors: one document."""
    variants = []
    for model in _KINDS.values():
        schema = model.model_json_schema(ref_template="#/$defs/{model}")
        for name in _DURATIONS:
            if name in schema["properties"]:
                schema["properties"][name] = {
                    "anyOf": [schema["properties"][name], {"type": "string", "pattern": r"^\d+(\.\d+)?(ms|s|m|h|d)?$"}]
                }
        if "schedule" in schema["properties"]:
            schema["properties"]["schedule"] = {"type": "array", "items": {"type": "string"}, "maxItems": 50}
        variants.append(schema)
    defs: dict[str, Any] = {}
    for schema in variants:
        defs |= schema.pop("$defs", {})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ingle spec",
        "oneOf": variants,
        "$defs": defs,
    }


def _document(document: Any) -> Spec:
    if not isinstance(document, dict):
        raise ValueError("it isn't a mapping of fields")
    kind = document.get("kind")
    model = _KINDS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise ValueError(f"kind: must be {' or '.join(_KINDS)}")
    fields = dict(document)
    for name in _DURATIONS:
        if isinstance(fields.get(name), str):
            fields[name] = _at(name, duration, fields[name])
    if isinstance(fields.get("schedule"), list):
        fields["schedule"] = [
            _at(f"schedule.{place}", window, item) if isinstance(item, str) else item
            for place, item in enumerate(fields["schedule"])
        ]
    return model.model_validate(fields)


def _at(name: str, read: Any, text: str) -> Any:
    try:
        return read(text)
    except SpanError as error:
        raise ValueError(f"{name}: {error}") from None


def _tenant(spec: TenantSpec, there: schemas.Tenant | None) -> Change:
    if there is None:
        return Change("create", "tenant", spec.name, spec=spec)
    fields = {
        name: (getattr(there.limits, name), getattr(spec, name))
        for name in _TENANT_LIMITS
        if getattr(there.limits, name) != getattr(spec, name)
    }
    return Change("update" if fields else "keep", "tenant", spec.name, fields, spec)


def _endpoint(spec: EndpointSpec, there: schemas.Endpoint | None) -> Change:
    if there is None:
        return Change("create", "endpoint", spec.name, spec=spec)
    wanted = spec.model_dump(mode="json", exclude={"kind", "warmth"})
    wanted["engine_args"] = list(presets.resolve(spec.preset, spec.engine_args))
    actual = there.model_dump(mode="json") | there.limits.model_dump(mode="json")
    fields = {name: (actual[name], value) for name, value in wanted.items() if actual[name] != value}
    auto = spec.warmth == "auto" or (spec.warmth is None and "max_wait" in spec.model_fields_set)
    if auto != there.warmth_by_wait or (not auto and (spec.warmth or "cold") != there.warmth):
        fields["warmth"] = ("auto" if there.warmth_by_wait else there.warmth, "auto" if auto else spec.warmth or "cold")
    if "tenant" in fields:
        raise InvalidInput(f"endpoint {spec.name} is {there.tenant}'s, not {spec.tenant}'s", param="tenant")
    unproved = sorted(fields.keys() & {"model", "engine_args", "preset"})
    if "region" in fields and unproved:
        raise InvalidInput(
            f"endpoint {spec.name} would end in {there.region} before {' and '.join(unproved)} was proved in "
            f"{spec.region}: apply that change first, then the region",
            param="region",
        )
    verb: Literal["move", "update", "keep"] = "move" if "region" in fields else "update" if fields else "keep"
    return Change(verb, "endpoint", spec.name, fields, spec, there.generation)


def _given(limits: schemas.Limits) -> dict[str, Any]:
    return {name: value for name, value in limits.model_dump().items() if value is not None}


def _tenant_document(tenant: schemas.Tenant) -> dict[str, Any]:
    return {"kind": "tenant", "name": tenant.name, **_given(tenant.limits)}


def _endpoint_document(endpoint: schemas.Endpoint) -> dict[str, Any]:
    data = endpoint.model_dump(mode="json")
    fields = EndpointSpec.model_fields
    document: dict[str, Any] = {"kind": "endpoint"}
    for name in fields:
        if name in ("kind", "warmth", *_LIMITS):
            continue
        default = fields[name].get_default(call_default_factory=True)
        if fields[name].is_required() or data[name] != default:
            document[name] = data[name]
    document["engine_args"] = [
        argument for argument in endpoint.engine_args if argument not in presets.resolve(endpoint.preset, ())
    ]
    if not document["engine_args"]:
        del document["engine_args"]
    if endpoint.warmth_by_wait:
        document |= {"warmth": "auto", "max_wait": endpoint.max_wait}
    elif endpoint.warmth != "cold" or "max_wait" in document:
        document["warmth"] = endpoint.warmth
    for name in _DURATIONS:
        if document.get(name) is not None:
            document[name] = show_duration(document[name])
    if "schedule" in document:
        document["schedule"] = [show_window(item.model_dump()) for item in endpoint.schedule]
    return document | _given(endpoint.limits)


def _brief(value: Any) -> str:
    return "none" if value in (None, [], ()) else str(value)
