from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loramux.adapters.packed.image import mapped_buffer
from loramux.adapters.packed.packing import PagedPacking
from loramux.errors import DoesNotFit
from loramux.kernels.reference import lora_segmented
from loramux.lora.segmented import (
    DeviceDirectory,
    LoraDevice,
    SegmentedWork,
    decode_work,
    prefill_graph_work,
    prefill_work,
)
from loramux.memory.records import ResidentAdapter
from loramux.types.model import LinearSpec
from loramux.types.request import Selection
from tests.lora_factory import (
    FP12_PAGE_ELEMENTS,
    FP12_SITES,
    NUM_LAYERS,
    PAGE_ELEMENTS,
    SITES,
)
from tests.packing_factory import pack_rank_blocks

CPU = torch.device("cpu")
NAMES = ("q_proj", "v_proj", "o_proj")


def random_adapter(rank: int, sites: Sequence[LinearSpec], generator: torch.Generator) -> Any:
    """As a reader of PEFT folders makes it."""
    shapes = {
        name: (site.in_features, out)
        for site in sites
        for name, out in zip(site.projections, site.out_features, strict=True)
    }
    return SimpleNamespace(
        modules=[
            SimpleNamespace(
                target=SimpleNamespace(layer=layer, projection=name),
                a=torch.randn(rank, size_in, generator=generator) / 4,
                b=torch.randn(size_out, rank, generator=generator) / 4,
                scale=2.0,
            )
            for layer in range(NUM_LAYERS)
            for name in NAMES
            for size_in, size_out in [shapes[name]]
        ]
    )


class World:
    """Adapters a, b, c of ranks 3, 20 and 16 in pages of a pool."""

    def __init__(
        self, *, max_adapters: int = 4, max_blocks: int = 32, is_fp12: bool = False
    ) -> None:
        self.sites, page_width, dtype = SITES, PAGE_ELEMENTS, torch.float32
        if is_fp12:
            self.sites, page_width, dtype = FP12_SITES, FP12_PAGE_ELEMENTS, torch.bfloat16
        packing = PagedPacking(self.sites, dtype, page_width * dtype.itemsize, mapped_buffer)
        self.pool = torch.full((64, page_width), float("nan"), dtype=dtype)
        self.directory = DeviceDirectory(
            self.sites,
            num_layers=NUM_LAYERS,
            max_adapters=max_adapters,
            max_blocks=max_blocks,
            device=CPU,
        )
        self.weights: dict[str, torch.Tensor] = {}
        self._a: dict[str, torch.Tensor] = {}
        self.residents: dict[str, ResidentAdapter] = {}
        generator = torch.Generator().manual_seed(0)
        first = 3
        for cid, rank in (("a", 3), ("b", 20), ("c", 16)):
            adapter = random_adapter(rank, self.sites, generator)
            layout = packing.plan({(i, name): rank for i in range(NUM_LAYERS) for name in NAMES})
            assert layout.is_fp12 == is_fp12
            page_ids = list(range(first, first + layout.num_pages))
            first += layout.num_pages
            pages = self.pool[page_ids[0] : first]
            pack_rank_blocks(adapter, layout, pages.view(-1))
            last = adapter.modules[-1]
            self._a[cid] = last.a
            a, b = (part.to(dtype).float() for part in (last.a, last.scale * last.b))
            self.weights[cid] = a.t() @ b.t()
            self.residents[cid] = ResidentAdapter(cid, layout, page_ids)

    def first_of(self, cid: str) -> torch.Tensor:
        """Return a of site o of the last layer."""
        return self._a[cid]

    def device(self) -> LoraDevice:
        return LoraDevice(
            kernels=lora_segmented,
            directory=self.directory,
            num_layers=NUM_LAYERS,
            pool=self.pool,
            num_sms=1,
        )

    def expected(self, x: torch.Tensor, rows: Sequence[Selection]) -> torch.Tensor:
        """Return the deltas of site o of the last layer."""
        total = torch.zeros(len(rows), self.sites[1].out_features[0])
        for i, selection in enumerate(rows):
            for cid, weight in selection:
                total[i] += weight * x[i] @ self.weights[cid]
        return total


A: Selection = (("a", 1.0),)
BOTH: Selection = (("a", 0.5), ("b", -2.0))


def added(world: World, work: SegmentedWork, x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(x.shape[0], world.sites[1].out_features[0])
    work.shrink(x, NUM_LAYERS - 1, 1)
    work.expand(y, NUM_LAYERS - 1, 1)
    return y


@pytest.mark.parametrize("kind", ["decode", "prefill graph", "prefill"])
@pytest.mark.parametrize("selections", [[A, A, ()], [A, (), BOTH]], ids=["plain", "weighted"])
@pytest.mark.parametrize("is_fp12", [False, True], ids=["float32", "fp12"])
def test_rows_get_their_own_adapters_and_base_rows_none(
    kind: str, selections: list[Selection], is_fp12: bool
) -> None:
    world = World(is_fp12=is_fp12)
    for cid in ("b", "a"):
        world.directory.add(world.residents[cid])
    device = world.device()
    works = {
        "decode": lambda: decode_work(device, 4, use_pdl=False),
        "prefill graph": lambda: prefill_graph_work(device, 8, use_pdl=False),
        "prefill": lambda: prefill_work(device, 4),
    }
    work = works[kind]()
    num_rows = [1, 1, 1] if kind == "decode" else [1, 4, 2]
    work.fill_now(selections, num_rows)
    rows = [s for s, count in zip(selections, num_rows, strict=True) for _ in range(count)]
    x = torch.randn(len(rows), world.sites[1].in_features)
    expected = world.expected(x, rows)
    torch.testing.assert_close(added(world, work, x), expected, atol=1e-4, rtol=1e-4)


def test_tables_that_are_too_small_grow() -> None:
    world = World()
    for resident in world.residents.values():
        world.directory.add(resident)
    work = prefill_work(world.device(), 1)
    selections: list[Selection] = [BOTH, (("c", 1.0),)] * 20
    work.fill_now(selections, [1] * 40)
    x = torch.randn(40, SITES[1].in_features)
    expected = world.expected(x, selections)
    torch.testing.assert_close(added(world, work, x), expected, atol=1e-4, rtol=1e-4)


def test_a_removed_adapter_frees_its_slot_for_the_next() -> None:
    world = World(max_adapters=2)
    world.directory.add(world.residents["a"])
    world.directory.add(world.residents["b"])
    with pytest.raises(DoesNotFit, match="2 slots"):
        world.directory.add(world.residents["c"])
    assert "c" not in world.directory
    world.directory.remove("a")
    assert "a" not in world.directory
    world.directory.add(world.residents["c"])
    work = prefill_work(world.device(), 4)
    work.fill_now([(("c", 1.0),)], [2])
    x = torch.randn(2, SITES[1].in_features)
    expected = world.expected(x, [(("c", 1.0),)] * 2)
    torch.testing.assert_close(added(world, work, x), expected, atol=1e-4, rtol=1e-4)
    world.directory.remove("never there")


def test_rows_of_one_selection_are_adjacent_and_base_rows_come_last() -> None:
    world = World()
    for resident in world.residents.values():
        world.directory.add(resident)
    selections = [(), BOTH, A, (("a", 0.5),), (), A, BOTH]
    ordered = sorted(selections, key=world.directory.order)
    assert ordered[-2:] == [(), ()]
    runs = [s for i, s in enumerate(ordered) if i == 0 or s != ordered[i - 1]]
    assert len(runs) == len(set(runs)) == 4


@pytest.mark.parametrize(
    ("sites", "dtype", "expected"),
    [
        (FP12_SITES, torch.bfloat16, True),
        (FP12_SITES, torch.float32, False),
        (SITES, torch.bfloat16, False),
    ],
    ids=["fp12", "float32", "no blocks"],
)
def test_tables_know_in_which_form_adapters_are(
    sites: tuple[LinearSpec, ...], dtype: torch.dtype, expected: bool
) -> None:
    directory = DeviceDirectory(
        sites, num_layers=NUM_LAYERS, max_adapters=4, max_blocks=32, device=CPU
    )
    device = LoraDevice(
        kernels=lora_segmented,
        directory=directory,
        num_layers=NUM_LAYERS,
        pool=torch.zeros(4, FP12_PAGE_ELEMENTS, dtype=dtype),
        num_sms=1,
    )
    assert decode_work(device, 8, use_pdl=False).tables.is_fp12 is expected
