"""Reads files from web servers; each hop of a redirect is checked like the first URL."""

from __future__ import annotations

import base64
import binascii
import re
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import httpx2

from loramux.errors import (
    LoramuxError,
    SourceFailed,
    SourceForbidden,
    SourceNotFound,
    SourceRefused,
)
from loramux.sources.config import DEFAULT_PORTS, FetchLimits, HttpConfig
from loramux.sources.origins.addresses import (
    Resolver,
    check_host_allowed,
    checked_addresses,
    is_host,
    resolve,
    show_host,
)
from loramux.sources.origins.base import MD5_ETAG, Checksum, RemoteFile, changed
from loramux.sources.refusals import SourceCode
from loramux.sources.retry import parse_retry_after
from loramux.sources.source_id import SourceId

TEMPORARY_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 509, 520, 522, 524})
REPR_SHA256 = re.compile(r"(?:^|[,\s])sha-256=:([A-Za-z0-9+/=]+):")
CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
# Without compression, ranges and sizes are those of the file.
PLAIN_HEADERS = {"Accept-Encoding": "identity"}
MAX_REDIRECTS = 5
REDIRECTS = frozenset({301, 302, 303, 307, 308})
# Servers with these replies to HEAD may still support GET.
NO_HEAD = frozenset({400, 403, 405, 501})


@contextmanager
def transport_errors(what: str) -> Iterator[None]:
    """Translate errors of the HTTP client without their texts, which may hold signed URLs."""
    try:
        yield
    except httpx2.TimeoutException:
        raise SourceFailed(f"{what} did not answer in time. Try again later.") from None
    except httpx2.TransportError as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise SourceFailed(
                f"The certificate of {what} is not valid. Check the host and the trusted roots.",
                is_temporary=False,
            ) from None
        raise SourceFailed(
            f"The connection to {what} failed ({type(error).__name__}). Try again later."
        ) from None
    except httpx2.RequestError as error:
        raise SourceFailed(
            f"{what} could not be read ({type(error).__name__}).", is_temporary=False
        ) from None


def status_error(response: httpx2.Response, what: str) -> LoramuxError:
    status = response.status_code
    if status in (404, 410):
        return SourceNotFound(f"{what} does not exist. Check its spelling.")
    if status in (401, 403, 407):
        return SourceForbidden(
            SourceCode.NO_ACCESS,
            f"{what} may not be read with this server's credentials ({status}).",
            fix="Configure a token for this host that may read it.",
        )
    return SourceFailed(
        f"{what} was answered with status {status}. Try again later, or check the source.",
        is_temporary=status in TEMPORARY_STATUSES,
        retry_after_s=parse_retry_after(response.headers.get("Retry-After")),
    )


def hidden_request(
    client: httpx2.Client, method: str, url: httpx2.URL, headers: dict[str, str]
) -> httpx2.Request:
    """Build a request that the client logs without its path and query, which may be signed."""
    return client.build_request(
        method,
        url.copy_with(raw_path=b"/"),
        headers=headers,
        extensions={"target": url.raw_path},
    )


def range_headers(file: RemoteFile, start: int, end: int | None) -> dict[str, str]:
    if start == 0 and end in (None, file.size_bytes):
        return dict(PLAIN_HEADERS)
    last = "" if end is None else str(end - 1)
    return {**PLAIN_HEADERS, "Range": f"bytes={start}-{last}"}


def check_body(
    response: httpx2.Response, file: RemoteFile, what: str, *, start: int, is_range: bool
) -> None:
    """Check that the body is the requested range of the found file."""
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise SourceRefused(
            SourceCode.ENCODED_BODY,
            f"{what} is sent compressed although identity encoding was requested.",
            fix="Serve the file as it is.",
        )
    if response.status_code == 200:
        length = response.headers.get("Content-Length")
        is_same = None in (length, file.size_bytes) or length == str(file.size_bytes)
        if is_range or not is_same:
            raise changed(what)
        return
    if response.status_code in (412, 416):
        raise changed(what)
    if response.status_code != 206:
        raise status_error(response, what)
    found = CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    total = None if found is None or found[3] == "*" else int(found[3])
    if found is None or int(found[1]) != start or total not in (None, file.size_bytes):
        raise changed(what)


def read_size(headers: httpx2.Headers) -> int | None:
    text = headers.get("Content-Length", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def read_validator(headers: httpx2.Headers) -> str | None:
    etag: str | None = headers.get("ETag")
    return None if etag is None or etag.startswith("W/") else etag


def read_checksum(headers: httpx2.Headers) -> Checksum | None:
    """Return the checksum that the headers declare; an ETag is an MD5 only on plain S3."""
    # A dash marks the checksum of a multipart upload.
    sha256 = headers.get("x-amz-checksum-sha256")
    declared = REPR_SHA256.search(headers.get("Repr-Digest", ""))
    if sha256 is not None and "-" not in sha256:
        return from_base64("sha256", sha256)
    if declared is not None:
        return from_base64("sha256", declared[1])
    if "Content-MD5" in headers:
        return from_base64("md5", headers["Content-MD5"])
    is_plain_s3 = "x-amz-request-id" in headers and not (
        "kms" in headers.get("x-amz-server-side-encryption", "")
        or "x-amz-server-side-encryption-customer-algorithm" in headers
    )
    md5 = MD5_ETAG.fullmatch(headers.get("ETag", ""))
    return Checksum("md5", md5[1]) if md5 is not None and is_plain_s3 else None


def from_base64(algorithm: str, text: str) -> Checksum | None:
    try:
        return Checksum(algorithm, base64.b64decode(text, validate=True).hex())
    except (binascii.Error, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Hop:
    url: httpx2.URL

    @property
    def scheme(self) -> str:
        return self.url.scheme

    @property
    def host(self) -> str:
        return self.url.host

    @property
    def port(self) -> int:
        return self.url.port or DEFAULT_PORTS[self.url.scheme]

    @property
    def shown(self) -> str:
        """The URL without path and query, which may be signed."""
        return f"{self.scheme}://{show_host(self.scheme, self.host, self.port)}"


class GuardedClient:
    """An HTTP client for several threads that connects only to allowed hosts and addresses.

    It raises transport errors of httpx2, and Source errors.
    """

    def __init__(
        self, config: HttpConfig, limits: FetchLimits, *, resolver: Resolver = resolve
    ) -> None:
        self._config = config
        self._resolver = resolver
        self._timeout = httpx2.Timeout(limits.read_timeout_s, connect=limits.connect_timeout_s)
        self._clients: dict[str, httpx2.Client] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    @contextmanager
    def send(self, method: str, url: str, headers: dict[str, str]) -> Iterator[httpx2.Response]:
        """Follows redirects, each checked like the first URL, and yields the last response."""
        hop = self._checked_hop(httpx2.URL(url))
        for _ in range(MAX_REDIRECTS + 1):
            response = self._open(method, hop, headers)
            try:
                if response.status_code not in REDIRECTS:
                    yield response
                    return
                hop = self._next_hop(hop, response.headers.get("Location"))
            finally:
                response.close()
        raise bad_redirect(f"{url} was redirected over {MAX_REDIRECTS} times.")

    def _open(self, method: str, hop: Hop, headers: dict[str, str]) -> httpx2.Response:
        """Connect to a checked address, because the name may resolve differently later."""
        may_be_private = self._config.allows_private(hop.scheme, hop.host, hop.port)
        addresses = checked_addresses(
            hop.host, hop.port, may_be_private=may_be_private, resolver=self._resolver
        )
        token = self._config.token_for(hop.scheme, hop.host, hop.port)
        sent = {**headers, "Host": show_host(hop.scheme, hop.host, hop.port)}
        if token is not None:
            sent["Authorization"] = f"Bearer {token.reveal()}"
        client = self._client(hop.scheme)
        for position, address in enumerate(addresses, start=1):
            url = hop.url.copy_with(host=address, port=hop.port)
            request = hidden_request(client, method, url, sent)
            # The certificate must be valid for this name.
            request.extensions["sni_hostname"] = hop.host
            try:
                return client.send(request, stream=True)
            except (httpx2.ConnectError, httpx2.ConnectTimeout):
                if position == len(addresses):
                    raise
        raise AssertionError("a host that resolves has an address")

    def _client(self, scheme: str) -> httpx2.Client:
        with self._lock:
            if scheme not in self._clients:
                self._clients[scheme] = httpx2.Client(
                    # A proxy would resolve names again, after the check.
                    trust_env=False,
                    follow_redirects=False,
                    timeout=self._timeout,
                    # Connections are keyed by address; a kept one might serve another name.
                    limits=httpx2.Limits(max_keepalive_connections=0),
                    verify=trusted_roots(scheme, self._config.ca_path),
                )
            return self._clients[scheme]

    def _next_hop(self, hop: Hop, location: str | None) -> Hop:
        if not location:
            raise bad_redirect(f"{hop.shown} redirects without a location.")
        try:
            url = hop.url.join(location)
        except (httpx2.InvalidURL, ValueError):
            raise bad_redirect(f"{hop.shown} redirects to an invalid URL.") from None
        if url.scheme not in DEFAULT_PORTS or url.userinfo or not is_host(url.host):
            raise bad_redirect(f"{hop.shown} redirects to a URL that is not plain http(s).")
        if hop.scheme == "https" and url.scheme == "http":
            raise bad_redirect(f"{hop.shown} redirects to an unencrypted URL.")
        return self._checked_hop(url)

    def _checked_hop(self, url: httpx2.URL) -> Hop:
        hop = Hop(url)
        check_host_allowed(hop.scheme, hop.host, hop.port, self._config)
        return hop


def trusted_roots(scheme: str, ca_path: Path | None) -> ssl.SSLContext | bool:
    if scheme == "http":
        # Trusts no certificate; reading the system's roots would take long.
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca_path is None:
        return True
    context = ssl.create_default_context()
    context.load_verify_locations(ca_path)
    return context


def bad_redirect(message: str) -> SourceRefused:
    return SourceRefused(
        SourceCode.BAD_REDIRECT, message, fix="Give the address where the files themselves are."
    )


class HttpOrigin:
    """The origin of adapters on a web server."""

    def __init__(
        self,
        source: SourceId,
        config: HttpConfig,
        limits: FetchLimits,
        *,
        resolver: Resolver = resolve,
    ) -> None:
        self._source = source
        self._client = GuardedClient(config, limits, resolver=resolver)
        self._revision: str | None = None

    @property
    def revision(self) -> str | None:
        return self._revision

    def find(self, name: str) -> RemoteFile | None:
        path = self._source.path_of(name)
        try:
            headers = self._read_headers(self._url(path))
        except SourceNotFound:
            return None
        if self._revision is None:
            self._revision = headers.get("ETag")
        size_bytes, validator = read_size(headers), read_validator(headers)
        has_ranges = headers.get("Accept-Ranges", "").lower() == "bytes"
        can_seek = has_ranges and validator is not None and size_bytes is not None
        return RemoteFile(
            path=path,
            size_bytes=size_bytes,
            validator=validator if can_seek else None,
            can_seek=can_seek,
            checksum=read_checksum(headers),
        )

    def file_names(self) -> Sequence[str]:
        """Folders of a web server cannot be listed."""
        return ()

    @contextmanager
    def read(self, file: RemoteFile, start: int, end: int | None) -> Iterator[Iterator[bytes]]:
        url = self._url(file.path)
        headers = range_headers(file, start, end)
        is_range = "Range" in headers
        if file.validator is not None:
            headers["If-Range" if is_range else "If-Match"] = file.validator
        with transport_errors(url), self._client.send("GET", url, headers) as response:
            check_body(response, file, url, start=start, is_range=is_range)
            if file.validator not in (None, response.headers.get("ETag", file.validator)):
                raise changed(url)
            yield response.iter_raw()

    def close(self) -> None:
        self._client.close()

    def _read_headers(self, url: str) -> httpx2.Headers:
        headers = {**PLAIN_HEADERS, "x-amz-checksum-mode": "ENABLED"}
        with transport_errors(url), self._client.send("HEAD", url, headers) as response:
            if response.status_code == 200:
                return response.headers
            if response.status_code not in NO_HEAD:
                raise status_error(response, url)
        with transport_errors(url), self._client.send("GET", url, headers) as response:
            if response.status_code != 200:
                raise status_error(response, url)
            return response.headers

    def _url(self, path: str) -> str:
        return f"{self._source.place}/{quote(path)}"
