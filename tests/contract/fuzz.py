"""`make fuzz`: requests made from the replica's own OpenAPI document, valid and broken; none may end in a 5xx.

What comes back must also be what the document says of it. Prints how many requests were sent and what they got.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from data_plane.loading.sources import pull
from tests.data_plane.replica import Replica, running

MODEL = "smollm2-135m-instruct"
# replies that end for want of room, so that a request which asks for 128 of them is not a wait
FLAGS = ("--name", "m", "--max-model-len", "48", "--kv-cache-tokens", "8192")
CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
REQUEST_S = 60.0


def fuzz(replica: Replica, requests: int, number: int) -> Counter[int]:
    """Send about so many requests, as drawn from seed `number`; count them by status. Raises what a check found."""
    schema = schemathesis.openapi.from_url(f"{replica.client.base_url}/openapi.json")
    operations: list[Any] = [found.ok() for found in schema.get_all_operations()]  # type: ignore[union-attr]
    posts = [operation for operation in operations if operation.method.upper() == "POST"]
    gets = [operation for operation in operations if operation not in posts]
    statuses: Counter[int] = Counter()
    for operation in gets:
        _send(replica, operation, GenerationMode.POSITIVE, min(10, requests), number, statuses)
    share = max(1, (requests - statuses.total()) // (2 * len(posts)))
    for operation in posts:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            _send(replica, operation, mode, share, number, statuses)
    return statuses


def _send(
    replica: Replica, operation: Any, mode: GenerationMode, count: int, number: int, statuses: Counter[int]
) -> None:
    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def once(case: Any) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = replica.name
        response = case.call(timeout=REQUEST_S)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    once()


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz ARGS=…")
    parser.add_argument("--requests", type=int, default=5200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running(pull(MODEL), Path(folder) / "log", *FLAGS) as replica:
        statuses = fuzz(replica, arguments.requests, arguments.seed)
        assert replica.process.poll() is None
    told = ", ".join(f"{count} of {status}" for status, count in sorted(statuses.items()))
    print(f"fuzz ok requests={statuses.total()} ({told}) seed={arguments.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
