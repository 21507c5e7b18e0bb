"""Settings of `loramux serve` for TLS, hosts and the limits of connections."""

from __future__ import annotations

from dataclasses import dataclass

from loramux.config.fields import (
    NOT_NEGATIVE_SECONDS,
    POSITIVE_SECONDS,
    Kind,
    Limit,
    at_least,
    check_limits,
    setting,
)
from loramux.errors import InvalidRequest

CONNECTIONS = "TLS, hosts and limits of connections"
NO_CERTIFICATE, ANY_CERTIFICATE, CERTIFICATE = 0, 1, 2


def is_prefix(path: str) -> bool:
    return path.startswith("/") and not path.endswith("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionConfig:
    """How the server listens, and what one client may take of it."""

    ssl_certfile: str | None = setting(
        None,
        Kind.PATH,
        CONNECTIONS,
        "PEM file with the server's certificate and its chain: serves HTTPS. It is read again when "
        "it changes.",
        metavar="FILE",
    )
    ssl_keyfile: str | None = setting(
        None,
        Kind.PATH,
        CONNECTIONS,
        "PEM file with the key of --ssl-certfile. Default: the key is in --ssl-certfile.",
        metavar="FILE",
    )
    ssl_keyfile_password: str | None = setting(
        None,
        Kind.TEXT,
        CONNECTIONS,
        "Password of --ssl-keyfile.",
        metavar="TEXT",
        is_secret=True,
    )
    ssl_ca_certs: str | None = setting(
        None,
        Kind.PATH,
        CONNECTIONS,
        "PEM file with the authorities of clients' certificates.",
        metavar="FILE",
    )
    ssl_cert_reqs: int | None = setting(
        None,
        Kind.COUNT,
        CONNECTIONS,
        "Certificates of clients: 0 none, 1 optional, 2 required. Default: 2 with --ssl-ca-certs, "
        "else 0.",
        limit=Limit("0, 1 or 2", lambda value: value in (0, 1, 2)),
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        Kind.TEXTS,
        CONNECTIONS,
        "Names by which clients may call the server in the Host header, such as api.example.com or "
        "*.example.com; * is any. Default: on a loopback address localhost and that address, "
        "otherwise any.",
        metavar="HOST…",
    )
    root_path: str | None = setting(
        None,
        Kind.TEXT,
        CONNECTIONS,
        "Prefix of the paths under which a proxy publishes the server, such as /llm; requests may "
        "come with it or without.",
        metavar="PATH",
        limit=Limit("begin with / and not end with it", is_prefix),
    )
    max_request_size: int = setting(
        16 * 2**20,
        Kind.SIZE,
        CONNECTIONS,
        "Maximum size of a request's body. Default: 16MiB.",
        metavar="SIZE",
        limit=at_least(1024),
    )
    max_header_size: int = setting(
        64 * 2**10,
        Kind.SIZE,
        CONNECTIONS,
        "Maximum size of a request's URL and headers together. Default: 64KiB.",
        metavar="SIZE",
        limit=at_least(1024),
    )
    max_headers: int = setting(
        128,
        Kind.COUNT,
        CONNECTIONS,
        "Maximum number of a request's headers.",
        limit=at_least(8),
    )
    header_timeout_s: float = setting(
        20.0,
        Kind.SECONDS,
        CONNECTIONS,
        "Seconds that a client has for its TLS handshake, and for the headers of a request.",
        limit=POSITIVE_SECONDS,
    )
    body_timeout_s: float = setting(
        300.0,
        Kind.SECONDS,
        CONNECTIONS,
        "Seconds that a client has for the body of a request.",
        limit=POSITIVE_SECONDS,
    )
    min_body_rate: int = setting(
        1024,
        Kind.SIZE,
        CONNECTIONS,
        "Minimum bytes per second of a request's body, after its first 5 s; 0 is no minimum.",
        metavar="SIZE",
        limit=at_least(0),
    )
    write_timeout_s: float = setting(
        60.0,
        Kind.SECONDS,
        CONNECTIONS,
        "Seconds that a client may read nothing of an answer that waits for it.",
        limit=POSITIVE_SECONDS,
    )
    keep_alive_s: float = setting(
        30.0,
        Kind.SECONDS,
        CONNECTIONS,
        "Seconds that a connection stays open between two requests.",
        limit=NOT_NEGATIVE_SECONDS,
    )
    max_connections: int = setting(
        10_000,
        Kind.COUNT,
        CONNECTIONS,
        "Maximum number of open connections, at most three quarters of the open files that the "
        "system allows. A new one then closes the one that has been idle longest.",
        limit=at_least(1),
    )
    max_connections_per_address: int | None = setting(
        None,
        Kind.COUNT,
        CONNECTIONS,
        "Maximum number of open connections of one address. Default: no limit.",
        limit=at_least(1),
    )

    def __post_init__(self) -> None:
        check_limits(self)
        if self.ssl_certfile is None:
            for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs", "ssl_cert_reqs"):
                if getattr(self, name) is not None:
                    raise InvalidRequest(
                        f"{name} needs ssl_certfile, the certificate of the server.", param=name
                    )
        if self.ssl_ca_certs is None and self.client_certificates != NO_CERTIFICATE:
            raise InvalidRequest(
                "ssl_cert_reqs needs ssl_ca_certs, the authorities of clients' certificates.",
                param="ssl_cert_reqs",
            )

    @property
    def client_certificates(self) -> int:
        if self.ssl_cert_reqs is None:
            return NO_CERTIFICATE if self.ssl_ca_certs is None else CERTIFICATE
        return self.ssl_cert_reqs
