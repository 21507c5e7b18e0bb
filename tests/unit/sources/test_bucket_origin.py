from __future__ import annotations

import hashlib
import importlib.util
import logging
import traceback
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import obstore
import pytest

from loramux.adapters.images.files import DIFFUSERS_NAME
from loramux.errors import (
    LoramuxError,
    SourceChanged,
    SourceFailed,
    SourceForbidden,
    SourceNotFound,
    SourceRefused,
)
from loramux.sources.config import (
    AzureConfig,
    FetchLimits,
    GcsConfig,
    S3Config,
    Secret,
    SourceConfig,
)
from loramux.sources.fetch import Fetched, Fetcher
from loramux.sources.origins import bucket
from loramux.sources.origins.base import Checksum
from loramux.sources.origins.bucket import (
    ObjectOrigin,
    generic_error,
    open_store,
    store_errors,
    translated,
)
from loramux.sources.parse import parse_source
from loramux.sources.source_id import SourceKind
from tests.fault_server import Answer, Fault, FaultServer
from tests.s3_server import S3Server
from tests.unit.sources.source_factory import (
    CONFIG_NAME,
    FAST,
    IMPATIENT,
    WEIGHTS,
    WEIGHTS_NAME,
    FakeTime,
    adapter_files,
    entries,
    make_weights,
)


@pytest.fixture
def prefix(s3_config: SourceConfig) -> str:
    """Return a folder of the bucket with an adapter, unique to the test."""
    name = f"tests/{uuid4().hex}"
    upload(s3_config, adapter_files(name))
    return name


def upload(config: SourceConfig, files: dict[str, bytes], **attributes: str) -> None:
    store = open_store(SourceKind.S3, "adapters", config, FetchLimits())
    for path, content in files.items():
        obstore.put(store, path, content, attributes=attributes or None)


def fetch(config: SourceConfig, prefix: str, tmp_path: Path) -> Fetched:
    fetcher = Fetcher(config, timing=FakeTime().timing)
    return fetcher.fetch(parse_source(f"s3://adapters/{prefix}", config), tmp_path / "target")


def test_an_adapter_comes_from_a_real_bucket(
    s3_config: SourceConfig, prefix: str, tmp_path: Path
) -> None:
    upload(s3_config, {f"{prefix}/README.md": b"# hi", f"{prefix}/%2e%2e/evil": b"x"})
    fetched = fetch(s3_config, prefix, tmp_path)
    assert (fetched.folder / WEIGHTS_NAME).read_bytes() == WEIGHTS
    assert entries(tmp_path) == ["target", f"target/{CONFIG_NAME}", f"target/{WEIGHTS_NAME}"]
    assert fetched.revision == f'"{hashlib.md5(WEIGHTS).hexdigest()}"'


def test_a_single_object_and_one_of_several_parts(
    s3_config: SourceConfig, prefix: str, tmp_path: Path
) -> None:
    # Over 5 MiB, from which obstore uploads in parts.
    large = make_weights(2**10) + bytes(6 * 2**20)
    upload(s3_config, {f"{prefix}/styles/water.safetensors": large})
    config = replace(s3_config, limits=replace(FAST, part_bytes=2**20))
    fetched = fetch(config, f"{prefix}/styles/water.safetensors", tmp_path)
    assert fetched.files == (DIFFUSERS_NAME,)
    assert fetched.digests[DIFFUSERS_NAME] == hashlib.sha256(large).hexdigest()
    assert fetched.revision is not None
    assert "-" in fetched.revision, "the ETag of a multipart upload, which is no MD5"


def test_what_is_not_there_or_not_readable_is_a_clear_error(
    s3_config: SourceConfig, prefix: str, tmp_path: Path
) -> None:
    with pytest.raises(SourceNotFound, match="Check the spelling"):
        fetch(s3_config, "nothing/here", tmp_path)
    wrong = replace(
        s3_config, s3=replace(s3_config.s3, secret_access_key=Secret("wrong-secret-key"))
    )
    with pytest.raises(SourceForbidden, match="Check the keys"):
        fetch(wrong, prefix, tmp_path)
    away = replace(s3_config, s3=replace(s3_config.s3, endpoint="http://127.0.0.1:9"))
    with pytest.raises(SourceFailed, match="could not be reached"):
        fetch(away, prefix, tmp_path)
    assert entries(tmp_path) == []


def test_a_download_that_is_cut_goes_on_and_not_from_the_start(
    s3_proxy: FaultServer, s3_proxy_config: SourceConfig, prefix: str, tmp_path: Path
) -> None:
    weights = make_weights(300_000)
    upload(s3_proxy_config, adapter_files(prefix, weights))
    config = replace(s3_proxy_config, limits=replace(FAST, part_bytes=10**6))
    s3_proxy.faults.append(Fault(path_end=WEIGHTS_NAME, cut_at=200_000))
    fetched = fetch(config, prefix, tmp_path)
    assert (fetched.folder / WEIGHTS_NAME).read_bytes() == weights
    ranges = [seen.headers["range"] for seen in s3_proxy.requests("GET", WEIGHTS_NAME)]
    starts = [int(text.removeprefix("bytes=").partition("-")[0]) for text in ranges]
    assert starts[0] == 0
    assert 100_000 < starts[1] <= 200_000


def test_a_second_process_goes_on_with_the_parts_that_came(
    s3_proxy: FaultServer, s3_proxy_config: SourceConfig, prefix: str, tmp_path: Path
) -> None:
    config = replace(
        s3_proxy_config, limits=replace(FAST, max_attempts=1, num_workers=1, part_bytes=4096)
    )
    no_fault = Fault(path_end=WEIGHTS_NAME)
    s3_proxy.faults += [no_fault, Fault(path_end=WEIGHTS_NAME, answer=Answer(status=500))]
    with pytest.raises(SourceFailed, match="status 500"):
        fetch(config, prefix, tmp_path)
    num_before = len(s3_proxy.requests("GET"))
    fetched = fetch(config, prefix, tmp_path)
    assert (fetched.folder / WEIGHTS_NAME).read_bytes() == WEIGHTS
    ranges = [seen.headers["range"] for seen in s3_proxy.requests("GET")[num_before:]]
    assert ranges == ["bytes=4096-8191", "bytes=8192-10078"]
    assert entries(tmp_path) == ["target", f"target/{CONFIG_NAME}", f"target/{WEIGHTS_NAME}"]


def test_errors_and_silence_are_waited_out(
    s3_proxy: FaultServer, s3_proxy_config: SourceConfig, prefix: str, tmp_path: Path
) -> None:
    s3_proxy.faults += [
        Fault(method="HEAD", answer=Answer(status=500)),
        Fault(method="HEAD", answer=Answer(status=503)),
        Fault(path_end=CONFIG_NAME, is_silent=True),
        Fault(path_end=WEIGHTS_NAME, answer=Answer(status=500)),
    ]
    fetched = fetch(replace(s3_proxy_config, limits=IMPATIENT), prefix, tmp_path)
    assert (fetched.folder / WEIGHTS_NAME).read_bytes() == WEIGHTS
    assert s3_proxy.faults == []


def test_bytes_that_do_not_match_the_etag_leave_nothing(
    s3_proxy: FaultServer, s3_proxy_config: SourceConfig, prefix: str, tmp_path: Path
) -> None:
    wrong = {"ETag": f'"{"0" * 32}"'}
    config = replace(s3_proxy_config, limits=replace(FAST, part_bytes=10**6))
    # The server refuses a range of another ETag, so the proxy sends the response of the real one.
    body = {"Content-Range": f"bytes 0-{len(WEIGHTS) - 1}/{len(WEIGHTS)}", **wrong}
    body["Last-Modified"] = "Thu, 01 Jan 1970 00:01:40 GMT"
    s3_proxy.faults += [
        Fault(method="HEAD", path_end=WEIGHTS_NAME, headers=wrong),
        Fault(path_end=WEIGHTS_NAME, answer=Answer(status=206, headers=body, body=WEIGHTS)),
    ]
    with pytest.raises(SourceFailed, match=r"its source reports \(md5\)"):
        fetch(config, prefix, tmp_path)
    assert entries(tmp_path) == []


def test_an_object_with_a_wrong_digest_of_its_own_leaves_nothing(
    s3_config: SourceConfig, prefix: str, tmp_path: Path
) -> None:
    upload(s3_config, adapter_files(prefix), sha256="0" * 64)
    with pytest.raises(SourceFailed, match=r"its source reports \(sha256\)"):
        fetch(s3_config, prefix, tmp_path)
    assert entries(tmp_path) == []
    right = hashlib.sha256(WEIGHTS).hexdigest()
    upload(s3_config, {f"{prefix}/{WEIGHTS_NAME}": WEIGHTS}, sha256=right)
    source = parse_source(f"s3://adapters/{prefix}", s3_config)
    found = ObjectOrigin(source, s3_config, FAST).find(WEIGHTS_NAME)
    assert found is not None
    assert found.checksum == Checksum("sha256", right)


def test_an_etag_is_an_md5_on_s3_only_and_only_if_it_may_be(
    s3_config: SourceConfig, prefix: str
) -> None:
    source = parse_source(f"s3://adapters/{prefix}", s3_config)
    for etag_is_md5 in (True, False):
        config = replace(s3_config, s3=replace(s3_config.s3, etag_is_md5=etag_is_md5))
        found = ObjectOrigin(source, config, FAST).find(WEIGHTS_NAME)
        assert found is not None
        assert (found.checksum is not None) is etag_is_md5


def test_an_object_that_changes_during_a_fetch_is_fetched_again(
    s3_config: SourceConfig, prefix: str, tmp_path: Path
) -> None:
    other = make_weights(seed=3)
    changes = iter([adapter_files(prefix, other)])

    def change(_: object) -> None:
        upload(s3_config, next(changes, {}))

    source = parse_source(f"s3://adapters/{prefix}", s3_config)
    fetcher = Fetcher(s3_config, timing=FakeTime().timing)
    fetched = fetcher.fetch(source, tmp_path / "target", progress=change)
    assert (fetched.folder / WEIGHTS_NAME).read_bytes() == other


def test_no_key_appears_in_logs_errors_tracebacks_or_settings(
    s3_server: S3Server,
    s3_proxy: FaultServer,
    s3_proxy_config: SourceConfig,
    prefix: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    keys = (s3_server.access_key_id, s3_server.secret_access_key)
    texts = [repr(s3_proxy_config), str(s3_proxy_config)]
    leak = Answer(status=403, body=" ".join(keys).encode())
    for answer in (leak, replace(leak, status=400), replace(leak, status=500)):
        s3_proxy.faults = [Fault(method="HEAD", answer=answer)] * 9
        with pytest.raises(LoramuxError) as failed:
            fetch(s3_proxy_config, prefix, tmp_path)
        logging.getLogger("test").error("failed", exc_info=failed.value)
        texts += [str(failed.value), repr(failed.value)]
        texts += traceback.format_exception(failed.value)
    s3_proxy.faults = []
    fetch(s3_proxy_config, prefix, tmp_path)
    for key in keys:
        assert key not in caplog.text
        assert not any(key in text for text in texts)


def test_settings_without_keys_show_nothing_either() -> None:
    assert "Secret" not in repr(S3Config())


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


def test_errors_of_the_consumer_are_not_translated() -> None:
    def read() -> None:
        for _ in translated([b"a", b"b"], "s3://b/x"):
            raise FileNotFoundError("of the reader")

    with pytest.raises(FileNotFoundError):
        read()
