"""Settings of adapter sources: what may be fetched, with which credentials and limits."""

from __future__ import annotations

import base64
import hmac
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, quote_plus, urlsplit

from loramux.config.serve import ServeConfig
from loramux.errors import InvalidRequest, LoramuxError, SourceRefused
from loramux.sources.source_id import SourceKind

HIDDEN = "***"
GIBIBYTE = 2**30
MEBIBYTE = 2**20
DEFAULT_PORTS = {"http": 80, "https": 443}
T = TypeVar("T")
# The last name is used by LoRAX.
S3_ENDPOINT_NAMES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "S3_ENDPOINT_URL")
SOURCE_SETTINGS = (
    "allowed_roots",
    "allowed_http_hosts",
    "private_http_hosts",
    "allowed_buckets",
    "allowed_hub_owners",
    "max_adapter_size",
    "fetch_timeout_s",
    "fetch_workers",
)


class Secret:
    """A credential. Only `reveal` returns its value; str and repr show stars."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        if not value:
            raise InvalidRequest("A credential is empty. Leave it out, or give its value.")
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return f"Secret({HIDDEN})"

    def __str__(self) -> str:
        return HIDDEN

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self._value.encode(), other._value.encode())

    def __hash__(self) -> int:
        return hash((Secret, self._value))


def scrub(text: str, secrets: Iterable[Secret]) -> str:
    """Replace the secrets in a text, also in their URL-encoded and header forms."""
    forms = {form for secret in secrets for form in written_forms(secret.reveal())}
    # The longest secret comes first, because it may contain another.
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, HIDDEN)
    return text


def written_forms(value: str) -> set[str]:
    encoded = base64.b64encode(value.encode()).decode()
    return {value, quote(value), quote(value, safe=""), quote_plus(value), encoded}


def scrub_error(error: LoramuxError, secrets: Iterable[Secret]) -> None:
    hidden = tuple(secrets)
    error.args = tuple(
        scrub(part, hidden) if isinstance(part, str) else part for part in error.args
    )
    if isinstance(error, SourceRefused):
        error.reason, error.fix = scrub(error.reason, hidden), scrub(error.fix, hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    max_file_bytes: int = 8 * GIBIBYTE
    max_total_bytes: int = 8 * GIBIBYTE
    """The limit for all files of one adapter together."""
    timeout_s: float = 1800.0
    """The time limit of a complete fetch."""
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 30.0
    """The longest time without data from the source."""
    max_attempts: int = 5
    """The limit of consecutive attempts that transfer nothing."""
    num_workers: int = 4
    """The number of parts of a file that are downloaded in parallel."""
    part_bytes: int = 32 * MEBIBYTE

    def __post_init__(self) -> None:
        for entry in fields(self):
            if getattr(self, entry.name) <= 0:
                raise InvalidRequest(f"{entry.name} must be more than 0.", param=entry.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubConfig:
    endpoint: str | None = None
    """The URL of the hub; None means the default of huggingface_hub."""
    token: Secret | None = None
    """The access token; None means the token that huggingface_hub has stored."""
    allowed_owners: tuple[str, ...] | None = None
    """The owners whose repositories may be fetched; None means all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Config:
    endpoint: str | None = None
    region: str | None = None
    access_key_id: Secret | None = None
    secret_access_key: Secret | None = None
    session_token: Secret | None = None
    is_anonymous: bool = False
    allowed_buckets: tuple[str, ...] | None = None
    """The buckets that may be read; None means all that the credentials can read."""
    default_bucket: str | None = None
    """The bucket of LoRAX ids with source `s3`, which may omit the bucket."""
    etag_is_md5: bool = True
    """Set to False for buckets with SSE-KMS or SSE-C, whose ETags are not MD5 digests."""

    def __post_init__(self) -> None:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise InvalidRequest(
                "An S3 key needs both its id and its secret. Give both, or neither to use "
                "the credentials of the machine.",
                param="access_key_id",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GcsConfig:
    credentials_path: str | None = None
    """The path of a service account file."""
    service_account_key: Secret | None = None
    """The content of a service account file."""
    is_anonymous: bool = False
    allowed_buckets: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureConfig:
    account_name: str | None = None
    account_key: Secret | None = None
    sas_token: Secret | None = None
    endpoint: str | None = None
    is_anonymous: bool = False
    allowed_buckets: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Rules for web servers. A host is `host`, `host:port` or `*.domain`.

    Without a port, the default port of the scheme applies.
    """

    allowed_hosts: tuple[str, ...] = ()
    private_hosts: tuple[str, ...] = ()
    """Hosts that are allowed even at private, loopback or link-local addresses."""
    tokens: tuple[tuple[str, Secret], ...] = ()
    """(host, bearer token); a token is not sent to the target of a redirect."""
    ca_path: Path | None = None
    """Additional trusted CA certificates."""
    pbase_url: str | None = None
    """The URL of LoRAX's source `pbase`; adapters are at <url>/<name>/<version>/."""

    def __post_init__(self) -> None:
        for entry in (*self.allowed_hosts, *self.private_hosts, *(host for host, _ in self.tokens)):
            check_host_entry(entry)

    def allows(self, scheme: str, host: str, port: int) -> bool:
        entries = (*self.allowed_hosts, *self.private_hosts)
        return any(entry_matches(entry, scheme, host, port) for entry in entries)

    def allows_private(self, scheme: str, host: str, port: int) -> bool:
        return any(entry_matches(entry, scheme, host, port) for entry in self.private_hosts)

    def token_for(self, scheme: str, host: str, port: int) -> Secret | None:
        return next(
            (token for entry, token in self.tokens if entry_matches(entry, scheme, host, port)),
            None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    allowed_roots: tuple[Path, ...] = ()
    """The folders that local adapters must be in; if empty, no local path is read."""
    enabled: tuple[SourceKind, ...] = tuple(SourceKind)
    hub: HubConfig = field(default_factory=HubConfig)
    s3: S3Config = field(default_factory=S3Config)
    gcs: GcsConfig = field(default_factory=GcsConfig)
    azure: AzureConfig = field(default_factory=AzureConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    limits: FetchLimits = field(default_factory=FetchLimits)

    def bucket_config(self, kind: SourceKind) -> S3Config | GcsConfig | AzureConfig:
        if kind is SourceKind.S3:
            return self.s3
        return self.gcs if kind is SourceKind.GCS else self.azure

    @property
    def secrets(self) -> tuple[Secret, ...]:
        parts = (self.hub, self.s3, self.gcs, self.azure)
        values = [getattr(part, entry.name) for part in parts for entry in fields(part)]
        values += [token for _, token in self.http.tokens]
        return tuple(value for value in values if isinstance(value, Secret))


def check_host_entry(entry: str) -> None:
    try:
        host, _ = split_entry(entry)
    except ValueError:
        host = None
    if not host or (host != "*" and "*" in host.removeprefix("*.")):
        raise InvalidRequest(
            f"{entry!r} is not a host. Write it like example.com, *.example.com or host:8080.",
            param="allowed_hosts",
        )


def split_entry(entry: str) -> tuple[str | None, int | None]:
    parts = urlsplit(f"//{entry}")
    if parts.path or parts.query or parts.fragment or "@" in parts.netloc:
        return None, None
    return parts.hostname, parts.port


def entry_matches(entry: str, scheme: str, host: str, port: int) -> bool:
    wanted, wanted_port = split_entry(entry)
    if port != (wanted_port or DEFAULT_PORTS[scheme]) or wanted is None:
        return False
    if wanted.startswith("*."):
        return host.endswith(wanted[1:])
    return wanted in ("*", host)


def read_environment(environment: Mapping[str, str], config: SourceConfig) -> SourceConfig:
    """Return the config with unset fields filled from environment variables."""

    def text(*names: str) -> str | None:
        return next((environment[name] for name in names if environment.get(name)), None)

    def secret(*names: str) -> Secret | None:
        value = text(*names)
        return None if value is None else Secret(value)

    s3, azure = config.s3, config.azure
    if s3.access_key_id is None and s3.secret_access_key is None:
        # All three come from one place, because a session token belongs to its keys.
        s3 = replace(
            s3,
            access_key_id=secret("AWS_ACCESS_KEY_ID"),
            secret_access_key=secret("AWS_SECRET_ACCESS_KEY"),
            session_token=first(s3.session_token, secret("AWS_SESSION_TOKEN")),
        )
    return replace(
        config,
        hub=replace(
            config.hub,
            endpoint=first(config.hub.endpoint, text("HF_ENDPOINT")),
            token=first(config.hub.token, secret("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")),
        ),
        s3=replace(
            s3,
            endpoint=first(s3.endpoint, text(*S3_ENDPOINT_NAMES)),
            region=first(s3.region, text("AWS_REGION", "AWS_DEFAULT_REGION")),
            default_bucket=first(s3.default_bucket, text("PREDIBASE_MODEL_BUCKET")),
        ),
        gcs=replace(
            config.gcs,
            credentials_path=first(
                config.gcs.credentials_path, text("GOOGLE_APPLICATION_CREDENTIALS")
            ),
        ),
        azure=replace(
            azure,
            account_name=first(azure.account_name, text("AZURE_STORAGE_ACCOUNT_NAME")),
            account_key=first(azure.account_key, secret("AZURE_STORAGE_ACCOUNT_KEY")),
            sas_token=first(azure.sas_token, secret("AZURE_STORAGE_SAS_TOKEN")),
        ),
    )


def first(given: T | None, found: T | None) -> T | None:
    return found if given is None else given


def source_config(config: ServeConfig, environment: Mapping[str, str] = os.environ) -> SourceConfig:
    """Return the source settings of a server, completed from environment variables."""
    buckets = config.allowed_buckets or None
    found = SourceConfig(
        allowed_roots=tuple(map(Path, config.allowed_roots)),
        hub=HubConfig(allowed_owners=config.allowed_hub_owners or None),
        s3=S3Config(allowed_buckets=buckets),
        gcs=GcsConfig(allowed_buckets=buckets),
        azure=AzureConfig(allowed_buckets=buckets),
        http=HttpConfig(
            allowed_hosts=config.allowed_http_hosts, private_hosts=config.private_http_hosts
        ),
        limits=FetchLimits(
            max_file_bytes=config.max_adapter_size,
            max_total_bytes=config.max_adapter_size,
            timeout_s=config.fetch_timeout_s,
            num_workers=config.fetch_workers,
        ),
    )
    return read_environment(environment, found)
