"""Host names -> addresses that may be connected to: SSRF and DNS rebinding end here."""

from __future__ import annotations

import socket
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

from loramux.errors import SourceFailed, SourceForbidden
from loramux.sources.refusals import SourceCode

Resolver = Callable[[str, int], tuple[str, ...]]
# The low 32 bits are an IPv4 address (RFC 6052).
NAT64 = IPv6Network("64:ff9b::/96")


def resolve(host: str, port: int) -> tuple[str, ...]:
    """Every address of a host, without repeats."""
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
    """Connect to these and to no other: asking again might give others."""
    addresses = resolver(host, port)
    if not may_be_private and not all(is_public(address) for address in addresses):
        raise SourceForbidden(
            SourceCode.PRIVATE_ADDRESS,
            f"The host {host} has a private, loopback or link-local address.",
            fix="If it is your own, name it among the private hosts.",
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
