"""Checks hosts and resolves them to allowed addresses: guards against SSRF and DNS rebinding."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from ipaddress import AddressValueError, IPv4Address, IPv6Address, IPv6Network, ip_address

from loramux.errors import SourceFailed, SourceForbidden
from loramux.sources.config import DEFAULT_PORTS, HttpConfig
from loramux.sources.refusals import SourceCode

Resolver = Callable[[str, int], tuple[str, ...]]
# The low 32 bits are an IPv4 address (RFC 6052).
NAT64 = IPv6Network("64:ff9b::/96")
HOST_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")


def resolve(host: str, port: int) -> tuple[str, ...]:
    """Return all addresses of a host without repeats."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        is_temporary = isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
        raise SourceFailed(
            f"The host {host} has no address. Check its name and this server's DNS.",
            is_temporary=is_temporary,
        ) from None
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def checked_addresses(
    host: str, port: int, *, may_be_private: bool, resolver: Resolver = resolve
) -> tuple[str, ...]:
    """Resolve a host and refuses private addresses.

    The caller must connect to these addresses: a second lookup may return others.
    """
    addresses = resolver(host, port)
    if not may_be_private and not all(is_public(address) for address in addresses):
        raise SourceForbidden(
            SourceCode.PRIVATE_ADDRESS,
            f"The host {host} has a private, loopback or link-local address.",
            fix="Add it to the private hosts if it is your own.",
        )
    return addresses


def is_public(text: str) -> bool:
    address = ip_address(text.partition("%")[0])
    if isinstance(address, IPv6Address):
        embedded = embedded_ipv4(address)
        if embedded is not None:
            return is_public(str(embedded))
    return address.is_global and not address.is_multicast


def embedded_ipv4(address: IPv6Address) -> IPv4Address | None:
    if address in NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else None)


def is_host(host: str) -> bool:
    if ":" in host:
        return is_address(host, IPv6Address)
    labels = host.split(".")
    # A numeric last label makes an address, which other parsers may read as octal or hexadecimal.
    if labels[-1].isdigit() or labels[-1].startswith("0x"):
        return is_address(host, IPv4Address)
    return len(host) <= 253 and all(HOST_LABEL.fullmatch(label) for label in labels)


def is_address(host: str, kind: type[IPv4Address] | type[IPv6Address]) -> bool:
    try:
        address = kind(host)
    except AddressValueError:
        return False
    return not isinstance(address, IPv6Address) or address.scope_id is None


def show_host(scheme: str, host: str, port: int) -> str:
    shown = f"[{host}]" if ":" in host else host
    return shown if port == DEFAULT_PORTS[scheme] else f"{shown}:{port}"


def check_host_allowed(scheme: str, host: str, port: int, config: HttpConfig) -> None:
    if not config.allows(scheme, host, port):
        raise SourceForbidden(
            SourceCode.NOT_ALLOWED,
            f"The host {show_host(scheme, host, port)} is not on the list of allowed hosts.",
            fix="Use an allowed host, or add this one to the list, with its port.",
        )
