"""Hostile files are in test_safetensors_file.py and test_store_intake.py; here, what is sound."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from loramux.adapters.peft.safetensors import (
    LENGTH_BYTES,
    TensorEntry,
    parse_header,
    read_head,
)
from loramux.errors import AdapterRefused
from tests.store_factory import tiny_weights


def test_a_sound_header_names_its_tensors() -> None:
    content = tiny_weights(1)
    head = read_head(io.BytesIO(content), len(content))
    assert content.startswith(head)
    assert parse_header(head[LENGTH_BYTES:], len(content) - len(head)) == (
        TensorEntry("lora_A", "F32", (4,), 0, 16),
    )


@pytest.mark.parametrize("num_missing", [1, 16, 17, 60])
def test_a_file_that_was_cut_short_is_refused(num_missing: int) -> None:
    content = tiny_weights(1)[:-num_missing]
    with pytest.raises(AdapterRefused, match="cut short"):
        head = read_head(io.BytesIO(content), len(content))
        parse_header(head[LENGTH_BYTES:], len(content) - len(head))


def test_it_is_read_without_torch() -> None:
    code = "import sys, loramux.adapters.peft.safetensors; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
