"""Requests to web servers of which every hop is checked: host, address, redirect."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

from loramux.errors import SourceRefused
from loramux.sources.config import DEFAULT_PORTS, FetchLimits, HttpConfig
from loramux.sources.origins.addresses import Resolver, checked_addresses, resolve
from loramux.sources.origins.http_bodies import hidden_request
from loramux.sources.parse import check_host_allowed, is_host, show_host
from loramux.sources.refusals import SourceCode

MAX_REDIRECTS = 5
REDIRECTS = frozenset({301, 302, 303, 307, 308})


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
        """Without path and query, which may be signed."""
        return f"{self.scheme}://{show_host(self.scheme, self.host, self.port)}"


class GuardedClient:
    """May be used by several threads. Raises httpx2's errors of transport, and Source errors."""

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
        """The answer of the last hop; redirects are followed here, each checked like the first."""
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
        """Connects to an address that was checked, not to a name that may have got another."""
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
            # The name that the certificate must be for.
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
                    # A proxy would look names up by itself, after they were checked here.
                    trust_env=False,
                    follow_redirects=False,
                    timeout=self._timeout,
                    # They are by address; one that is kept might be used for another name.
                    limits=httpx2.Limits(max_keepalive_connections=0),
                    verify=trusted_roots(scheme, self._config.ca_path),
                )
            return self._clients[scheme]

    def _next_hop(self, hop: Hop, location: str | None) -> Hop:
        if not location:
            raise bad_redirect(f"{hop.shown} redirects to nowhere.")
        try:
            url = hop.url.join(location)
        except (httpx2.InvalidURL, ValueError):
            raise bad_redirect(f"{hop.shown} redirects to what is not a URL.") from None
        if url.scheme not in DEFAULT_PORTS or url.userinfo or not is_host(url.host):
            raise bad_redirect(f"{hop.shown} redirects to what is not a plain URL.")
        if hop.scheme == "https" and url.scheme == "http":
            raise bad_redirect(f"{hop.shown} redirects to an unencrypted URL.")
        return self._checked_hop(url)

    def _checked_hop(self, url: httpx2.URL) -> Hop:
        hop = Hop(url)
        check_host_allowed(hop.scheme, hop.host, hop.port, self._config)
        return hop


def trusted_roots(scheme: str, ca_path: Path | None) -> ssl.SSLContext | bool:
    if scheme == "http":
        # Trusts nobody, and costs nothing to make: reading the roots takes long.
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
