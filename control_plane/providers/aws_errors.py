"""What AWS's error codes mean to us. Pure."""

from __future__ import annotations

from enum import StrEnum

from control_plane.errors import ProviderError


class Kind(StrEnum):
    """CAPACITY: not here, not now. QUOTA: the account may not have more. THROTTLED: too often. DENIED: not allowed.

    MISSING: what is named isn't there. TAKEN: somebody else was first. INVALID: the request can't ever be right.
    PASSING: it may or may not have happened.
    """

    CAPACITY = "no_capacity"
    QUOTA = "quota_exceeded"
    THROTTLED = "throttled"
    DENIED = "not_authorized"
    MISSING = "not_found"
    TAKEN = "conflict"
    INVALID = "launch_refused"
    PASSING = "cloud_unreachable"


class AwsFault(ProviderError):
    """A call that failed. `aws_code` is AWS's own word, such as `UnauthorizedOperation`.

    `repeated` says that an attempt before may have taken effect, without an answer; `bucket_region` is where S3 said
    that its bucket is, if it did.
    """

    def __init__(self, operation: str, kind: Kind, aws_code: str, message: str, *, bucket_region: str = "") -> None:
        super().__init__(f"AWS {operation}: {aws_code}: {message}"[:400], code=kind.value)
        self.bucket_region = bucket_region
        self.kind = kind
        self.aws_code = aws_code
        self.repeated = False


_KINDS = {
    Kind.CAPACITY: (
        "InsufficientInstanceCapacity",
        "InsufficientHostCapacity",
        "InsufficientReservedInstanceCapacity",
        "InsufficientCapacity",
        "InsufficientCapacityOnHost",
        "InsufficientFreeAddressesInSubnet",
        "SpotMaxPriceTooLow",
        "Unsupported",  # a type that this zone hasn't
    ),
    Kind.QUOTA: (
        "VcpuLimitExceeded",
        "InstanceLimitExceeded",
        "MaxSpotInstanceCountExceeded",
        "SpotInstanceCountLimitExceeded",
        "VolumeLimitExceeded",
        "MaxIOPSLimitExceeded",
        "NetworkInterfaceLimitExceeded",
        "ResourceLimitExceeded",
        "LimitExceededException",
    ),
    Kind.THROTTLED: (
        "RequestLimitExceeded",
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "RequestThrottled",
        "RequestThrottledException",
        "TooManyRequestsException",
        "EC2ThrottledException",
        "SlowDown",
        "BandwidthLimitExceeded",
    ),
    Kind.DENIED: (
        "UnauthorizedOperation",
        "AuthFailure",
        "AccessDenied",
        "AccessDeniedException",
        "InvalidClientTokenId",
        "InvalidAccessKeyId",
        "UnrecognizedClientException",
        "SignatureDoesNotMatch",
        "InvalidSignatureException",
        "OptInRequired",
        "Blocked",
        "PendingVerification",
        "MissingAuthenticationToken",
        "MissingAuthenticationTokenException",
    ),
    Kind.MISSING: ("NoSuchKey", "NoSuchBucket", "NotFound", "404", "ResourceNotFoundException"),
    Kind.TAKEN: (
        "PreconditionFailed",
        "412",
        "ConditionalRequestConflict",
        "ResourceExistsException",
        "IdempotentParameterMismatch",
    ),
    # They pass by themselves: credentials are refreshed, instances that just were made become known.
    Kind.PASSING: ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "InvalidInstanceID.NotFound"),
}
_KIND = {code: kind for kind, codes in _KINDS.items() for code in codes}


def kind_of(code: str, status: int) -> Kind:
    """The kind of an answer with AWS's error `code` and the HTTP `status`."""
    if code in _KIND:
        return _KIND[code]
    if status == 403:
        return Kind.DENIED
    return Kind.INVALID if 400 <= status < 500 and status not in (408, 429) else Kind.PASSING


_REASONS = {
    "Server.SpotInstanceTermination": "spot_interrupted",
    "Server.InsufficientInstanceCapacity": "no_capacity",
    "Client.VolumeLimitExceeded": "quota_exceeded",
    "Client.InstanceInitiatedShutdown": "replica_exited",
    "Client.InternalError": "start_failed",
    "Server.InternalError": "replica_lost",
}


def reason_of(state_reason: str) -> str:
    """Our code for why an instance went, by EC2's `StateReason.Code`."""
    return _REASONS.get(state_reason, "replica_lost")
