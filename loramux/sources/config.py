"""What may be fetched from where, with which credentials and within which limits."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from urllib.parse import urlsplit

from loramux.errors import InvalidRequest
from loramux.sources.secret import Secret
from loramux.sources.source_id import SourceKind

GIBIBYTE = 2**30
MEBIBYTE = 2**20
DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    max_file_bytes: int = 8 * GIBIBYTE
    max_total_bytes: int = 8 * GIBIBYTE
    """Of all files of one adapter."""
    timeout_s: float = 1800.0
    """For the whole of a fetch."""
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 30.0
    """Longest silence of a source."""
    max_attempts: int = 5
    """Tries in a row that bring nothing."""
    num_workers: int = 4
    """Parts of a file that are read at once."""
    part_bytes: int = 32 * MEBIBYTE

    def __post_init__(self) -> None:
        for entry in fields(self):
            if getattr(self, entry.name) <= 0:
                raise InvalidRequest(f"{entry.name} must be more than 0.", param=entry.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubConfig:
    endpoint: str | None = None
    """Default: what huggingface_hub uses."""
    token: Secret | None = None
    """Default: the token that huggingface_hub has stored."""
    allowed_owners: tuple[str, ...] | None = None
    """None: any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Config:
    endpoint: str | None = None
    region: str | None = None
    access_key_id: Secret | None = None
    secret_access_key: Secret | None = None
    session_token: Secret | None = None
    is_anonymous: bool = False
    allowed_buckets: tuple[str, ...] | None = None
    """None: any that the credentials may read."""
    default_bucket: str | None = None
    """For LoRAX's ids of source `s3`, which may leave the bucket out."""
    etag_is_md5: bool = True
    """False for buckets encrypted with SSE-KMS or SSE-C, whose ETags only look like MD5."""

    def __post_init__(self) -> None:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise InvalidRequest(
                "An S3 key needs both its id and its secret. Give both, or neither to use what "
                "the machine itself may read.",
                param="access_key_id",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GcsConfig:
    credentials_path: str | None = None
    """A service account's file."""
    service_account_key: Secret | None = None
    """The content of such a file."""
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
    """A host is `host`, `host:port` or `*.domain`; without a port, the scheme's own is meant."""

    allowed_hosts: tuple[str, ...] = ()
    private_hosts: tuple[str, ...] = ()
    """Allowed too, and even when they resolve to private, loopback or link-local addresses."""
    tokens: tuple[tuple[str, Secret], ...] = ()
    """(host, bearer token): sent to that host alone, never on to where it redirects."""
    ca_path: Path | None = None
    """Certificates to trust besides the system's, for hosts of one's own."""
    pbase_url: str | None = None
    """Where adapters of LoRAX's source `pbase` are kept, as <url>/<name>/<version>/."""

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
    """Local adapters must lie under one of these; none: no local path is read."""
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
