from __future__ import annotations

import base64
import copy
from dataclasses import asdict, dataclass, fields

import pytest

from loramux.config.serve import ServeConfig
from loramux.errors import InvalidRequest, SourceFailed, SourceRefused
from loramux.sources.config import (
    SOURCE_SETTINGS,
    AzureConfig,
    FetchLimits,
    GcsConfig,
    HttpConfig,
    HubConfig,
    S3Config,
    Secret,
    SourceConfig,
    read_environment,
    scrub,
    scrub_error,
    source_config,
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


VALUE = "hf_top/secret+key="


@dataclass(frozen=True)
class Holder:
    token: Secret


def test_a_secret_shows_in_no_text_of_it_or_of_what_holds_it() -> None:
    secret = Secret(VALUE)
    holder = Holder(secret)
    texts = [repr(secret), str(secret), f"{secret}", f"{secret!r:>40}", repr(holder)]
    texts += [repr(asdict(holder)), repr(copy.deepcopy(holder)), repr(vars(holder))]
    assert not any(VALUE in text for text in texts)
    assert secret.reveal() == VALUE


def test_secrets_compare_by_value() -> None:
    assert Secret("a") == Secret("a")
    assert Secret("a") != Secret("b")
    assert Secret("a") != "a"
    assert len({Secret("a"), Secret("a")}) == 1


def test_an_empty_credential_is_a_mistake() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        Secret("")


@pytest.mark.parametrize(
    "written",
    [VALUE, "hf_top%2Fsecret%2Bkey%3D", base64.b64encode(VALUE.encode()).decode()],
    ids=["plain", "in a URL", "in a header"],
)
def test_scrub_finds_every_way_of_writing(written: str) -> None:
    assert scrub(f"GET /?key={written} failed", [Secret(VALUE)]) == "GET /?key=*** failed"


def test_scrub_takes_the_longer_of_two_secrets_first() -> None:
    assert scrub("abcdef", [Secret("abc"), Secret("abcdef")]) == "***"


def test_scrubbed_errors_keep_their_facts() -> None:
    failed = SourceFailed(f"bad {VALUE}", is_temporary=False)
    refused = SourceRefused("no_access", f"bad {VALUE}", fix=f"not {VALUE}")
    for error in (failed, refused):
        scrub_error(error, [Secret(VALUE)])
    assert (str(failed), failed.is_temporary) == ("bad ***", False)
    assert str(refused) == "bad *** not ***"
    assert (refused.reason, refused.fix) == ("bad ***", "not ***")


ENVIRONMENT = {
    "HF_ENDPOINT": "http://hub",
    "HF_TOKEN": "hf_token",
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_SESSION_TOKEN": "session",
    "AWS_DEFAULT_REGION": "eu-central-1",
    "AWS_ENDPOINT_URL": "http://all",
    "AWS_ENDPOINT_URL_S3": "http://s3",
    "GOOGLE_APPLICATION_CREDENTIALS": "/key.json",
    "AZURE_STORAGE_ACCOUNT_NAME": "account",
    "AZURE_STORAGE_ACCOUNT_KEY": "azure-key",
    "AZURE_STORAGE_SAS_TOKEN": "",
    "PREDIBASE_MODEL_BUCKET": "models",
}


def test_the_usual_variables_fill_the_gaps() -> None:
    config = read_environment(ENVIRONMENT, SourceConfig())
    assert config.hub == HubConfig(endpoint="http://hub", token=Secret("hf_token"))
    assert config.s3 == S3Config(
        endpoint="http://s3",
        region="eu-central-1",
        access_key_id=Secret("key"),
        secret_access_key=Secret("secret"),
        session_token=Secret("session"),
        default_bucket="models",
    )
    assert config.gcs.credentials_path == "/key.json"
    assert (config.azure.account_name, config.azure.account_key) == (
        "account",
        Secret("azure-key"),
    )
    assert config.azure.sas_token is None, "an empty variable is not a credential"


def test_the_config_wins_and_keys_are_not_mixed() -> None:
    given = S3Config(access_key_id=Secret("mine"), secret_access_key=Secret("own"), region="r")
    config = read_environment(ENVIRONMENT, SourceConfig(s3=given))
    assert config.s3.access_key_id == Secret("mine")
    assert config.s3.session_token is None
    assert config.s3.region == "r"


def test_an_empty_environment_changes_nothing() -> None:
    assert read_environment({}, SourceConfig()) == SourceConfig()


def test_the_settings_become_the_policy_for_sources() -> None:
    config = ServeConfig(
        allowed_http_hosts=("a.example",),
        private_http_hosts=("10.0.0.1:80",),
        allowed_buckets=("mine",),
        allowed_hub_owners=("me",),
        max_adapter_size=100,
        fetch_timeout_s=5,
        fetch_workers=2,
    )
    sources = source_config(config, {"AWS_ENDPOINT_URL": "http://s3.example"})
    assert sources.http.allows("https", "a.example", 443)
    assert not sources.http.allows_private("https", "a.example", 443)
    assert sources.http.allows_private("http", "10.0.0.1", 80)
    assert {sources.s3.allowed_buckets, sources.gcs.allowed_buckets} == {("mine",)}
    assert sources.hub.allowed_owners == ("me",) and sources.s3.endpoint == "http://s3.example"
    limits = sources.limits
    assert (limits.max_file_bytes, limits.timeout_s, limits.num_workers) == (100, 5, 2)
    assert source_config(ServeConfig(), {}).limits == FetchLimits()


def test_every_source_setting_exists() -> None:
    assert set(SOURCE_SETTINGS) <= {setting.name for setting in fields(ServeConfig)}
