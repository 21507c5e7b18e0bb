from __future__ import annotations

import pytest

from loramux.kernels import attention_cpu, attention_torch, interface, lora_cpu, lora_torch


def test_the_reference_can_be_forced() -> None:
    kernels = interface.select_kernels("cpu", reference=True)
    assert (kernels.lora, kernels.attention) == (lora_torch, attention_torch)


def test_a_cpu_gets_the_fast_kernels() -> None:
    kernels = interface.select_kernels("cpu", reference=False)
    assert (kernels.lora, kernels.attention) == (lora_cpu, attention_cpu)


@pytest.mark.parametrize(
    ("reference", "twin"), [(lora_torch, lora_cpu), (attention_torch, attention_cpu)]
)
def test_twins_offer_the_same_operations(reference: object, twin: object) -> None:
    names = {"cut_rows", "add_lora"} if reference is lora_torch else {"plan", "write_kv", "attend"}
    assert names <= set(vars(reference)) and names <= set(vars(twin))
