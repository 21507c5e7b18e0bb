"""Valid, broken and hostile safetensors files."""

from __future__ import annotations

import hashlib
import io
import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from loramux.adapters.peft.safetensors import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    TensorEntry,
    parse_header,
    read_head,
)
from loramux.adapters.peft.weights import open_weights
from loramux.errors import AdapterRefused
from tests.adapter_factory import write_adapter
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


SOUND = save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)})


def header_bytes(**entries: Any) -> bytes:
    return json.dumps(entries).encode()


def entry(start: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> Any:
    return {"dtype": dtype, "shape": shape or [(end - start) // 4], "data_offsets": [start, end]}


def refusal_of(header: bytes, data_bytes: int) -> str:
    with pytest.raises(AdapterRefused) as refused:
        parse_header(header, data_bytes)
    return refused.value.code


def read_file(content: bytes) -> None:
    """Read a file like read_adapter; a refusal is accepted."""
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(Path(folder), None, content)
        with open_weights(Path(folder)) as weights:
            tensors = weights.load().tensors
    expected = safetensors.torch.load(content)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, equal_nan=True)


def test_tensors_and_digest_are_those_of_the_file(tmp_path: Path) -> None:
    write_adapter(tmp_path, None, SOUND)
    with open_weights(tmp_path) as weights:
        assert {entry.name: entry.shape for entry in weights.entries} == {"a": (2, 3), "b": (4,)}
        loaded = weights.load()
    assert torch.equal(loaded.tensors["a"], torch.arange(6.0).reshape(2, 3))
    assert loaded.tensors["b"].dtype == torch.bfloat16
    assert loaded.digest.sha256 == hashlib.sha256(SOUND).hexdigest()
    assert loaded.digest.size == len(SOUND)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_float_type_is_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    write_adapter(tmp_path, None, {"a": torch.ones(3, dtype=dtype)})
    with open_weights(tmp_path) as weights:
        assert weights.load().tensors["a"].dtype == dtype


def test_a_header_as_short_as_a_pickles_first_bytes_is_read(tmp_path: Path) -> None:
    """A header of 0x0280 bytes makes the file begin like a pickle of protocol 2."""
    text = header_bytes(a=entry(0, 4)).ljust(0x0280)
    write_adapter(tmp_path, None, struct.pack("<Q", len(text)) + text + bytes(4))
    with open_weights(tmp_path) as weights:
        assert weights.load().tensors["a"].tolist() == [0.0]


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, None, SOUND)
    with open_weights(tmp_path) as weights, pytest.raises(AdapterRefused, match="changed while"):
        with weights.path.open("ab") as file:
            file.write(b"more")
        weights.load()


@pytest.mark.parametrize(
    "fields",
    [
        {"a": entry(0, 8), "b": entry(4, 12)},
        {"a": entry(0, 4), "b": entry(8, 12)},
        {"a": entry(4, 12)},
        {"a": entry(0, 4)},
        {"a": entry(0, 12, shape=[2])},
        {"a": {**entry(0, 12), "data_offsets": [12, 0]}},
        {"a": {**entry(0, 12), "data_offsets": [0, 12, 12]}},
        {"a": {**entry(0, 12), "data_offsets": [0.0, 12.0]}},
        {"a": {**entry(0, 12), "data_offsets": [False, 12]}},
        {"a": {**entry(0, 12), "shape": None}},
        {"a": {**entry(0, 12), "shape": [2**62] * 9}},
        {"a": {**entry(0, 12), "dtype": 3}},
        {"a": 12},
        {"a" * 2000: entry(0, 12)},
        {"__metadata__": [], "a": entry(0, 12)},
    ],
)
def test_a_header_that_does_not_fit_its_data_is_broken(fields: dict[str, Any]) -> None:
    assert refusal_of(header_bytes(**fields), 12) == "broken_safetensors"


@pytest.mark.parametrize(
    "header",
    [b"", b"[]", b"\xff", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b'{"a": {}, "a": {}}'],
)
def test_what_is_no_json_object_is_broken(header: bytes) -> None:
    assert refusal_of(header, 0) == "broken_safetensors"


def test_data_that_ends_too_early_is_truncated() -> None:
    assert refusal_of(header_bytes(a=entry(0, 12)), 11) == "truncated"


@pytest.mark.parametrize("dtype", ["I8", "F8_E8M0", "BOOL", "F128"])
def test_other_types_are_refused(dtype: str) -> None:
    assert refusal_of(header_bytes(a=entry(0, 12, dtype=dtype)), 12) == "bad_dtype"


def test_an_oversized_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    write_adapter(tmp_path, None, struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{")
    with pytest.raises(AdapterRefused) as refused, open_weights(tmp_path):
        pass
    assert refused.value.code == "oversized_header"


@given(st.binary(max_size=300))
def test_random_bytes_are_refused_and_nothing_else_happens(content: bytes) -> None:
    with pytest.raises(AdapterRefused):
        read_file(content)


@given(st.binary(max_size=200), st.binary(max_size=20))
def test_random_headers_are_refused_and_nothing_else_happens(header: bytes, data: bytes) -> None:
    content = struct.pack("<Q", len(header)) + header + data
    with pytest.raises(AdapterRefused):
        read_file(content)


@given(st.integers(0, len(SOUND) - 1), st.integers(0, 255))
def test_a_changed_byte_is_read_or_refused(position: int, value: int) -> None:
    content = bytearray(SOUND)
    content[position] = value
    try:
        read_file(bytes(content))
    except AdapterRefused as refused:
        assert refused.fix


@given(
    st.dictionaries(
        st.text(max_size=3),
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["F32", "F16", "BF16", "F64", "I8"]),
                "shape": st.lists(st.integers(-1, 4), max_size=3),
                "data_offsets": st.lists(st.integers(-1, 24), min_size=1, max_size=3),
            }
        ),
        max_size=3,
    ),
    st.integers(0, 24),
)
def test_what_the_parser_accepts_the_library_accepts(
    fields: dict[str, Any], data_bytes: int
) -> None:
    text = header_bytes(**fields)
    try:
        parse_header(text, data_bytes)
    except AdapterRefused:
        return
    read_file(struct.pack("<Q", len(text)) + text + bytes(data_bytes))


def test_an_empty_tensor_of_huge_dimensions_is_broken() -> None:
    """torch raises a RuntimeError for its strides."""
    text = json.dumps({"x": {"dtype": "F32", "shape": [2**62, 0], "data_offsets": [0, 0]}})
    with pytest.raises(AdapterRefused, match="too large") as refused:
        parse_header(text.encode(), 0)
    assert refused.value.code == "broken_safetensors"
