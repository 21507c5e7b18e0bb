"""Key files: creation, permissions and parsing."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from loramux.base.signing import (
    key_id_of,
    make_key_files,
    public_key_path,
    read_private_key,
    read_public_key,
)
from loramux.errors import InvalidRequest


def test_the_pair_belongs_together_and_its_id_is_the_public_keys_digest(tmp_path: Path) -> None:
    key_id = make_key_files(tmp_path / "receipts.pem")
    public = read_public_key(tmp_path / "receipts.pem.pub")
    assert read_private_key(tmp_path / "receipts.pem").public_key() == public
    assert key_id_of(public) == key_id
    assert key_id == hashlib.sha256(public.public_bytes_raw()).hexdigest()[:16]


def test_only_the_owner_can_read_the_private_key(tmp_path: Path) -> None:
    make_key_files(tmp_path / "key")
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["key", "key.pub"])
def test_an_existing_file_is_never_overwritten(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("precious")
    with pytest.raises(InvalidRequest, match="never overwritten"):
        make_key_files(tmp_path / "key")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "precious"


def test_a_dangling_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidRequest, match="never overwritten"):
        make_key_files(tmp_path / "key")
    assert not (tmp_path / "elsewhere").exists()


def pem_of_another_kind() -> bytes:
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def pem_with_a_password() -> bytes:
    return ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )


BAD_KEYS = {
    "empty": b"",
    "no key": b"hello",
    "other kind": pem_of_another_kind(),
    "password": pem_with_a_password(),
}


@pytest.mark.parametrize("kind", BAD_KEYS)
def test_a_file_that_is_no_key_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(BAD_KEYS[kind])
    for read in (read_private_key, read_public_key):
        with pytest.raises(InvalidRequest, match="does not hold"):
            read(tmp_path / "bad")


def test_one_half_of_the_pair_is_not_taken_for_the_other(tmp_path: Path) -> None:
    make_key_files(tmp_path / "key")
    with pytest.raises(InvalidRequest, match="unencrypted public"):
        read_public_key(tmp_path / "key")
    with pytest.raises(InvalidRequest, match="unencrypted private"):
        read_private_key(public_key_path(tmp_path / "key"))


@pytest.mark.parametrize(("mode", "is_refused"), [(0o600, False), (0o640, False), (0o666, True)])
def test_a_key_that_others_may_change_is_refused(
    mode: int, is_refused: bool, tmp_path: Path
) -> None:
    make_key_files(tmp_path / "key")
    (tmp_path / "key").chmod(mode)
    if is_refused:
        with pytest.raises(InvalidRequest, match="chmod 600"):
            read_private_key(tmp_path / "key")
    else:
        read_private_key(tmp_path / "key")
