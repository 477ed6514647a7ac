from __future__ import annotations

from pathlib import Path

import pytest

from control_plane.config import load_settings
from control_plane.domain import Address
from control_plane.errors import ConfigError
from control_plane.providers.catalogue import open_providers
from control_plane.security.secret import load_secret

AWS = (
    '{"aws_region": "eu-central-1", "bucket": "b-1", "launch_template": "lt-0123456789abcdef0",'
    ' "subnets": ["subnet-0123456789abcdef0"], "machines": [{"type": "g6.xlarge", "accelerator": "L4"}]}'
)
AWS_KEY_ELSEWHERE = AWS.replace("{", '{"kms_key": "arn:aws:kms:us-east-1:123456789012:key/k-1", ', 1)
RAY = '{"address": "127.0.0.1:6379", "token_file": "/none/token"}'


def test_flags_beat_the_environment_beats_the_file_beats_defaults(tmp_path: Path) -> None:
    (tmp_path / "ingle.toml").write_text(
        'admin = "127.0.0.1:1"\ngateway = "127.0.0.1:2"\nlog_level = "debug"\n'
        "[limits]\nmax_held = 7\nmax_in_flight = 8\n"
    )
    env = {"INGLE_HOME": str(tmp_path), "INGLE_ADMIN": "127.0.0.1:3", "INGLE_LIMITS__MAX_HELD": "9"}
    settings = load_settings({"admin": "127.0.0.1:4", "gateway": None}, env)
    assert settings.home == tmp_path
    assert (settings.admin, settings.gateway, settings.log_level) == ("127.0.0.1:4", "127.0.0.1:2", "debug")
    assert (settings.limits.max_held, settings.limits.max_in_flight) == (9, 8)
    assert load_settings({}, env).admin == "127.0.0.1:3"
    assert load_settings({"home": tmp_path}, {}).store_url == f"sqlite+aiosqlite:///{tmp_path}/ingle.db"


def test_regions_take_the_next_ports_unless_they_have_their_own(tmp_path: Path) -> None:
    regions = '[{"name": "a"}, {"name": "b", "gateway": "[::1]:99"}, {"name": "c"}]'
    settings = load_settings({"home": tmp_path, "gateway": "0.0.0.0:8443"}, {"INGLE_REGIONS": regions})
    assert [str(settings.gateway_address(name)) for name in "abc"] == ["0.0.0.0:8443", "[::1]:99", "0.0.0.0:8445"]
    with pytest.raises(ConfigError, match="a, b, c"):
        settings.gateway_address("d")
    anywhere = load_settings({"home": tmp_path, "gateway": "127.0.0.1:0"}, {"INGLE_REGIONS": regions})
    assert anywhere.gateway_address("c") == Address("127.0.0.1", 0)


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"INGLE_ADMIN": "nonsense"}, "admin"),
        ({"INGLE_ADMIN": "host:99999"}, "admin"),
        ({"INGLE_REGIONS": "x"}, "INGLE_REGIONS"),
        ({"INGLE_REGIONS": "[]"}, "regions"),
        ({"INGLE_REGIONS": '[{"name": "A b"}]'}, "regions.0.name"),
        ({"INGLE_REGIONS": '[{"name": "a"}, {"name": "a"}]'}, "regions"),
        ({"INGLE_REGIONS": '[{"name": "a", "jurisdiction": "France"}]'}, "regions.0.jurisdiction"),
        ({"INGLE_REGIONS": '[{"name": "a", "provider": "cloud"}]'}, "regions.0.provider"),
        ({"INGLE_REGIONS": '[{"name": "a", "otlp_endpoint": "collector:4317"}]'}, "regions.0.otlp_endpoint"),
        ({"INGLE_REGIONS": '[{"name": "a", "otlp_endpoint": "http://u:p@c:1"}]'}, "otlp_endpoint: must hold no"),
        (
            {
                "INGLE_REGIONS": '[{"name": "a", "jurisdiction": "DE", "otlp_endpoint": "http://c:1/"},'
                ' {"name": "b", "jurisdiction": "FR", "otlp_endpoint": "http://c:1"}]'
            },
            "otlp_endpoint of a and b is the same",
        ),
        ({"INGLE_REGIONS": '[{"name": "a", "provider": "ray"}]'}, "regions.0: ray"),
        ({"INGLE_REGIONS": f'[{{"name": "a", "ray": {RAY}}}]'}, "regions.0: ray"),
        ({"INGLE_REGIONS": f'[{{"name": "a", "provider": "ray", "ray": {RAY}}}]'}, "replica_tls"),
        ({"INGLE_REGIONS": '[{"name": "a", "provider": "aws"}]'}, "regions.0: aws"),
        ({"INGLE_REGIONS": f'[{{"name": "a", "aws": {AWS}}}]'}, "regions.0: aws"),
        ({"INGLE_REGIONS": f'[{{"name": "a", "provider": "aws", "aws": {AWS}}}]'}, "replica_tls"),
        (
            {"INGLE_REGIONS": f'[{{"name": "a", "provider": "aws", "aws": {AWS.replace("lt-", "ec2-")}}}]'},
            "regions.0.aws.launch_template",
        ),
        (
            {"INGLE_REGIONS": f'[{{"name": "a", "provider": "aws", "aws": {AWS_KEY_ELSEWHERE}}}]'},
            "regions.0.aws.kms_key: must be a KMS key in eu-central-1",
        ),
        ({"INGLE_REGIONS": '[{"name": "a", "provider": "ray", "ray": {"token_file": "t"}}]'}, "regions.0.ray.address"),
        ({"INGLE_REGIONS": '[{"name": "a", "ray": {"address": "h:1", "token_file": "t", "cpus": 0}}]'}, "ray.cpus"),
        ({"INGLE_LIMITS__MAX_HELD": "-1"}, "limits.max_held"),
        ({"INGLE_LIMITS__MAX_HELD": "many"}, "limits.max_held"),
        ({"INGLE_TIMING__TICK": "0"}, "timing.tick"),
        ({"INGLE_LOG_LEVEL": "loud"}, "log_level"),
    ],
)
def test_a_bad_value_is_named(tmp_path: Path, env: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_settings({"home": tmp_path}, env)


def test_it_is_told_where_the_keyring_is(tmp_path: Path) -> None:
    arn = "arn:aws:kms:eu-north-1:123456789012:key/k-1"
    for kms, place in (
        ({}, "the control plane's machine"),
        ({"kms_key": arn, "aws_region": "eu-west-1"}, "AWS KMS in eu-north-1"),
        ({"kms_key": "alias/ingle", "aws_region": "eu-west-1"}, "AWS KMS in eu-west-1"),
    ):
        assert load_settings({"home": tmp_path, "keyring": kms}, {}).keyring.place == place


def test_a_region_on_ray_is_private_and_needs_its_token(tmp_path: Path) -> None:
    regions = f'[{{"name": "fr-1", "jurisdiction": "FR", "provider": "ray", "ray": {RAY}}}]'
    settings = load_settings({"home": tmp_path, "replica_tls": True}, {"INGLE_REGIONS": regions})
    (region,) = settings.regions
    assert (region.jurisdiction, region.provider) == ("FR", "ray")
    assert region.ray is not None
    assert (region.ray.label, region.ray.value, region.ray.cpus) == ("region", None, 1.0)
    with pytest.raises(ConfigError, match=r"region fr-1: ray\.token_file /none/token"):
        open_providers(settings, load_secret(tmp_path), None, {})


@pytest.mark.parametrize("text", ["not toml", "unknown_field = 1", "[limits]\nmax_hold = 1"])
def test_a_bad_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "ingle.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"ingle\.toml|unknown_field|limits\.max_hold"):
        load_settings({"home": tmp_path}, {})
