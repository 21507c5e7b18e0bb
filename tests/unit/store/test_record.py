from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loramux.adapters.identity import FileDigest, compute_cid, make_manifest, parse_cid
from loramux.adapters.peft.config import parse_config
from loramux.errors import InvalidRequest, StoreDamaged
from loramux.store.record import (
    Record,
    check_config_file,
    decode_record,
    make_record,
)
from tests.store_factory import CONFIG

WEIGHTS = FileDigest("a" * 64, 10)
CONFIG_FILE = FileDigest("b" * 64, 5)


def sample(**config: Any) -> Record:
    parsed = parse_config({**CONFIG, **config})
    manifest = make_manifest(parsed.canonical(), {"adapter_model.safetensors": WEIGHTS})
    return make_record(manifest, CONFIG_FILE)


@given(
    st.integers(1, 512),
    st.floats(0.001, 1e6) | st.integers(1, 64),
    st.dictionaries(st.text(max_size=5), st.integers(1, 9), max_size=3),
)
def test_a_record_survives_its_bytes(rank: int, alpha: float, pattern: dict[str, int]) -> None:
    record = sample(r=rank, lora_alpha=alpha, rank_pattern=pattern)
    decoded = decode_record(record.encode(), record.cid)
    assert decoded.cid == record.cid == compute_cid(decoded.manifest)
    assert decoded.files == record.files
    assert decoded.encode() == record.encode()


def test_a_record_counts_all_files() -> None:
    record = sample()
    assert set(record.files) == {"adapter_config.json", "adapter_model.safetensors"}
    assert record.size_bytes == 15


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b"null",
        b'{"manifest": {}}',
        b'{"manifest": {"files": []}, "config_file": {"sha256": "0", "size": 1}}',
        b"[" * 100_000,
    ],
)
def test_invalid_records_are_damage(content: bytes) -> None:
    with pytest.raises(StoreDamaged, match="is broken"):
        decode_record(content, sample().cid)


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "", "adapter_config.json", "x" * 300])
def test_a_manifest_cannot_name_a_file_outside_its_folder(name: str) -> None:
    record = sample()
    fields = json.loads(record.encode())
    fields["manifest"]["files"] = {name: {"sha256": "a" * 64, "size": 1}}
    with pytest.raises(StoreDamaged, match="not a valid name"):
        decode_record(json.dumps(fields).encode(), compute_cid(fields["manifest"]))


@pytest.mark.parametrize(
    ("sha256", "size"), [("A" * 64, 1), ("a" * 63, 1), (1, 1), ("a" * 64, -1), ("a" * 64, True)]
)
def test_digests_are_checked(sha256: object, size: object) -> None:
    fields = json.loads(sample().encode())
    fields["config_file"] = {"sha256": sha256, "size": size}
    with pytest.raises(StoreDamaged):
        decode_record(json.dumps(fields).encode(), sample().cid)


def test_a_record_under_another_adapters_name_is_damage() -> None:
    with pytest.raises(StoreDamaged, match="describes"):
        decode_record(sample(r=8).encode(), sample(r=4).cid)


@pytest.mark.parametrize("cid", ["", "cidv1:sha256:", "cidv1:sha256:" + "A" * 64, "../" + "a" * 64])
def test_only_content_ids_become_paths(cid: str) -> None:
    with pytest.raises(InvalidRequest, match="not a content id"):
        parse_cid(cid)


def test_the_config_file_may_differ_in_harmless_fields() -> None:
    record = sample()
    other_base = json.dumps({**CONFIG, "base_model_name_or_path": "renamed"}).encode()
    assert check_config_file(record, other_base).base_model_name == "renamed"


@pytest.mark.parametrize("content", [b"{", json.dumps({**CONFIG, "lora_alpha": 9}).encode()])
def test_a_config_file_that_means_something_else_is_damage(content: bytes) -> None:
    with pytest.raises(StoreDamaged):
        check_config_file(sample(), content)
