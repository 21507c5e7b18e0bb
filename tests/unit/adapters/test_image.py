from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from loramux.adapters.packed.image import mapped_buffer
from loramux.adapters.peft.reader import read_adapter
from tests.adapter_factory import make_peft_adapter, tiny_base_info, tiny_llama_config
from tests.packing_factory import pack_dense

BASE = tiny_base_info(tiny_llama_config())


def test_every_projection_can_be_read_back_from_its_place(tmp_path: Path) -> None:
    """Catches a slice at another one's columns, and a scale that was lost."""
    folder = make_peft_adapter(
        tmp_path / "a",
        tiny_llama_config(),
        target_modules=["q_proj", "v_proj", "o_proj"],
        rank_pattern={"v_proj": 2},
    )
    adapter = read_adapter(folder, BASE)
    sites = BASE.linears
    image = pack_dense(adapter, sites, torch.float32)
    projections = {site.name: site.projections for site in sites}
    modules = {(m.target.layer, m.target.projection): m for m in adapter.modules}
    assert len(image.layout.places) == 2 * BASE.num_layers
    for (layer, site), place in image.layout.places.items():
        a = image.buffer[place.a_offset :][: place.in_features * place.total_rank]
        a = a.view(place.in_features, place.total_rank)
        found = [modules[layer, p] for p in projections[site] if (layer, p) in modules]
        for piece, module in zip(place.slices, found, strict=True):
            columns = a[:, piece.rank_start : piece.rank_start + piece.rank]
            b = image.buffer[piece.offset :][: piece.rank * piece.out_features]
            change = columns @ b.view(piece.rank, piece.out_features)
            torch.testing.assert_close(change.t(), module.b @ module.a * module.scale)


def test_an_image_takes_its_elements_and_no_more(tmp_path: Path) -> None:
    adapter = read_adapter(make_peft_adapter(tmp_path / "a", tiny_llama_config()), BASE)
    image = pack_dense(adapter, BASE.linears, torch.float32)
    assert image.num_bytes == 4 * image.layout.num_elements
    assert image.num_bytes == sum(4 * (m.a.numel() + m.b.numel()) for m in adapter.modules)


@pytest.mark.skipif(sys.platform != "linux", reason="maps are listed here only on Linux")
def test_a_buffer_is_this_process_own_memory() -> None:
    """Catches memory that is shared, which Linux never gives in huge pages."""
    buffer = mapped_buffer(2**20, torch.float32)
    assert not buffer.any()
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, permissions, *_ = line.split()
        first, last = (int(end, 16) for end in area.split("-"))
        if first <= buffer.data_ptr() < last:
            assert permissions == "rw-p"
            return
    raise AssertionError("the buffer is nowhere")
