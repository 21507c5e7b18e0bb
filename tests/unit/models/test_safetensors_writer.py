from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from loramux.models.safetensors_writer import SafetensorsWriter

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.float32([1.5]),
    "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
}
SHAPES = {name: values.shape for name, values in TENSORS.items()}


def test_the_library_reads_back_what_was_written(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    with SafetensorsWriter(file, SHAPES) as writer:
        for name, values in TENSORS.items():
            writer.write(name, values)
    read = load_file(file)
    assert read.keys() == TENSORS.keys()
    assert all(np.array_equal(read[name], TENSORS[name]) for name in TENSORS)


def test_tensors_out_of_order_or_of_another_kind_are_refused(tmp_path: Path) -> None:
    for name, values in [
        ("b", TENSORS["b"]),
        ("a", TENSORS["a"].T),
        ("a", TENSORS["a"].astype(np.float64)),
    ]:
        with (
            pytest.raises(ValueError, match="announced"),
            SafetensorsWriter(tmp_path / "x", SHAPES) as writer,
        ):
            writer.write(name, values)


def test_missing_tensor_is_not_left_as_a_short_file_unseen(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="2 announced tensors were not written"),
        SafetensorsWriter(tmp_path / "x", SHAPES) as writer,
    ):
        writer.write("a", TENSORS["a"])
