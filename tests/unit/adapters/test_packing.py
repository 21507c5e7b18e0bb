from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from loramux.adapters.packed.extras import MODEL_LEVEL, ExtraKind
from loramux.adapters.packed.image import AdapterImage, mapped_buffer
from loramux.adapters.packed.packing import DensePacking, Packing, PagedPacking
from loramux.adapters.packed.writers import write_extra
from loramux.adapters.peft.parts import ExtraTensor
from loramux.adapters.peft.reader import read_adapter
from loramux.errors import AdapterRefused
from tests.adapter_factory import (
    lora_config_dict,
    lora_tensors,
    tiny_base_info,
    tiny_llama_config,
    write_adapter,
)
from tests.linear_specs import specs_of
from tests.packing_factory import pack_image, spec_of

BASE = tiny_base_info(tiny_llama_config())
SITES = BASE.linears
DENSE = DensePacking(SITES, torch.float32, 4 * 4096)
PAGED = PagedPacking(SITES, torch.float32, 4 * 4096, mapped_buffer)


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
        DensePacking(SITES, torch.bfloat16, 2 * 4096),
        PagedPacking(SITES, torch.float32, 4 * 8192, mapped_buffer),
        DensePacking(SITES[:1], torch.float32, 4 * 4096),
    ]
    assert len({packing.fingerprint for packing in others}) == len(others)
    assert DensePacking(SITES, torch.float32, 4 * 4096).fingerprint == DENSE.fingerprint


def test_adapters_of_a_wide_base_in_bfloat16_have_a_short_a() -> None:
    sites = specs_of({"o_proj": (256, 64)})
    packings = [
        PagedPacking(sites, dtype, 4096 * dtype.itemsize, mapped_buffer)
        for dtype in (torch.bfloat16, torch.float32)
    ]
    assert [packing.is_fp12 for packing in packings] == [True, False]
    assert [p.plan({(0, "o_proj"): 8}).is_fp12 for p in packings] == [True, False]
    assert packings[0].layout_of([(0, "o_proj", 8)]).is_fp12
    assert packings[0].fingerprint != packings[1].fingerprint


EXTRAS = (
    ExtraTensor((0, "qkv", ExtraKind.GAIN), torch.arange(64.0)[None]),
    ExtraTensor((1, "o", ExtraKind.BIAS), torch.linspace(-1, 1, 32)[None]),
    ExtraTensor((MODEL_LEVEL, "lm_head", ExtraKind.WEIGHT), torch.randn(300, 32)),
)


def used_memory(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((num_elements * dtype.itemsize,), 0x55, dtype=torch.uint8).view(dtype)


def values_of(image: AdapterImage, part: ExtraTensor) -> torch.Tensor:
    extras = image.layout.extras
    place = extras.places[part.key]
    rows = [
        image.buffer[offset : offset + count * place.width].view(count, place.width)
        for _, count, offset in place.pieces(extras.page_width)
    ]
    return torch.cat(rows)


@pytest.mark.parametrize("packing", [DENSE, PAGED])
@pytest.mark.parametrize("has_low_rank", [True, False])
def test_other_parts_follow_the_low_rank(
    packing: DensePacking | PagedPacking, has_low_rank: bool, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path, lora_config_dict(), lora_tensors(tiny_llama_config(), seed=1))
    plain = read_adapter(folder, BASE)
    modules = plain.modules if has_low_rank else ()
    adapter = SimpleNamespace(cid="x", modules=modules, extras=EXTRAS)
    image = pack_image(adapter, replace(packing, allocate=used_memory))
    for part in EXTRAS:
        assert torch.equal(values_of(image, part), part.values)
    layout, page = image.layout, packing.page_bytes // packing.dtype.itemsize
    assert layout.max_rank == (4 if has_low_rank else 0)
    assert layout.num_elements == layout.extras.end == image.buffer.numel()
    assert layout.extras.num_pages == 3, "the vectors fill the end of the last page of the head"
    if has_low_rank:
        alone = pack_image(plain, replace(packing, allocate=used_memory))
        assert torch.equal(image.buffer[: alone.buffer.numel()], alone.buffer)
        assert -(-alone.buffer.numel() // page) * page == layout.extras.start
    again = pack_image(adapter, packing)
    assert torch.equal(again.buffer, image.buffer), "padding is zero whatever the memory held"
    key = json.loads(json.dumps([layout.key, layout.extras.key]))
    assert packing.layout_of(*key) == layout


@pytest.mark.parametrize(
    ("value", "dtype", "code"),
    [(float("nan"), torch.float32, "not_finite"), (1e5, torch.float16, "overflow")],
)
def test_values_that_are_no_numbers_when_served_are_refused(
    value: float, dtype: torch.dtype, code: str
) -> None:
    part = ExtraTensor((0, "o", ExtraKind.BIAS), torch.tensor([[1.0, value]]))
    layout = DENSE.plan({}, [spec_of(part)])
    buffer = torch.empty(layout.num_elements, dtype=dtype)
    with pytest.raises(AdapterRefused) as caught:
        write_extra(layout.extras, buffer, part)
    assert caught.value.code == code
