from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from loramux.models import digests
from loramux.models.digests import file_digest, model_digest


def test_digest_is_sha256_of_the_content(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"abc")
    assert file_digest(file) == hashlib.sha256(b"abc").hexdigest()


def test_second_time_the_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"abc")
    first = file_digest(file)
    monkeypatch.setattr(digests.hashlib, "file_digest", None)
    assert file_digest(file) == first


def test_changed_file_of_equal_size_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"abc")
    first = file_digest(file)
    file.write_bytes(b"abd")
    os.utime(file, ns=(0, 0))
    assert file_digest(file) != first


def test_broken_memory_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAMUX_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "weights"
    file.write_bytes(b"abc")
    expected = file_digest(file)
    (sidecar,) = (tmp_path / "cache" / "digests").iterdir()
    for broken in ("{", "[]", "{}"):
        sidecar.write_text(broken)
        assert file_digest(file) == expected


def test_cache_that_cannot_be_written_does_not_stop_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"abc")
    monkeypatch.setenv("LORAMUX_CACHE", str(file / "below-a-file"))
    assert file_digest(file) == hashlib.sha256(b"abc").hexdigest()


def test_model_digest_knows_config_and_every_shard(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("config.json", "a", "b")]
    for file in files:
        file.write_bytes(b"0")
    config, a, b = files
    digests_seen = {model_digest([config], [a, b]), model_digest([config], [a])}
    for file in files:
        file.write_bytes(b"10")
        digests_seen.add(model_digest([config], [a, b]))
    assert len(digests_seen) == 5
    assert model_digest([config], [b, a]) == model_digest([config], [a, b])
