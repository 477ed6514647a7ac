"""The error tree of the data plane.

DataPlaneError
├── StartError                 a replica cannot start; `code` goes into its last stdout line
│   ├── ModelNotFound          model_not_found            permanent
│   ├── ModelUnreadable        model_unreadable           permanent
│   ├── UnsupportedModel       unsupported_architecture   permanent
│   ├── InvalidArgument        invalid_argument           permanent, exit 2
│   ├── PortInUse              port_in_use                passing
│   ├── NotEnoughMemory        out_of_memory              passing
│   ├── StageRefused           stage_refused              permanent; a stage that the engine doesn't take
│   └── StageLost              stage_lost                 passing; also where a stage goes while it serves
├── EngineDied                 engine_died                the engine process ended or stopped making progress
└── RequestError               one request's own fault, or refused; carries its HTTP status
"""

from __future__ import annotations


class DataPlaneError(Exception):
    """Anything this half raises on purpose."""


class StartError(DataPlaneError):
    """A replica cannot start.

    `code` is stable and machine-readable; `str(error)` is one line that names what to do.
    """

    code = "start_failed"
    exit_code = 1

    def __init__(self, message: str) -> None:
        # names out of a broken file may hold anything, line ends and terminal codes included
        super().__init__(" ".join("".join(char if char.isprintable() else " " for char in message).split()))


class ModelNotFound(StartError):
    code = "model_not_found"
    exit_code = 4


class ModelUnreadable(StartError):
    code = "model_unreadable"


class UnsupportedModel(StartError):
    code = "unsupported_architecture"


class InvalidArgument(StartError):
    code = "invalid_argument"
    exit_code = 2


class PortInUse(StartError):
    code = "port_in_use"


class NotEnoughMemory(StartError):
    code = "out_of_memory"


class StageLost(StartError):
    code = "stage_lost"


class StageRefused(StartError):
    code = "stage_refused"
    exit_code = 2


class EngineDied(DataPlaneError):
    code = "engine_died"


class RequestError(DataPlaneError):
    """A refusal that ends one request with an OpenAI-shaped error and touches no other."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        type: str = "invalid_request_error",
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        self.type = type
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, dict[str, str | None]]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


START_ERRORS: dict[str, type[StartError]] = {
    kind.code: kind
    for kind in (
        ModelNotFound,
        ModelUnreadable,
        UnsupportedModel,
        InvalidArgument,
        PortInUse,
        NotEnoughMemory,
        StageRefused,
        StageLost,
    )
}
