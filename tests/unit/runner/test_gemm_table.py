"""Tables of tuned GEMMs: ranges of rows, files, versions of the library."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from loramux.runner.gemm import table
from loramux.runner.gemm.table import (
    TunedGemm,
    TunedTable,
    find_tables,
    read_table,
    user_table_file,
)

GPU = "NVIDIA Test 80GB"
SPLIT = TunedGemm(
    first_m=33,
    m=48,
    n=64,
    k=128,
    dtype=torch.bfloat16,
    algorithm=b"\x01\x02",
    num_splits=2,
    split_algorithm=b"\x03",
)
FUSED = TunedGemm(first_m=49, m=64, n=64, k=128, dtype=torch.bfloat16, fused_swiglu=True)


def make(*entries: TunedGemm, version: int = 7) -> TunedTable:
    made = TunedTable(GPU, version)
    made.add(entries)
    return made


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LORAMUX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(table, "SHIPPED_TABLES", tmp_path)
    return tmp_path / "nvidia-test-80gb.json"


def test_an_entry_covers_its_range_of_rows() -> None:
    made = make(FUSED, SPLIT)
    found = {m: made.find(m, 64, 128, torch.bfloat16) for m in (32, 33, 48, 49, 64, 65)}
    assert found == {32: None, 33: SPLIT, 48: SPLIT, 49: FUSED, 64: FUSED, 65: None}
    assert made.find(48, 64, 128, torch.float16) is None
    assert made.find(48, 128, 64, torch.bfloat16) is None


def test_a_written_table_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "gpu.json"
    make(SPLIT, FUSED).write(file)
    found = read_table(file)
    assert found is not None and found.entries() == [SPLIT, FUSED]
    assert (found.gpu, found.cublaslt_version) == (GPU, 7)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: "",
        lambda content: "[1]",
        lambda content: json.dumps({**content, "format": 0}),
        lambda content: json.dumps({**content, "gemms": [{"m": 1}]}),
        lambda content: json.dumps({**content, "gemms": 3}),
        lambda content: json.dumps(content).replace("bfloat16", "nonsense"),
        lambda content: json.dumps(content).replace("0102", "zz"),
    ],
)
def test_a_damaged_file_is_ignored(tmp_path: Path, damage: object) -> None:
    file = tmp_path / "gpu.json"
    make(SPLIT).write(file)
    assert callable(damage)
    file.write_text(damage(json.loads(file.read_text())))
    assert read_table(file) is None


def test_the_users_table_overrides_the_shipped_one(shipped: Path) -> None:
    assert find_tables(GPU, 7).entries() == []
    make(SPLIT, FUSED).write(shipped)
    assert find_tables(GPU, 7).entries() == [SPLIT, FUSED]
    own = TunedGemm(first_m=33, m=48, n=64, k=128, dtype=torch.bfloat16, algorithm=b"\x09")
    make(own).write(user_table_file(GPU, 7))
    assert find_tables(GPU, 7).entries() == [own, FUSED]


def test_algorithms_of_another_library_version_are_ignored_with_a_hint(
    shipped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The choice of our own kernel stays."""
    make(SPLIT, FUSED, version=8).write(shipped)
    with caplog.at_level(logging.INFO):
        assert find_tables(GPU, 7).entries() == [FUSED]
    assert "cuBLASLt 8" in caplog.text and "loramux tune" in caplog.text


def test_shipped_tables_are_valid() -> None:
    for file in sorted(table.SHIPPED_TABLES.glob("*.json")):
        found = read_table(file)
        assert found is not None and found.entries()
        assert file.name == f"{found.gpu.replace(' ', '-').lower()}.json"
