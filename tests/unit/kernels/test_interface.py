from __future__ import annotations

import sys

import pytest
import torch

from loramux.kernels import ops as interface
from loramux.kernels.cpu import attention as attention_cpu
from loramux.kernels.cpu import lora as lora_cpu
from loramux.kernels.reference import attention as attention_torch
from loramux.kernels.reference import lora as lora_torch


def test_the_reference_can_be_forced() -> None:
    kernels = interface.select_kernels("cpu", reference=True, dtype=torch.float32)
    assert (kernels.lora, kernels.attention) == (lora_torch, attention_torch)
    assert kernels.fused is None


def test_a_cpu_gets_the_fast_kernels() -> None:
    kernels = interface.select_kernels("cpu", reference=False, dtype=torch.bfloat16)
    assert (kernels.lora, kernels.attention) == (lora_cpu, attention_cpu)
    assert kernels.fused is None


def test_a_cpu_with_numba_gets_the_compiled_kernels_for_float32() -> None:
    pytest.importorskip("numba", reason="no numba on this machine")
    kernels = interface.select_kernels("cpu", reference=False, dtype=torch.float32)
    assert kernels.name == "numba" and kernels.fused is not None


def test_nothing_is_compiled_where_that_is_forbidden() -> None:
    kernels = interface.select_kernels(
        "cpu", reference=False, dtype=torch.float32, may_compile=False
    )
    assert (kernels.lora, kernels.attention, kernels.fused) == (lora_cpu, attention_cpu, None)


def test_a_cpu_without_numba_has_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    for name in [name for name in sys.modules if name.endswith("_numba")]:
        monkeypatch.delitem(sys.modules, name)
        # `from package import module` would find the one that stands there already.
        monkeypatch.delattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2])
    kernels = interface.select_kernels("cpu", reference=False, dtype=torch.float32)
    assert (kernels.lora, kernels.attention) == (lora_cpu, attention_cpu)


@pytest.mark.parametrize(
    ("reference", "twin"), [(lora_torch, lora_cpu), (attention_torch, attention_cpu)]
)
def test_twins_offer_the_same_operations(reference: object, twin: object) -> None:
    names = {"cut_rows", "add_lora"} if reference is lora_torch else {"plan", "write_kv", "attend"}
    assert names <= set(vars(reference)) and names <= set(vars(twin))


def test_slots_follow_a_sequence_over_its_pages() -> None:
    """Catches rows that are stored where an earlier token of the sequence stands."""
    sequences = [interface.SequenceRows(0, 3, 3, [7, 2]), interface.SequenceRows(3, 1, 0, [5])]
    assert interface.kv_slots(sequences, 4) == [4 * 7 + 3, 4 * 2, 4 * 2 + 1, 4 * 5]
