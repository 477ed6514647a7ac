"""Every error that ingle raises on purpose.

    IngleError
    ├── InvalidInput            400  exit 2   a field is missing, malformed or out of range
    │   ├── Unprocessable       422  exit 2   the same, in the admin API
    │   ├── MethodNotAllowed    405  exit 2
    │   ├── TooLarge            413  exit 2
    │   ├── RequestTimeout      408  exit 2   a request's body stopped coming
    │   └── ConfigError         500  exit 2   settings, flags, files and ports of this installation
    ├── Unauthenticated         401  exit 3
    ├── Forbidden               403  exit 3
    │   └── ResidencyMismatch   403  exit 3
    ├── NotFound                404  exit 4
    ├── Conflict                409  exit 1
    │   └── PreconditionFailed  412  exit 1
    ├── RateLimited             429  exit 1
    ├── UpstreamError           502  exit 1
    ├── Unavailable             503  exit 1
    │   ├── EndpointUnavailable 503  exit 1   starting, paused, failed or without capacity: the code says which
    │   ├── Overloaded          503  exit 1
    │   └── StoreUnavailable    503  exit 1
    ├── DamagedBackup           500  exit 1   a backup that was changed or cut, or isn't one
    ├── LeaseLost               500  exit 1   another controller took the row: stop working on it
    ├── ProviderError           500  exit 1   a passing fault of a provider
    │   └── ProviderRefused     500  exit 1   nothing was created: no capacity, or (permanent) never will be
    └── GaveUpWaiting           504  exit 5

An error's message is one line for a person and never carries a secret; `code` is for programs.
"""

from __future__ import annotations

from typing import Any, ClassVar


class IngleError(Exception):
    """Base of the tree. `param` names the offending field, `retry_after` is in seconds."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    exit_code: ClassVar[int] = 1
    default_code: ClassVar[str] = "internal_error"

    def __init__(
        self, message: str, *, code: str | None = None, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.param = param
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's shape: all four keys, always."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidInput(IngleError):
    status = 400
    type = "invalid_request_error"
    exit_code = 2
    default_code = "invalid_value"


class Unprocessable(InvalidInput):
    status = 422


class MethodNotAllowed(InvalidInput):
    status = 405
    default_code = "method_not_allowed"


class TooLarge(InvalidInput):
    status = 413
    default_code = "request_too_large"


class RequestTimeout(InvalidInput):
    status = 408
    default_code = "request_timeout"


class ConfigError(InvalidInput):
    status = 500
    default_code = "invalid_configuration"


class KeyringMissing(ConfigError):
    default_code = "keyring_missing"


class Unauthenticated(IngleError):
    status = 401
    type = "authentication_error"
    exit_code = 3
    default_code = "invalid_api_key"


class Forbidden(IngleError):
    status = 403
    type = "permission_error"
    exit_code = 3
    default_code = "permission_denied"


class ResidencyMismatch(Forbidden):
    default_code = "residency_mismatch"


class NotFound(IngleError):
    status = 404
    type = "invalid_request_error"
    exit_code = 4
    default_code = "not_found"


class Conflict(IngleError):
    status = 409
    type = "invalid_request_error"
    default_code = "conflict"


class PreconditionFailed(Conflict):
    status = 412
    default_code = "precondition_failed"


class RateLimited(IngleError):
    status = 429
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"


class UpstreamError(IngleError):
    status = 502
    default_code = "upstream_error"


class Unavailable(IngleError):
    status = 503
    default_code = "unavailable"


class EndpointUnavailable(Unavailable):
    default_code = "endpoint_starting"


class Overloaded(Unavailable):
    default_code = "overloaded"


class StoreUnavailable(Unavailable):
    default_code = "store_unavailable"


class DamagedBackup(IngleError):
    default_code = "backup_damaged"


class LeaseLost(IngleError):
    default_code = "lease_lost"


class ProviderError(IngleError):
    default_code = "provider_error"


class ProviderRefused(ProviderError):
    """A clear no from the provider: nothing was created. `permanent` means that asking again is pointless."""

    default_code = "no_capacity"

    def __init__(self, message: str, *, code: str | None = None, permanent: bool = False) -> None:
        super().__init__(message, code=code)
        self.permanent = permanent


class GaveUpWaiting(IngleError):
    status = 504
    exit_code = 5
    default_code = "gave_up_waiting"
