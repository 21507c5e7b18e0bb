from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from loramux.adapters.packed.image import mapped_buffer
from loramux.adapters.packed.packing import DensePacking, Packing, PagedPacking
from loramux.adapters.peft.reader import read_adapter
from loramux.types.model import Projection, fuse_projections
from tests.adapter_factory import (
    lora_config_dict,
    lora_tensors,
    tiny_base_info,
    tiny_llama_config,
    write_adapter,
)
from tests.packing_factory import pack_image

BASE = tiny_base_info(tiny_llama_config())
SITES = BASE.fused_linears
DENSE = DensePacking(SITES, torch.float32)
PAGED = PagedPacking(SITES, torch.float32, 4096, mapped_buffer)


@pytest.mark.parametrize("packing", [DENSE, PAGED])
def test_a_layout_comes_back_from_its_key_in_a_file(packing: Packing, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, lora_config_dict(), lora_tensors(tiny_llama_config(), seed=1))
    image = pack_image(read_adapter(folder, BASE), packing)
    assert image.buffer.numel() == image.layout.num_elements
    again = packing.layout_of(json.loads(json.dumps(image.layout.key)))
    assert again == image.layout


def test_packings_of_different_buffers_have_different_fingerprints() -> None:
    others = [
        DENSE,
        PAGED,
        DensePacking(SITES, torch.bfloat16),
        PagedPacking(SITES, torch.float32, 8192, mapped_buffer),
        DensePacking(SITES[:1], torch.float32),
    ]
    assert len({packing.fingerprint for packing in others}) == len(others)
    assert DensePacking(SITES, torch.float32).fingerprint == DENSE.fingerprint


def test_adapters_of_a_wide_base_in_bfloat16_have_a_short_a() -> None:
    sites = fuse_projections([Projection("o_proj", 256, 64)])
    packings = [
        PagedPacking(sites, dtype, 4096, mapped_buffer) for dtype in (torch.bfloat16, torch.float32)
    ]
    assert [packing.is_fp12 for packing in packings] == [True, False]
    assert [p.plan({(0, "o_proj"): 8}).is_fp12 for p in packings] == [True, False]
    assert packings[0].layout_of([(0, "o_proj", 8)]).is_fp12
    assert packings[0].fingerprint != packings[1].fingerprint
