from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from loramux.errors import SourceFailed, SourceRefused
from loramux.sources.content import HEAD_BYTES, check_file, check_sizes, check_start, max_bytes_of
from loramux.sources.origins.base import Checksum, RemoteFile
from tests.hub_server import git_hash
from tests.unit.sources.source_factory import CONFIG, CONFIG_NAME, WEIGHTS, WEIGHTS_NAME


def make_tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("adapter_config.json"))
    return buffer.getvalue()


def make_zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("data.pkl", b"x" * 600)
    return buffer.getvalue()


def file_of(content: bytes, checksum: Checksum | None = None) -> RemoteFile:
    return RemoteFile(path="x", size_bytes=len(content), validator=None, checksum=checksum)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (make_tar(), "archive"),
        (make_zip(), "archive"),
        (b"\x80\x04\x95" + b"x" * 600, "pickle"),
        ((2**30).to_bytes(8, "little") + b"{" * 600, "oversized_header"),
        ((600).to_bytes(8, "little") + b"{" * 100, "not_an_adapter"),
        ((10).to_bytes(8, "little") + b"[" * 600, "not_an_adapter"),
        (b"\x01", "not_an_adapter"),
    ],
)
def test_weights_are_known_by_their_start(content: bytes, code: str) -> None:
    with pytest.raises(SourceRefused) as refused:
        check_start(WEIGHTS_NAME, content[:HEAD_BYTES], len(content))
    assert refused.value.code == code


def test_sound_starts_pass_whether_the_size_is_known_or_not() -> None:
    check_start(WEIGHTS_NAME, WEIGHTS[:HEAD_BYTES], len(WEIGHTS))
    check_start(WEIGHTS_NAME, WEIGHTS[:HEAD_BYTES], None)
    check_start(CONFIG_NAME, CONFIG, len(CONFIG))
    check_start(CONFIG_NAME, b"\xef\xbb\xbf \n{", None)


def test_a_page_in_the_place_of_the_config_is_refused() -> None:
    with pytest.raises(SourceRefused, match="not a web page about it"):
        check_start(CONFIG_NAME, b"<!doctype html>", None)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_a_page_in_the_place_of_a_tokenizer_file_is_refused(name: str) -> None:
    with pytest.raises(SourceRefused) as refused:
        check_start(name, b"<!DOCTYPE html><html>", None)
    assert refused.value.code == "not_an_adapter"
    check_start(name, b'{"a": "b"} {{ messages }}', None)


def test_a_config_has_a_limit_of_its_own() -> None:
    assert max_bytes_of(CONFIG_NAME, 10**9) == 2**20
    assert max_bytes_of(WEIGHTS_NAME, 10**9) == 10**9
    large = RemoteFile(path="x", size_bytes=2**20 + 1, validator=None)
    with pytest.raises(SourceRefused, match=CONFIG_NAME):
        check_sizes({CONFIG_NAME: large}, max_file_bytes=10**9, max_total_bytes=10**9)


@pytest.mark.parametrize(
    "checksum",
    [
        None,
        Checksum("sha256", hashlib.sha256(WEIGHTS).hexdigest()),
        Checksum("md5", hashlib.md5(WEIGHTS).hexdigest()),
        Checksum("git", git_hash(WEIGHTS)),
    ],
)
def test_the_right_bytes_pass_each_kind_of_checksum(
    tmp_path: Path, checksum: Checksum | None
) -> None:
    path = tmp_path / WEIGHTS_NAME
    path.write_bytes(WEIGHTS)
    expected = hashlib.sha256(WEIGHTS).hexdigest()
    assert check_file(path, file_of(WEIGHTS, checksum), expected) == expected


@pytest.mark.parametrize("algorithm", ["sha256", "md5", "git"])
def test_other_bytes_fail_each_kind_of_checksum(tmp_path: Path, algorithm: str) -> None:
    path = tmp_path / WEIGHTS_NAME
    path.write_bytes(WEIGHTS)
    file = file_of(WEIGHTS, Checksum(algorithm, "0" * 40))
    with pytest.raises(SourceFailed, match=rf"source reports \({algorithm}\)") as failed:
        check_file(path, file, None)
    assert not failed.value.is_temporary
