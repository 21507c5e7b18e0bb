from __future__ import annotations

import importlib.util

import pytest

from loramux.errors import SourceFailed, SourceForbidden, SourceNotFound, SourceRefused
from loramux.sources.config import (
    AzureConfig,
    FetchLimits,
    GcsConfig,
    S3Config,
    Secret,
    SourceConfig,
)
from loramux.sources.origins import bucket
from loramux.sources.origins.base import SourceChanged
from loramux.sources.origins.bucket import generic_error, open_store, store_errors, translated
from loramux.sources.source_id import SourceKind

LIMITS = FetchLimits()


def test_every_kind_of_bucket_opens_with_its_settings() -> None:
    from obstore.store import AzureStore, GCSStore, S3Store

    config = SourceConfig(
        s3=S3Config(
            endpoint="http://127.0.0.1:9",
            access_key_id=Secret("key"),
            secret_access_key=Secret("secret"),
        ),
        gcs=GcsConfig(is_anonymous=True),
        azure=AzureConfig(account_name="account", account_key=Secret("a2V5")),
    )
    s3 = open_store(SourceKind.S3, "bucket", config, LIMITS)
    assert isinstance(s3, S3Store)
    assert "secret" not in repr(s3) + repr(s3.config)
    gcs = open_store(SourceKind.GCS, "bucket", config, LIMITS)
    assert isinstance(gcs, GCSStore)
    azure = open_store(SourceKind.AZURE, "container", config, LIMITS)
    assert isinstance(azure, AzureStore)
    assert azure.config["account_name"] == "account"


def test_keys_that_are_given_are_not_mixed_with_those_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of another account")
    given = S3Config(access_key_id=Secret("key"), secret_access_key=Secret("secret"))
    provider = bucket.s3_credentials(given)
    assert provider is not None
    assert provider() == {
        "access_key_id": "key",
        "secret_access_key": "secret",
        "token": None,
        "expires_at": None,
    }
    store = open_store(SourceKind.S3, "bucket", SourceConfig(s3=given), LIMITS)
    assert "of another account" not in repr(store.config)
    assert bucket.s3_credentials(S3Config()) is None


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (SourceKind.AZURE, SourceConfig()),
        (
            SourceKind.AZURE,
            SourceConfig(azure=AzureConfig(account_name="a", account_key=Secret("my!key"))),
        ),
        (SourceKind.GCS, SourceConfig(gcs=GcsConfig(service_account_key=Secret("my!key")))),
    ],
)
def test_settings_that_are_not_sound_are_not_taken_for_an_outage(
    kind: SourceKind, config: SourceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(SourceFailed, match="Check its keys") as failed:
        open_store(kind, "bucket", config, LIMITS)
    assert not failed.value.is_temporary
    assert "my!key" not in str(failed.value)


def test_plain_http_is_for_endpoints_that_are_given_so() -> None:
    assert bucket.client_options(LIMITS, "http://x")["allow_http"]
    assert not bucket.client_options(LIMITS, "https://x")["allow_http"]
    assert not bucket.client_options(LIMITS, None)["allow_http"]


def test_without_the_library_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SourceFailed, match=r"pip install 'loramux\[s3\]'") as failed:
        open_store(SourceKind.S3, "bucket", SourceConfig(), LIMITS)
    assert not failed.value.is_temporary


def test_failures_of_the_library_come_in_our_words_only() -> None:
    from obstore import exceptions

    cases = [
        (FileNotFoundError("secret"), SourceNotFound),
        (exceptions.PermissionDeniedError("secret"), SourceForbidden),
        (exceptions.UnauthenticatedError("secret"), SourceForbidden),
        (exceptions.PreconditionError("secret"), SourceChanged),
        (exceptions.GenericError("secret"), SourceFailed),
        (ValueError("secret"), SourceRefused),
    ]
    for raised, expected in cases:
        with pytest.raises(expected) as failed, store_errors("s3://b/x"):
            raise raised
        assert "secret" not in str(failed.value)
        assert "s3://b/x" in str(failed.value)
        assert failed.value.__suppress_context__


@pytest.mark.parametrize(
    ("text", "is_temporary"),
    [
        ("Server returned non-2xx status code: 503 Slow Down", True),
        ("Server returned non-2xx status code: 429 Too Many Requests", True),
        ("Server returned non-2xx status code: 400 Bad Request", False),
        ("error sending request", True),
    ],
)
def test_only_some_failures_pass_by_themselves(text: str, is_temporary: bool) -> None:
    assert generic_error("x", Exception(text)).is_temporary is is_temporary


def test_a_reader_who_fails_is_not_blamed_on_the_bucket() -> None:
    def read() -> None:
        for _ in translated([b"a", b"b"], "s3://b/x"):
            raise FileNotFoundError("of the reader")

    with pytest.raises(FileNotFoundError):
        read()
