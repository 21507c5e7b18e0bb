from __future__ import annotations

import sys

import pytest
import torch

from loramux.errors import UnsupportedModel
from loramux.kernels.cpu import attention as cpu_attention
from loramux.kernels.cpu import lora as cpu_lora
from loramux.kernels.ops import SequenceRows, kv_slots
from loramux.kernels.reference import attention as reference_attention
from loramux.kernels.reference import lora as reference_lora
from loramux.kernels.select import select_device_kernels, select_kernels


def test_reference_can_be_forced() -> None:
    kernels = select_kernels("cpu", reference=True, dtype=torch.float32)
    assert (kernels.lora, kernels.attention) == (reference_lora, reference_attention)
    assert kernels.jit is None


def test_bfloat16_on_a_cpu_uses_torch() -> None:
    kernels = select_kernels("cpu", reference=False, dtype=torch.bfloat16)
    assert (kernels.lora, kernels.attention) == (cpu_lora, cpu_attention)
    assert kernels.jit is None


def test_float32_on_a_cpu_with_numba_uses_compiled_loops() -> None:
    pytest.importorskip("numba", reason="no numba on this machine")
    kernels = select_kernels("cpu", reference=False, dtype=torch.float32)
    assert kernels.name == "numba" and kernels.jit is not None
    assert kernels.attention is kernels.jit.attention


def test_nothing_is_compiled_where_that_is_forbidden() -> None:
    kernels = select_kernels("cpu", reference=False, dtype=torch.float32, may_compile=False)
    assert (kernels.lora, kernels.attention, kernels.jit) == (cpu_lora, cpu_attention, None)


def test_cpu_without_numba_uses_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    package = "loramux.kernels.cpu_jit"
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
        # `from package import module` would find the attribute of the earlier import.
        monkeypatch.delattr(sys.modules[package], name.rpartition(".")[2], raising=False)
    kernels = select_kernels("cpu", reference=False, dtype=torch.float32)
    assert (kernels.lora, kernels.attention) == (cpu_lora, cpu_attention)


def test_device_without_triton_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "loramux.kernels.gpu.attention", None)
    with pytest.raises(UnsupportedModel, match="needs Triton.*--device cpu"):
        select_device_kernels(torch.device("cuda"))


def test_slots_follow_a_sequence_over_its_pages() -> None:
    """Catches rows that are stored in the slot of an earlier token of the sequence."""
    sequences = [SequenceRows(0, 3, 3, [7, 2]), SequenceRows(3, 1, 0, [5])]
    assert kv_slots(sequences, 4) == [4 * 7 + 3, 4 * 2, 4 * 2 + 1, 4 * 5]
