from __future__ import annotations

import pytest

from loramux.errors import SourceFailed, SourceForbidden
from loramux.sources.origins.addresses import checked_addresses, is_public, resolve

PRIVATE = [
    "127.0.0.1",
    "127.8.8.8",
    "0.0.0.0",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "224.0.0.1",
    "255.255.255.255",
    "::1",
    "::",
    "fe80::1",
    "fe80::1%eth0",
    "fd00::1",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:a9fe:a9fe",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "2002:7f00:1::",
    "2001:db8::1",
]
PUBLIC = ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_of_the_inside_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_addresses_of_the_outside_are_public(address: str) -> None:
    assert is_public(address)


def test_one_private_address_among_public_ones_is_enough_to_refuse() -> None:
    with pytest.raises(SourceForbidden, match="private") as refused:
        checked_addresses(
            "evil.example",
            80,
            may_be_private=False,
            resolver=lambda *_: ("8.8.8.8", "169.254.169.254"),
        )
    assert refused.value.code == "private_address"


def test_a_host_of_ones_own_may_be_private() -> None:
    found = checked_addresses("mine", 80, may_be_private=True, resolver=lambda *_: ("10.0.0.1",))
    assert found == ("10.0.0.1",)


def test_localhost_resolves_and_is_refused_by_name_too() -> None:
    assert "127.0.0.1" in resolve("localhost", 80)
    with pytest.raises(SourceForbidden):
        checked_addresses("localhost", 80, may_be_private=False)


def test_a_name_without_an_address_is_a_clear_failure() -> None:
    with pytest.raises(SourceFailed, match=r"no-such-host\.invalid has no address"):
        resolve("no-such-host.invalid", 80)
    with pytest.raises(SourceFailed, match="has no address"):
        resolve("a" * 70 + ".example", 80)
