"""Which replicas there are: URLs, or the addresses of DNS names."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

from loramux.errors import InvalidRequest

_log = logging.getLogger(__name__)
DNS_PREFIX = "dns://"


class Members(Protocol):
    """Knows the URLs of the replicas by name; names are hashed and should outlive restarts."""

    async def current(self) -> dict[str, str]:
        """Returns URL by name."""
        ...

    async def changed(self, timeout_s: float) -> None:
        """Returns when there may be other members than before, or after the timeout."""
        ...


class PolledMembers:
    """Members that have to be asked for again and again."""

    async def changed(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)


class StaticMembers(PolledMembers):
    """Replicas that were given by URL."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = {url: url for url in map(checked_url, urls)}

    async def current(self) -> dict[str, str]:
        return self._urls


class DnsMembers(PolledMembers):
    """All addresses of host names, such as those of a headless Service."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: dns://host:port"""
        self._places: list[tuple[str, int]] = []
        for name in names:
            parts = urlsplit(name)
            if not parts.hostname or parts.port is None:
                raise InvalidRequest(f"{name} is no dns://HOST:PORT.")
            self._places.append((parts.hostname, parts.port))
        self._last: dict[tuple[str, int], list[str]] = {}

    async def current(self) -> dict[str, str]:
        for place in self._places:
            try:
                found = await asyncio.get_running_loop().getaddrinfo(
                    *place, type=socket.SOCK_STREAM
                )
            except OSError as error:
                # A name server that is away takes no replica from the fleet.
                _log.warning("%s cannot be resolved: %s", place[0], error)
                continue
            self._last[place] = sorted({_url(address) for *_, address in found})
        return {url: url for urls in self._last.values() for url in urls}


class JoinedMembers(PolledMembers):
    """The replicas of several sources."""

    def __init__(self, sources: Sequence[Members]) -> None:
        self._sources = sources

    async def current(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for source in self._sources:
            found |= await source.current()
        return found


def find_members(given: Sequence[str]) -> Members:
    """Returns the members of URLs and of dns://HOST:PORT; raises InvalidRequest."""
    if not given:
        raise InvalidRequest("Name the replicas: --replicas http://HOST:PORT or dns://HOST:PORT.")
    names = [one for one in given if one.startswith(DNS_PREFIX)]
    urls = [one for one in given if not one.startswith(DNS_PREFIX)]
    sources: list[Members] = [StaticMembers(urls)] if urls else []
    return JoinedMembers([*sources, DnsMembers(names)] if names else sources)


def checked_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise InvalidRequest(f"{url!r} is no URL of a server, such as http://10.0.0.7:8000.")
    return url.rstrip("/")


def _url(address: Sequence[Any]) -> str:
    host, port = address[0], address[1]
    return f"http://[{host}]:{port}" if ":" in str(host) else f"http://{host}:{port}"
