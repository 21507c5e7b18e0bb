"""The reader of GGUF files against that of the package gguf, and files that are cut or altered."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from loramux.errors import UnsupportedModel
from loramux.models.gguf_reader import read_gguf

KINDS = gguf.GGMLQuantizationType


@pytest.fixture
def path(tmp_path: Path) -> Path:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    for number in (8, 16, 32, 64):
        getattr(writer, f"add_uint{number}")(f"u{number}", 2**number - 1)
        getattr(writer, f"add_int{number}")(f"i{number}", -(2 ** (number - 1)))
    writer.add_float32("f32", 0.1)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "é\n" * 100)
    writer.add_array("texts", ["a", "", "né"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("shares", [0.5, 0.25])
    writer.add_custom_alignment(64)
    draw = np.random.default_rng(0)
    for kind in (KINDS.F32, KINDS.F16, KINDS.BF16, KINDS.Q8_0, KINDS.Q4_1):
        values = draw.standard_normal((3, 64), dtype=np.float32)
        writer.add_tensor(kind.name, quantize(values, kind), raw_dtype=kind)
    writer.add_tensor("row", np.ones(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "x.gguf"


def test_it_reads_what_the_package_gguf_reads(path: Path) -> None:
    found, expected = read_gguf(path), gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in expected.fields.items()}
    assert found.metadata == {
        name: value for name, value in fields.items() if not name.startswith("GGUF.")
    }
    assert [tensor.name for tensor in found.tensors] == [t.name for t in expected.tensors]
    for ours, theirs in zip(found.tensors, expected.tensors, strict=True):
        assert ours.shape == tuple(reversed(theirs.shape.tolist()))
        assert ours.kind == theirs.tensor_type
        values = dequantize(ours.data, ours.kind)
        assert values.shape == ours.shape
        np.testing.assert_array_equal(values, dequantize(theirs.data, theirs.tensor_type))


def test_a_file_that_is_cut_off_anywhere_is_refused(path: Path) -> None:
    content = path.read_bytes()
    # The last tensor has five values, which are padded to 64 bytes.
    end = len(content) - 64 + 5 * 4
    path.write_bytes(content[:end])
    assert len(read_gguf(path).tensors) == 6
    for length in [*range(0, end, 97), end - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(UnsupportedModel, match="is not a readable GGUF file"):
            read_gguf(path)


def test_altered_bytes_of_the_header_never_end_otherwise(path: Path) -> None:
    content = path.read_bytes()
    draw = np.random.default_rng(0)
    num_refused = 0
    for _ in range(300):
        altered = bytearray(content)
        for position in draw.integers(0, len(content) // 2, 3):
            altered[position] = draw.choice([0, 1, 9, 127, 255])
        path.write_bytes(altered)
        try:
            read_gguf(path)
        except UnsupportedModel:
            num_refused += 1
    assert num_refused > 50
