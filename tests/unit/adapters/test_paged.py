from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.adapters.packed.paged import (
    ALIGN_ELEMENTS,
    RANK_BLOCK,
    RankBlockLayout,
    plan_rank_blocks,
    tabulate,
)
from loramux.adapters.peft.reader import CheckedAdapter, read_adapter
from loramux.errors import AdapterRefused, DoesNotFit
from loramux.kernels.reference.fp12 import read_fp12
from tests.adapter_factory import make_peft_adapter, tiny_base_info, tiny_llama_config
from tests.linear_specs import specs_of
from tests.packing_factory import pack_rank_blocks

BASE = tiny_base_info(tiny_llama_config())
SITES = BASE.linears
PROJECTIONS = tuple(name for site in SITES for name in site.projections)
SHAPES = {
    name: (site.in_features, out)
    for site in SITES
    for name, out in zip(site.projections, site.out_features, strict=True)
}
PAGE_ELEMENTS = 576

LLAMA_8B = {
    **dict.fromkeys(("q_proj", "o_proj"), (4096, 4096)),
    **dict.fromkeys(("k_proj", "v_proj"), (4096, 1024)),
    **dict.fromkeys(("gate_proj", "up_proj"), (4096, 14336)),
    "down_proj": (14336, 4096),
}
LLAMA_8B_LINEARS = specs_of(LLAMA_8B)
PAGE_OF_2_MIB = 1 << 20


def matrices_of(layout: RankBlockLayout) -> list[tuple[int, int]]:
    """(offset, elements) of A and B of every rank block."""
    return [
        (offset, block.num_ranks * width)
        for (_, name), blocks in layout.blocks.items()
        for block in blocks
        for offset, width in zip((block.a_offset, block.b_offset), SHAPES[name], strict=True)
    ]


def read_tiny(folder: Path, rank_pattern: dict[str, int] | None = None) -> CheckedAdapter:
    return read_adapter(
        make_peft_adapter(
            folder,
            tiny_llama_config(),
            target_modules=["q_proj", "v_proj", "down_proj"],
            rank_pattern=rank_pattern or {},
        ),
        BASE,
    )


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.dictionaries(
        st.tuples(st.integers(0, 2), st.sampled_from(PROJECTIONS)), st.integers(1, 40), min_size=1
    )
)
def test_no_matrix_overlaps_another_or_crosses_a_page(ranks: dict[tuple[int, str], int]) -> None:
    layout = plan_rank_blocks(SITES, ranks, PAGE_ELEMENTS)
    matrices = sorted(matrices_of(layout))
    for (offset, size), (following, _) in pairwise(matrices):
        assert offset + size <= following
    for offset, size in matrices:
        assert offset % ALIGN_ELEMENTS == 0
        assert offset // PAGE_ELEMENTS == (offset + size - 1) // PAGE_ELEMENTS < layout.num_pages
    for (layer, name), blocks in layout.blocks.items():
        starts = np.cumsum([0, *(block.num_ranks for block in blocks)])
        assert [block.rank_start for block in blocks] == starts[:-1].tolist()
        assert starts[-1] == ranks[layer, name]
        assert all(block.num_ranks <= RANK_BLOCK for block in blocks)


@pytest.mark.parametrize("rank", [8, 16, 32, 64])
@pytest.mark.parametrize("names", [tuple(LLAMA_8B)[:4], tuple(LLAMA_8B)], ids=["qkvo", "all"])
def test_an_adapter_of_a_real_base_takes_no_page_more_than_its_bytes(
    rank: int, names: tuple[str, ...]
) -> None:
    ranks = {(layer, name): rank for layer in range(4) for name in names}
    layout = plan_rank_blocks(LLAMA_8B_LINEARS, ranks, PAGE_OF_2_MIB)
    assert layout.num_pages == -(-layout.num_weights // PAGE_OF_2_MIB)


def test_weights_can_be_read_back_through_the_table(tmp_path: Path) -> None:
    """Catches a rank block at a wrong offset or page, and a lost scale."""
    adapter = read_tiny(tmp_path / "a", {"v_proj": 19})
    ranks = {(m.target.layer, m.target.projection): m.rank for m in adapter.modules}
    layout = plan_rank_blocks(SITES, ranks, PAGE_ELEMENTS)
    buffer = torch.empty(layout.num_elements)
    pack_rank_blocks(adapter, layout, buffer)
    page_ids = torch.randperm(layout.num_pages + 3)[: layout.num_pages].tolist()
    pool = torch.full((layout.num_pages + 3, PAGE_ELEMENTS), float("nan"))
    pool[page_ids] = buffer.view(-1, PAGE_ELEMENTS)
    table = tabulate(layout, projections=PROJECTIONS, num_layers=BASE.num_layers)
    entries = table.addresses(page_ids)
    first = np.cumsum([0, *table.blocks_per_projection])
    for module in adapter.modules:
        name, layer = module.target.projection, module.target.layer
        change = torch.zeros(SHAPES[name][1], SHAPES[name][0])
        column = PROJECTIONS.index(name)
        for a_at, b_at, num_ranks, _ in entries[layer, first[column] : first[column + 1]].tolist():
            a, b = (
                pool.view(-1)[at * ALIGN_ELEMENTS :][: num_ranks * width].view(num_ranks, width)
                for at, width in zip((a_at, b_at), SHAPES[name], strict=True)
            )
            change += b.t() @ a
        torch.testing.assert_close(change, module.b @ module.a * module.scale)


def test_unchanged_modules_have_no_ranks_in_the_table() -> None:
    layout = plan_rank_blocks(SITES, {(1, "k_proj"): 17, (2, "k_proj"): 3}, PAGE_ELEMENTS)
    table = tabulate(layout, projections=PROJECTIONS, num_layers=3)
    assert table.blocks_per_projection.tolist() == [0, 2, 0, 0, 0, 0, 0]
    assert table.num_ranks.tolist() == [[0, 0], [16, 1], [3, 0]]


def test_a_page_too_small_for_one_rank_is_refused() -> None:
    with pytest.raises(DoesNotFit, match="larger block size"):
        plan_rank_blocks(LLAMA_8B_LINEARS, {(0, "down_proj"): 1}, 8192)


def test_a_page_size_that_is_not_aligned_is_an_error() -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        plan_rank_blocks(SITES, {(0, "q_proj"): 1}, 100)


def test_weights_that_overflow_the_served_dtype_are_refused(tmp_path: Path) -> None:
    adapter = read_tiny(tmp_path / "a")
    adapter.modules[0].b.fill_(1e30)
    ranks = {(m.target.layer, m.target.projection): m.rank for m in adapter.modules}
    layout = plan_rank_blocks(SITES, ranks, PAGE_ELEMENTS)
    with pytest.raises(AdapterRefused, match="float16"):
        pack_rank_blocks(adapter, layout, torch.empty(layout.num_elements, dtype=torch.float16))


def random_adapter(scale: float = 0.5, size: float = 0.02) -> Any:
    """Return an adapter of rank 19 at one projection; rows of A differ in size, one is zero."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(19, 256, generator=generator) * size
    a *= torch.logspace(-4, 1, 19)[:, None]
    a[5] = 0
    b = torch.randn(64, 19, generator=generator)
    target = SimpleNamespace(layer=0, projection="o_proj")
    module = SimpleNamespace(target=target, a=a, b=b, rank=19, scale=scale)
    return SimpleNamespace(modules=[module])


WIDE_SITES = specs_of({"o_proj": (256, 64)})


def test_fp12_adds_no_error_to_bfloat16() -> None:
    """The scale of A's rows is in B: their product is that of the bfloat16 weights."""
    adapter = random_adapter()
    layout = plan_rank_blocks(WIDE_SITES, {(0, "o_proj"): 19}, 8192, is_fp12=True)
    buffer = torch.empty(layout.num_elements, dtype=torch.bfloat16)
    pack_rank_blocks(adapter, layout, buffer)
    change = torch.zeros(64, 256)
    for block in layout.blocks[0, "o_proj"]:
        a = read_fp12(buffer, block.a_offset, block.num_ranks, 256)
        size = block.num_ranks * 64
        b = buffer[block.b_offset : block.b_offset + size].view(block.num_ranks, 64).float()
        change += b.t() @ a
    module = adapter.modules[0]
    served = (module.b * module.scale).bfloat16().float() @ module.a.bfloat16().float()
    assert (change - served).norm() < 1e-6 * served.norm()


def test_a_row_whose_largest_weight_is_rounded_up_keeps_it() -> None:
    """Just below a power of two in float32, and that power in bfloat16."""
    adapter = random_adapter()
    adapter.modules[0].a[0, 7] = 7.9999
    layout = plan_rank_blocks(WIDE_SITES, {(0, "o_proj"): 19}, 8192, is_fp12=True)
    buffer = torch.empty(layout.num_elements, dtype=torch.bfloat16)
    pack_rank_blocks(adapter, layout, buffer)
    assert read_fp12(buffer, layout.blocks[0, "o_proj"][0].a_offset, 16, 256)[0, 7] == 1.0


def test_fp12_takes_three_quarters_and_whole_octets() -> None:
    ranks = {(0, "o_proj"): 19}
    dense = plan_rank_blocks(WIDE_SITES, ranks, 8192)
    packed = plan_rank_blocks(WIDE_SITES, ranks, 8192, is_fp12=True)
    assert dense.num_weights == 19 * (256 + 64)
    assert packed.num_weights == 24 * 256 * 3 // 4 + 19 * 64
    for block, next_block in pairwise(packed.blocks[0, "o_proj"]):
        assert next_block.a_offset != block.a_offset


@pytest.mark.parametrize("size", [1e20, 1e30])
def test_rows_outside_the_range_of_fp12_are_refused(size: float) -> None:
    adapter = random_adapter(size=size)
    layout = plan_rank_blocks(WIDE_SITES, {(0, "o_proj"): 19}, 8192, is_fp12=True)
    with pytest.raises(AdapterRefused, match="too large"):
        pack_rank_blocks(adapter, layout, torch.empty(layout.num_elements, dtype=torch.bfloat16))


def test_negligible_rows_become_zeros() -> None:
    adapter = random_adapter(size=1e-36)
    layout = plan_rank_blocks(WIDE_SITES, {(0, "o_proj"): 19}, 8192, is_fp12=True)
    buffer = torch.empty(layout.num_elements, dtype=torch.bfloat16)
    pack_rank_blocks(adapter, layout, buffer)
    assert not read_fp12(buffer, layout.blocks[0, "o_proj"][0].a_offset, 16, 256).any()
