from __future__ import annotations

import pytest

from loramux.errors import InvalidRequest
from loramux.sources.config import (
    AzureConfig,
    FetchLimits,
    GcsConfig,
    HttpConfig,
    HubConfig,
    S3Config,
    Secret,
    SourceConfig,
)
from loramux.sources.source_id import SourceKind


def test_no_credential_shows_in_the_config_and_all_are_known_for_scrubbing() -> None:
    values = [f"secret-number-{index}" for index in range(8)]
    secrets = [Secret(value) for value in values]
    config = SourceConfig(
        hub=HubConfig(token=secrets[0]),
        s3=S3Config(
            access_key_id=secrets[1], secret_access_key=secrets[2], session_token=secrets[3]
        ),
        gcs=GcsConfig(service_account_key=secrets[4]),
        azure=AzureConfig(account_key=secrets[5], sas_token=secrets[6]),
        http=HttpConfig(tokens=(("host", secrets[7]),)),
    )
    assert not any(value in repr(config) for value in values)
    assert {secret.reveal() for secret in config.secrets} == set(values)


@pytest.mark.parametrize(
    ("entry", "scheme", "host", "port", "is_allowed"),
    [
        ("example.com", "https", "example.com", 443, True),
        ("example.com", "http", "example.com", 80, True),
        ("EXAMPLE.com", "https", "example.com", 443, True),
        ("example.com", "https", "example.com", 8443, False),
        ("example.com:8443", "https", "example.com", 8443, True),
        ("example.com:8443", "https", "example.com", 443, False),
        ("example.com", "https", "evil-example.com", 443, False),
        ("example.com", "https", "a.example.com", 443, False),
        ("*.example.com", "https", "a.b.example.com", 443, True),
        ("*.example.com", "https", "example.com", 443, False),
        ("*.example.com", "https", "evilexample.com", 443, False),
        ("*", "https", "anything.org", 443, True),
        ("*", "https", "anything.org", 22, False),
        ("[::1]:80", "http", "::1", 80, True),
    ],
)
def test_a_host_is_allowed_by_its_whole_name_and_port(
    entry: str, scheme: str, host: str, port: int, is_allowed: bool
) -> None:
    config = HttpConfig(allowed_hosts=(entry,))
    assert config.allows(scheme, host, port) is is_allowed
    assert not config.allows_private(scheme, host, port)


def test_a_private_host_is_allowed_too_and_a_token_goes_to_its_host_only() -> None:
    token = Secret("t")
    config = HttpConfig(private_hosts=("inner:81",), tokens=(("inner:81", token),))
    assert config.allows("http", "inner", 81)
    assert config.allows_private("http", "inner", 81)
    assert config.token_for("http", "inner", 81) is token
    assert config.token_for("http", "inner", 80) is None


@pytest.mark.parametrize(
    "entry", ["", "https://a.com", "a.com/x", "u@a.com", "a.com:x", "a.*.com", "*a.com", "a?b"]
)
def test_a_list_with_what_is_no_host_is_refused(entry: str) -> None:
    with pytest.raises(InvalidRequest, match="not a host"):
        HttpConfig(allowed_hosts=(entry,))


@pytest.mark.parametrize("name", ["max_file_bytes", "timeout_s", "max_attempts", "part_bytes"])
def test_limits_must_leave_something(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        FetchLimits(**{name: 0})


def test_each_kind_of_bucket_has_its_settings() -> None:
    config = SourceConfig()
    assert config.bucket_config(SourceKind.S3) is config.s3
    assert config.bucket_config(SourceKind.GCS) is config.gcs
    assert config.bucket_config(SourceKind.AZURE) is config.azure


def test_half_a_key_is_a_mistake() -> None:
    with pytest.raises(InvalidRequest, match="both"):
        S3Config(access_key_id=Secret("id"))
