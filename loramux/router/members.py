"""Which replicas there are: URLs, the addresses of a DNS name, or the names of a range."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

from loramux.errors import InvalidRequest

_log = logging.getLogger(__name__)
DNS_PREFIX = "dns://"
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
MAX_NAMES = 4096
# The name server is there and does not know the name.
_UNKNOWN_NAME = (socket.EAI_NONAME, socket.EAI_NODATA)


class Members(Protocol):
    """Knows the URLs of the replicas by name; names are hashed and should outlive restarts."""

    async def current(self) -> dict[str, str]:
        """Return URL by name."""
        ...

    async def changed(self, timeout_s: float) -> None:
        """Return when there may be other members than before, or after the timeout."""
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
        self._places = [_place(name) for name in names]
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


class NamedMembers(PolledMembers):
    """The host names of a range that have an address, such as the pods of a StatefulSet.

    They keep their names when they restart with other addresses.
    """

    def __init__(self, pattern: str) -> None:
        """`pattern`: dns://NAME-{0..31}.DOMAIN:PORT"""
        self._places = [_place(name) for name in _expanded(pattern)]
        self._known: set[tuple[str, int]] = set()

    async def current(self) -> dict[str, str]:
        await asyncio.gather(*(self._look(place) for place in self._places))
        urls = [
            f"http://{host}:{port}" for host, port in self._places if (host, port) in self._known
        ]
        return {url: url for url in urls}

    async def _look(self, place: tuple[str, int]) -> None:
        try:
            await asyncio.get_running_loop().getaddrinfo(*place, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if error.errno in _UNKNOWN_NAME:
                self._known.discard(place)
            else:
                _log.warning("%s cannot be resolved: %s", place[0], error)
        else:
            self._known.add(place)


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
    """Return the members of URLs and of dns:// names; raise InvalidRequest."""
    if not given:
        raise InvalidRequest("Name the replicas: --replicas http://HOST:PORT or dns://HOST:PORT.")
    names = [one for one in given if one.startswith(DNS_PREFIX)]
    urls = [one for one in given if not one.startswith(DNS_PREFIX)]
    sources: list[Members] = [StaticMembers(urls)] if urls else []
    sources += [NamedMembers(name) for name in names if _RANGE.search(name)]
    plain = [name for name in names if not _RANGE.search(name)]
    return JoinedMembers([*sources, DnsMembers(plain)] if plain else sources)


def checked_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise InvalidRequest(f"{url!r} is no URL of a server, such as http://10.0.0.7:8000.")
    return url.rstrip("/")


def _place(name: str) -> tuple[str, int]:
    parts = urlsplit(name)
    if not parts.hostname or parts.port is None:
        raise InvalidRequest(f"{name} is no dns://HOST:PORT.")
    return parts.hostname, parts.port


def _expanded(pattern: str) -> list[str]:
    found = _RANGE.search(pattern)
    if found is None:
        return [pattern]
    first, last = int(found[1]), int(found[2])
    if not first <= last < first + MAX_NAMES:
        raise InvalidRequest(f"{pattern}: a range goes upwards over at most {MAX_NAMES} names.")
    start, end = pattern[: found.start()], pattern[found.end() :]
    return [
        name for number in range(first, last + 1) for name in _expanded(f"{start}{number}{end}")
    ]


def _url(address: Sequence[Any]) -> str:
    host, port = address[0], address[1]
    return f"http://[{host}]:{port}" if ":" in str(host) else f"http://{host}:{port}"
