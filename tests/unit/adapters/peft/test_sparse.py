"""Weights that are mostly holes are refused before they are hashed."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest

from loramux.adapters.peft.refusals import RefusalCode
from loramux.adapters.peft.safetensors import WEIGHTS_NAME, find_weights
from loramux.errors import AdapterRefused
from loramux.store.store import ContentStore

GIBIBYTE = 2**30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return an adapter of 3 GiB that takes some KiB of the disk."""
    made = tmp_path / "sparse"
    made.mkdir()
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (made / "adapter_config.json").write_text(json.dumps(config))
    shape = [3 * GIBIBYTE // 16, 8]
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    entry = {"dtype": "F16", "shape": shape, "data_offsets": [0, 3 * GIBIBYTE]}
    header = json.dumps({name: entry}).encode()
    with (made / WEIGHTS_NAME).open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 3 * GIBIBYTE)
    assert shutil.disk_usage(made).free and (made / WEIGHTS_NAME).stat().st_blocks < 1000
    return made


def test_a_sparse_file_is_refused_by_a_load_and_by_a_push(folder: Path, tmp_path: Path) -> None:
    for use in (find_weights, ContentStore(tmp_path / "store").put_folder):
        with pytest.raises(AdapterRefused, match="sparse") as refused:
            use(folder)
        assert refused.value.code == RefusalCode.BROKEN_SAFETENSORS


def test_a_whole_file_of_zeros_is_not_sparse(tmp_path: Path) -> None:
    with (tmp_path / WEIGHTS_NAME).open("wb") as file:
        for _ in range(17):
            file.write(bytes(2**20))
    assert find_weights(tmp_path) == tmp_path / WEIGHTS_NAME
