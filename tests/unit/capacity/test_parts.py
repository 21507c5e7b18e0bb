"""Sizes by the kinds of parts equal what the packings of the pool take, for any parts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loramux.adapters.packed.extras import MODEL_LEVEL, ExtraKind, ExtraSpec
from loramux.adapters.packed.image import mapped_buffer
from loramux.adapters.packed.packing import DensePacking, PagedPacking
from loramux.capacity.parts import (
    FULL_WEIGHT,
    LOW_RANK,
    base_token_bytes,
    full_module_warnings,
    measure_adapter,
    plan_layout,
)
from loramux.capacity.plan import Budgets, Fleet, PlannedBase
from loramux.capacity.planner import plan_memory
from loramux.errors import DoesNotFit, InvalidRequest
from loramux.types.model import BaseModelInfo, PackingKind
from tests.linear_specs import specs_of

WIDTHS = {"q": (128, 128), "k": (128, 64), "v": (128, 64), "o": (128, 128)}
WIDTHS |= {"gate": (128, 256), "up": (128, 256), "down": (256, 128)}
SHAPES = BaseModelInfo(
    name="base",
    architecture="LlamaForCausalLM",
    num_layers=2,
    linears=specs_of({f"{name}_proj": widths for name, widths in WIDTHS.items()}),
    num_kv_heads=2,
    head_dim=32,
    vocab_size=300,
    num_parameters=1_000_000,
)
FUSED = {"qkv": 256, "o": 128, "gate_up": 512, "down": 128}
HEAD = ExtraSpec(MODEL_LEVEL, "lm_head", ExtraKind.WEIGHT, 300, 128)


def planned(dtype: str, packing: PackingKind) -> PlannedBase:
    return PlannedBase(name="base", shapes=SHAPES, dtype=dtype, packing=packing)


def vectors() -> st.SearchStrategy[ExtraSpec]:
    return st.builds(
        lambda layer, module, kind: ExtraSpec(layer, module, kind, 1, FUSED[module]),
        st.integers(0, 1),
        st.sampled_from(list(FUSED)),
        st.sampled_from([ExtraKind.GAIN, ExtraKind.BIAS]),
    )


def tables() -> st.SearchStrategy[ExtraSpec]:
    modules = st.sampled_from(["embed_tokens", "lm_head"])
    weight = st.builds(
        lambda module, rows: ExtraSpec(MODEL_LEVEL, module, ExtraKind.WEIGHT, rows, 128),
        modules,
        st.integers(300, 340),
    )
    low_rank = st.builds(
        lambda module, rank: ExtraSpec(MODEL_LEVEL, module, ExtraKind.LOW_RANK_A, rank, 128),
        modules,
        st.integers(1, 40),
    )
    rows = st.builds(
        lambda module, ids: ExtraSpec(
            MODEL_LEVEL, module, ExtraKind.ROWS, len(ids), 128, tuple(sorted(ids))
        ),
        modules,
        st.sets(st.integers(0, 299), min_size=1, max_size=50),
    )
    return st.one_of(weight, low_rank, rows)


RANKS = st.dictionaries(
    st.tuples(st.integers(0, 1), st.sampled_from([p.name for p in SHAPES.projections])),
    st.integers(1, 40),
    max_size=10,
)
EXTRAS = st.lists(st.one_of(vectors(), tables()), max_size=6, unique_by=lambda spec: spec.key)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@given(ranks=RANKS, extras=EXTRAS)
def test_a_planned_adapter_is_what_the_pool_takes(
    dtype: str, ranks: dict[tuple[int, str], int], extras: list[ExtraSpec]
) -> None:
    packings: tuple[PackingKind, ...] = ("dense", "paged")
    for kind in packings:
        base = planned(dtype, kind)
        sites, element = SHAPES.linears, getattr(torch, dtype)
        packing = (
            DensePacking(sites, element, base.page_bytes)
            if kind == "dense"
            else PagedPacking(sites, element, base.page_bytes, mapped_buffer)
        )
        layout = packing.plan(ranks, extras)
        assert plan_layout(base, ranks, extras) == layout
        measured = measure_adapter(base, "a", ranks, extras)
        assert measured.num_bytes == layout.num_elements * element.itemsize
        assert measured.num_pages(base) == -(-layout.num_elements // base.page_width)
        weights = sum(part.bytes for part in measured.parts)
        gaps = sum(stop - start for start, stop in layout.gaps)
        assert weights == (layout.num_elements - gaps) * element.itemsize
        assert measured.rank == layout.max_rank


def test_a_step_reads_one_row_of_an_embedding_and_the_whole_head() -> None:
    base = planned("float32", "dense")
    embedding = ExtraSpec(MODEL_LEVEL, "embed_tokens", ExtraKind.WEIGHT, 300, 128)
    rank = 4
    low_rank = (
        ExtraSpec(MODEL_LEVEL, "embed_tokens", ExtraKind.LOW_RANK_A, 300, rank),
        ExtraSpec(MODEL_LEVEL, "embed_tokens", ExtraKind.LOW_RANK_B, rank, 128),
    )
    ranks = {(0, "q_proj"): 8}
    found = measure_adapter(base, "a", ranks, [embedding, HEAD, *low_rank])
    read = {part.kind: (part.modules, part.token_bytes // 4) for part in found.parts}
    assert read == {
        LOW_RANK: (1, 8 * 256),
        FULL_WEIGHT: (2, 128 + 300 * 128),
        "low rank of embedding or head": (1, rank + rank * 128),
    }
    assert base_token_bytes(base) == (1_000_000 - 300 * 128) * 4


def test_a_full_module_is_named_with_its_cost() -> None:
    base = planned("float32", "dense")
    plain = measure_adapter(base, "plain", {(0, "q_proj"): 8})
    assert list(full_module_warnings(base, plain)) == []
    [warning] = full_module_warnings(base, measure_adapter(base, "big", {}, [HEAD]))
    assert "big replaces the full weight of 1 module: 0.1 MiB of its 0.2 MiB" in warning
    assert "0.6 times an adapter of rank 16" in warning
    assert "4.0% of what it reads of the base" in warning


def test_measured_adapters_take_turns_in_a_plan() -> None:
    base = planned("float32", "paged")
    plain = measure_adapter(base, "plain", {(0, "q_proj"): 8})
    big = measure_adapter(base, "big", {(0, "q_proj"): 8}, [HEAD])
    fleet = Fleet(num_adapters=5, measured=(plain, big))
    plan = plan_memory(base, fleet, Budgets(device_bytes=2**20, host_bytes=2**20))
    assert [(size.name, size.count, size.pages) for size in plan.sizes] == [
        ("plain", 3, plain.num_pages(base)),
        ("big", 2, big.num_pages(base)),
    ]
    needed = 3 * plain.num_bytes + 2 * big.num_bytes
    assert plan.tier("host").needed_bytes == needed
    assert plan.sizes[1].parts == list(big.parts)
    with pytest.raises(InvalidRequest, match="rank"):
        Fleet(num_adapters=5)


def test_a_row_that_is_larger_than_a_page_is_refused() -> None:
    wide = ExtraSpec(0, "gate_up", ExtraKind.GAIN, 1, 10**6)
    with pytest.raises(DoesNotFit, match="gate_up"):
        measure_adapter(planned("float32", "dense"), "a", {}, [wide])
