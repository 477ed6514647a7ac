"""The OpenAPI 3.1 document, made from the table of operations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from control_plane.api.operations import Operation
from control_plane.api.schemas import Error

LINES = "application/x-ndjson"
_REF = "#/components/schemas/{model}"


def openapi(operations: Sequence[Operation], version: str) -> dict[str, Any]:
    models = {operation.gives for operation in operations} | {o.takes for o in operations if o.takes} | {Error}
    ordered = sorted(models, key=lambda model: model.__name__)
    modes, schema = models_json_schema([(model, "validation") for model in ordered], ref_template=_REF)
    names = {model: modes[(model, "validation")]["$ref"] for model in ordered}
    paths: dict[str, Any] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, names)
    return {
        "openapi": "3.1.0",
        "info": {"title": "ingle admin API", "version": version},
        "paths": paths,
        "components": {
            "schemas": schema["$defs"],
            "securitySchemes": {"adminToken": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"adminToken": []}],
    }


def _operation(operation: Operation, names: dict[Any, str]) -> dict[str, Any]:
    item = {"$ref": names[operation.gives]}
    content: dict[str, Any] = item
    if operation.is_list:
        content = {
            "type": "object",
            "required": ["data", "next"],
            "properties": {"data": {"type": "array", "items": item}, "next": {"type": ["string", "null"]}},
        }
    kind = LINES if operation.is_lines else "application/json"
    result: dict[str, Any] = {
        "operationId": operation.id,
        "summary": operation.summary,
        "description": f"Needs role {operation.role} or higher.",
        "parameters": _parameters(operation),
        "responses": {
            str(operation.status): {"description": "done", "content": {kind: {"schema": content}}},
            "default": {
                "description": "an error",
                "content": {"application/json": {"schema": {"$ref": names[Error]}}},
            },
        },
    }
    if operation.takes:
        result["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": names[operation.takes]}}},
        }
    return result


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", operation.path)
    ]
    for parameter in operation.parameters:
        parameters.append(
            {
                "name": parameter.name,
                "in": "query",
                "description": parameter.description,
                "schema": {"type": parameter.kind},
            }
        )
    headers = [("Idempotency-Key", operation.idempotent), ("If-Match", operation.conditional and operation.takes)]
    parameters += [{"name": name, "in": "header", "schema": {"type": "string"}} for name, there in headers if there]
    return parameters
