from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from loramux.adapters.loading import AdapterRules, FolderLoader
from loramux.adapters.packed.packing import DensePacking, Packing, PagedPacking
from loramux.adapters.peft import safetensors
from loramux.adapters.peft import weights as weights_module
from loramux.adapters.peft.reader import read_adapter
from loramux.adapters.peft.weights import open_weights
from loramux.adapters.workers import Workers
from loramux.errors import AdapterRefused
from tests.adapter_factory import (
    lora_config_dict,
    lora_tensors,
    tiny_base_info,
    tiny_llama_config,
    write_adapter,
)
from tests.packing_factory import pack_image

# All widths are multiples of 128, so that A is packed to fp12.
CONFIG = tiny_llama_config(hidden_size=256, intermediate_size=384, num_attention_heads=4)
CONFIG.head_dim = 64
BASE = tiny_base_info(CONFIG)


def used_memory(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocates memory that holds the bytes of an earlier image."""
    return torch.full((num_elements * dtype.itemsize,), 0x55, dtype=torch.uint8).view(dtype)


PACKINGS: dict[str, Packing] = {
    "dense": DensePacking(BASE.linears, torch.float32, 4 * 4096, used_memory),
    "paged": PagedPacking(BASE.linears, torch.float16, 2 * 8192, used_memory),
    "fp12": PagedPacking(BASE.linears, torch.bfloat16, 2 * 8192, used_memory),
}


@pytest.fixture
def threads() -> Iterator[Workers]:
    with ThreadPoolExecutor(3) as executor:
        yield Workers(executor, num_threads=3)


@pytest.mark.parametrize("kind", PACKINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_load_on_several_threads_is_that_of_the_checked_adapter(
    kind: str, dtype: torch.dtype, tmp_path: Path, threads: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "SLICE_BYTES", 4000)
    tensors = {name: tensor.to(dtype) for name, tensor in lora_tensors(CONFIG, r=19).items()}
    folder = write_adapter(tmp_path, lora_config_dict(r=19), tensors)
    packing = PACKINGS[kind]
    loaded = FolderLoader(AdapterRules(base=BASE, packing=packing), threads).load(folder)
    expected = pack_image(read_adapter(folder, BASE), packing)
    assert loaded.image.cid == expected.cid and loaded.image.layout == expected.layout
    assert torch.equal(loaded.image.buffer.view(torch.uint8), expected.buffer.view(torch.uint8))
    assert loaded.times.read_s <= loaded.times.pack_s <= loaded.times.total_s


def test_padding_is_zero_whatever_the_memory_held_before(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, lora_config_dict(r=3), lora_tensors(CONFIG, r=3))
    for packing in PACKINGS.values():
        image = pack_image(read_adapter(folder, BASE), packing)
        weights = sum(value == 0x5555 for value in image.buffer.view(torch.int16).tolist())
        assert not weights, "bytes of an earlier image are left"


def test_a_load_makes_the_memory_of_the_next_one_ready(tmp_path: Path) -> None:
    sizes: list[int] = []

    def allocate(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        sizes.append(num_elements)
        return torch.empty(num_elements, dtype=dtype)

    folder = write_adapter(tmp_path, lora_config_dict(), lora_tensors(CONFIG))
    packing = DensePacking(BASE.linears, torch.float32, 4 * 4096, allocate)
    with ThreadPoolExecutor(3) as executor:
        workers = Workers(executor, num_threads=3)
        loader = FolderLoader(AdapterRules(base=BASE, packing=packing), workers)
        layout = loader.plan(loader.inspect(folder)).layout
        loader.load(folder)
    assert sizes == 3 * [layout.num_elements]


@pytest.mark.parametrize("change", [b"", b"\0"])
def test_a_file_that_changes_while_threads_read_it_is_refused(
    tmp_path: Path, threads: Workers, change: bytes
) -> None:
    write_adapter(tmp_path, None, lora_tensors(CONFIG))
    with open_weights(tmp_path) as weights:
        weights.path.write_bytes(weights.path.read_bytes()[: len(change) - 1] + change)
        with (
            weights.reading(threads) as reading,
            pytest.raises(AdapterRefused, match="changed while"),
        ):
            reading.digest()


def test_tensors_behind_ones_of_a_smaller_type_are_read(tmp_path: Path) -> None:
    """safetensors sorts by type; other writers may not, and leave float64 unaligned."""
    content = save({"a": torch.ones(3, dtype=torch.float16)})
    header = content[8:].split(b"}}")[0].decode().rstrip() + "},"
    header += '"b":{"dtype":"F64","shape":[2],"data_offsets":[6,22]}}'
    data = torch.ones(3, dtype=torch.float16).view(torch.uint8).numpy().tobytes()
    data += torch.tensor([1.5, -2.5], dtype=torch.float64).view(torch.uint8).numpy().tobytes()
    write_adapter(tmp_path, None, len(header).to_bytes(8, "little") + header.encode() + data)
    with open_weights(tmp_path) as weights:
        tensors = weights.load().tensors
    assert tensors["a"].tolist() == [1, 1, 1] and tensors["b"].tolist() == [1.5, -2.5]


def write_sparse(folder: Path, rank: int, data_bytes: int | None = None) -> Path:
    """Write a valid adapter whose data is a hole in its file."""
    target = next(one for one in BASE.targets if one.projection == "q_proj")
    header, at = {}, 0
    for half, shape in (("A", [rank, target.in_features]), ("B", [target.out_features, rank])):
        size = 2 * shape[0] * shape[1]
        name = f"base_model.model.{target.path}.lora_{half}.weight"
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    config = lora_config_dict(r=rank, target_modules=[target.path])
    write_adapter(folder, config, len(text).to_bytes(8, "little") + text)
    os.truncate(folder / "adapter_model.safetensors", 8 + len(text) + (data_bytes or at))
    return folder


def test_an_adapter_that_is_larger_than_the_pool_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of 3 GiB kept the reader busy until the engine seemed dead."""
    read = []
    # The file has a size and no content here.
    monkeypatch.setattr(safetensors, "refuse_sparse", lambda path: None)
    monkeypatch.setattr(os, "preadv", lambda *arguments: read.append(arguments))
    folder = write_sparse(tmp_path, rank=2_000_000)
    rules = AdapterRules(base=BASE, packing=PACKINGS["dense"], max_bytes=2**20)
    with pytest.raises(AdapterRefused, match="the page pool has 1048576") as refused:
        FolderLoader(rules).load(folder)
    assert refused.value.code == "too_large" and not read


def test_a_file_of_more_than_8_gib_is_refused_by_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors, "refuse_sparse", lambda path: None)
    folder = write_sparse(tmp_path, rank=4, data_bytes=2**33)
    with pytest.raises(AdapterRefused, match="at most 8589934592") as refused:
        FolderLoader(AdapterRules(base=BASE, packing=PACKINGS["dense"])).inspect(folder)
    assert refused.value.code == "too_large"
