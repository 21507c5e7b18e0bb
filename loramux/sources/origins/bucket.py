"""Reads files from buckets of S3, Google Cloud and Azure with obstore."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from loramux.errors import SourceFailed, SourceForbidden, SourceNotFound
from loramux.sources.config import (
    AzureConfig,
    FetchLimits,
    GcsConfig,
    S3Config,
    Secret,
    SourceConfig,
)
from loramux.sources.origins.base import CHUNK_BYTES, MD5_ETAG, Checksum, RemoteFile, changed
from loramux.sources.refusals import SourceCode, bad_form
from loramux.sources.source_id import SourceId, SourceKind

if TYPE_CHECKING:
    from obstore.store import ObjectStore, S3Credential

STATUS = re.compile(r"non-2xx status code: (\d{3})")
PERMANENT_STATUSES = range(400, 500)
RETRIED_STATUSES = frozenset({408, 429})
DEFAULT_REGION = "us-east-1"
SHA256_ATTRIBUTE = "sha256"


def open_store(
    kind: SourceKind, bucket: str, config: SourceConfig, limits: FetchLimits
) -> ObjectStore:
    require_library()
    from obstore import exceptions, store

    options = client_options(limits, endpoint_of(kind, config))
    # The caller retries, with the same limits for all sources.
    common: dict[str, Any] = {"client_options": options, "retry_config": {"max_retries": 0}}
    try:
        if kind is SourceKind.S3:
            return store.S3Store(bucket, **s3_options(config.s3), **common)
        if kind is SourceKind.GCS:
            return store.GCSStore(bucket, **gcs_options(config.gcs), **common)
        return store.AzureStore(bucket, **azure_options(config.azure), **common)
    except exceptions.BaseError:
        raise SourceFailed(
            f"The settings for {kind}:// are incomplete or invalid. Check its keys, account, "
            "region and endpoint.",
            is_temporary=False,
        ) from None


def require_library() -> None:
    if importlib.util.find_spec("obstore") is None:
        raise SourceFailed(
            "Buckets need the obstore package. Run: pip install 'loramux[s3]'", is_temporary=False
        )


def endpoint_of(kind: SourceKind, config: SourceConfig) -> str | None:
    endpoints = {SourceKind.S3: config.s3.endpoint, SourceKind.AZURE: config.azure.endpoint}
    return endpoints.get(kind)


def client_options(limits: FetchLimits, endpoint: str | None) -> dict[str, Any]:
    return {
        "connect_timeout": timedelta(seconds=limits.connect_timeout_s),
        "read_timeout": timedelta(seconds=limits.read_timeout_s),
        # The timeout of one request with its body; the default of 30 seconds is too short.
        "timeout": timedelta(seconds=limits.timeout_s),
        "allow_http": endpoint is not None and endpoint.startswith("http://"),
    }


def s3_options(config: S3Config) -> dict[str, Any]:
    return given(
        endpoint=config.endpoint,
        region=config.region or DEFAULT_REGION,
        credential_provider=s3_credentials(config),
        skip_signature=config.is_anonymous or None,
        # Servers other than Amazon's rarely support virtual-hosted buckets.
        virtual_hosted_style_request=False if config.endpoint else None,
    )


def s3_credentials(config: S3Config) -> Callable[[], S3Credential] | None:
    """Return a credential provider: options would be mixed with those of the environment."""
    key_id, key, token = config.access_key_id, config.secret_access_key, config.session_token
    if key_id is None or key is None:
        return None
    return lambda: {
        "access_key_id": key_id.reveal(),
        "secret_access_key": key.reveal(),
        "token": None if token is None else token.reveal(),
        "expires_at": None,
    }


def gcs_options(config: GcsConfig) -> dict[str, Any]:
    return given(
        application_credentials=config.credentials_path,
        service_account_key=config.service_account_key,
        skip_signature=config.is_anonymous or None,
    )


def azure_options(config: AzureConfig) -> dict[str, Any]:
    return given(
        account_name=config.account_name,
        account_key=config.account_key,
        sas_key=config.sas_token,
        endpoint=config.endpoint,
        skip_signature=config.is_anonymous or None,
    )


def given(**options: Any) -> dict[str, Any]:
    """Return the options that are set, with secrets revealed."""
    return {
        name: value.reveal() if isinstance(value, Secret) else value
        for name, value in options.items()
        if value is not None
    }


@contextmanager
def store_errors(what: str) -> Iterator[None]:
    """Translate errors of obstore without their texts, which hold requests and responses."""
    require_library()
    from obstore import exceptions

    try:
        yield
    except FileNotFoundError:
        raise SourceNotFound(f"{what} does not exist. Check bucket and name.") from None
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError):
        raise SourceForbidden(
            SourceCode.NO_ACCESS,
            f"{what} may not be read or written with this server's credentials.",
            fix="Check the keys, the region and the bucket's policy.",
        ) from None
    except exceptions.PreconditionError:
        raise changed(what) from None
    except exceptions.BaseError as error:
        raise generic_error(what, error) from None
    except ValueError:
        raise bad_form(f"{what} is not a valid object name.", fix="Rename it.") from None


def translated(chunks: Iterable[bytes], what: str) -> Iterator[bytes]:
    """Yield the chunks and translates errors of obstore, but not those of the consumer."""
    with store_errors(what):
        yield from chunks


def generic_error(what: str, error: Exception) -> SourceFailed:
    found = STATUS.search(str(error))
    if found is None:
        return SourceFailed(
            f"{what} could not be reached, or the connection was lost. Try again later."
        )
    status = int(found[1])
    return SourceFailed(
        f"{what} was answered with status {status}. Try again later, or check the bucket.",
        is_temporary=status not in PERMANENT_STATUSES or status in RETRIED_STATUSES,
    )


class ObjectOrigin:
    """The origin of adapters in a bucket."""

    def __init__(self, source: SourceId, config: SourceConfig, limits: FetchLimits) -> None:
        self._bucket = f"{source.kind}://{source.place}"
        self._source = source
        self._etag_is_md5 = source.kind is SourceKind.S3 and config.s3.etag_is_md5
        self._store = open_store(source.kind, source.place, config, limits)
        self._revision: str | None = None

    @property
    def revision(self) -> str | None:
        return self._revision

    def find(self, name: str) -> RemoteFile | None:
        import obstore

        path = self._source.path_of(name)
        try:
            with store_errors(self._show(path)):
                found = obstore.get(self._store, path, options={"head": True})
        except SourceNotFound:
            return None
        etag = found.meta["e_tag"]
        if self._revision is None:
            self._revision = etag
        return RemoteFile(
            path=path,
            size_bytes=found.meta["size"],
            validator=etag,
            checksum=self._checksum(found.attributes.get(SHA256_ATTRIBUTE), etag),
        )

    def file_names(self) -> Sequence[str]:
        """Return a bucket that must not be listed has no names."""
        import obstore

        start = self._source.path_of("")
        try:
            with store_errors(self._show(start)):
                listed = obstore.list_with_delimiter(self._store, start or None)
        except (SourceNotFound, SourceForbidden):
            return ()
        return [found["path"].rpartition("/")[2] for found in listed["objects"]]

    @contextmanager
    def read(self, file: RemoteFile, start: int, end: int | None) -> Iterator[Iterator[bytes]]:
        import obstore

        stop = file.size_bytes if end is None else end
        what = self._show(file.path)
        if stop is None or stop <= start:
            yield iter(())
            return
        with store_errors(what):
            found = obstore.get(
                self._store,
                file.path,
                options={"if_match": file.validator, "range": (start, stop)},
            )
        if found.meta["size"] != file.size_bytes:
            raise changed(what)
        yield translated(found.stream(min_chunk_size=CHUNK_BYTES), what)

    def close(self) -> None:
        pass

    def _checksum(self, sha256: str | None, etag: str | None) -> Checksum | None:
        if sha256 is not None:
            return Checksum("sha256", sha256.lower())
        md5 = MD5_ETAG.fullmatch(etag or "") if self._etag_is_md5 else None
        return None if md5 is None else Checksum("md5", md5[1])

    def _show(self, path: str) -> str:
        return f"{self._bucket}/{path}"
