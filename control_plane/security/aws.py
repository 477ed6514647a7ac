"""Clients of AWS through boto3, which is an extra: `pip install 'ingle[aws]'`. Credentials come as boto3 finds them."""

from __future__ import annotations

from typing import Any

from control_plane.errors import ConfigError

_CONNECT_SECONDS = 3.0
_READ_SECONDS = 5.0
_ATTEMPTS = 3


def aws_client(service: str, region: str | None, endpoint_url: str | None, *, attempts: int = _ATTEMPTS) -> Any:
    """`attempts` is how often a call is made before it fails.

    Raises ConfigError where boto3 isn't installed or has no region.
    """
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError:
        raise ConfigError("boto3 isn't installed: pip install 'ingle[aws]'", code="aws_missing") from None
    config = Config(
        connect_timeout=_CONNECT_SECONDS, read_timeout=_READ_SECONDS, retries={"total_max_attempts": attempts}
    )
    try:
        return boto3.client(service, region_name=region, endpoint_url=endpoint_url, config=config)
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"AWS {service} can't be used: {error}", param="aws_region") from None
