"""tests/gpu/reference_check.py on the GPU kernels in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="no Triton on this machine")

from loramux.engine.engine import Engine  # noqa: E402
from loramux.kernels.gpu import elementwise, sampling
from loramux.kernels.gpu.attention import ops as attention
from loramux.kernels.gpu.gemm import swiglu
from loramux.kernels.gpu.lora import segmented
from loramux.kernels.gpu.lora_augmented import ops as augmented_gpu
from loramux.kernels.ops import DeviceKernels
from loramux.kernels.select import select_device_kernels  # noqa: E402
from loramux.types.request import Request
from tests.device_factory import device_engine, two_adapters  # noqa: E402
from tests.gpu.engine_check import request  # noqa: E402
from tests.gpu.reference_check import ReferenceCheck, check_traffic, section_of  # noqa: E402
from tests.model_factory import tiny_transformers_model  # noqa: E402

# The padding rows of a graph hold stale memory, and are computed like the others.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

COMPILED = {
    "attention.attend",
    "elementwise.add_norm",
    "elementwise.rotate_write",
    "elementwise.activate_mul",
    "sampling.choose_tokens",
}


def interpreted(device: torch.device) -> DeviceKernels:
    """Return the GPU's kernels, where a CPU has their reference."""
    return replace(
        select_device_kernels(device),
        elementwise=elementwise,
        swiglu=swiglu,
        lora=segmented,
        augmented=augmented_gpu,
        sampling=sampling,
    )


def requests(cids: Sequence[str]) -> list[Request]:
    first, second = ((cid, 1.0) for cid in cids)
    selections: tuple[Any, ...] = ((), (first,), (second,), (first, second))
    return [
        request(f"r{number}", range(3, 5 + number), selection, 3)
        for number, selection in enumerate(selections)
    ]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    model = tiny_transformers_model("llama", num_hidden_layers=1, head_dim=64)
    folders = two_adapters(model, tmp_path)

    def engine(augmented_ranks: int, dtype: str = "float32") -> Engine:
        settings: dict[str, Any] = {"max_sequences": 4, "max_batch_tokens": 32, "dtype": dtype}
        settings["lora_augmented_ranks"] = augmented_ranks
        made = device_engine(monkeypatch, model, tmp_path / "model", **settings)[0]
        for folder in folders:
            made.register_adapter(folder)
        return made

    return engine


@pytest.mark.slow
def test_every_kernel_is_compared_and_within_its_limit(make: Any) -> None:
    check = check_traffic(lambda: make(0), requests, interpreted)
    assert check.wrong == []
    assert {"graph", "lora.shrink and expand", "elementwise.add_norm, in place"} <= set(check.worst)
    assert set(check.worst) >= COMPILED
    assert "0 beyond the limit" in section_of(check, "float32").notes[0]


@pytest.mark.slow
def test_16_bit_steps_use_the_kernels_of_large_steps(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []
    launch = attention._launch_decode_tma

    def counted(*args: Any) -> None:
        launched.append(args)
        launch(*args)

    monkeypatch.setattr(attention, "_launch_decode_tma", counted)
    check = check_traffic(lambda: make(0, "float16"), requests, interpreted)
    assert check.wrong == [] and 0 < check.worst["attention.attend"] < 1e-3
    assert check.worst["swiglu.linear_swiglu"] < 1e-3
    assert launched


@pytest.mark.slow
def test_wrong_attention_is_named(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = attention.Plan.attend

    def wrong_first_row(*args: Any) -> torch.Tensor:
        found = attend(*args)
        found[0] *= 1.01
        return found

    monkeypatch.setattr(attention.Plan, "attend", wrong_first_row)
    check = check_traffic(lambda: make(0), requests, interpreted)
    assert check.wrong and all("attention.attend is 1.0e-02" in line for line in check.wrong)
    assert {line.split()[0] for line in check.wrong} == {"decode", "step"}


def test_padding_rows_are_not_compared() -> None:
    check = ReferenceCheck()
    expected = torch.ones(4, 2)
    found = expected.clone()
    found[2:] = float("nan")
    with check.on("step", num_rows=4, num_live=2):
        check.compare("kernel", found, expected)
        check._compare_changes("kernel", found, expected, torch.zeros(4, 2))
    assert check.wrong == [] and check.num_calls == 2
    with check.on("step", num_rows=4, num_live=3):
        check.compare("kernel", found, expected)
    assert len(check.wrong) == 1


@pytest.mark.slow
def test_a_kernel_with_a_wrong_last_row_is_named(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    activate = augmented_gpu.activate_mul

    def wrong_last_row(*args: Any) -> torch.Tensor:
        mixed = activate(*args)
        mixed[-1] *= 1.01
        return mixed

    monkeypatch.setattr(augmented_gpu, "activate_mul", wrong_last_row)
    check = check_traffic(lambda: make(128), requests, interpreted)
    assert check.wrong and all("augmented.activate_mul is 1.0e-02" in line for line in check.wrong)
    assert "augmented" in check.wrong[0]
    assert {"augmented.add_norm", "augmented.rotate_write"} <= set(check.worst)


def test_rows_changed_by_either_are_compared() -> None:
    """A kernel that leaves a row unchanged differs from a reference that changes it."""
    check = ReferenceCheck()
    before = torch.tensor([[1.0, float("nan")], [2.0, 3.0], [4.0, 5.0]])
    check._compare_changes("kernel", before.clone(), before.clone(), before)
    assert check.worst == {}
    expected = before.clone()
    expected[1, 0] = 2.5
    check._compare_changes("kernel", before.clone(), expected, before)
    assert check.worst == {"kernel, in place": pytest.approx(0.2)} and len(check.wrong) == 1


@pytest.mark.parametrize("found", [1.0, float("nan")])
def test_a_nonzero_row_in_place_of_zeros_is_wrong(found: float) -> None:
    """This holds even if all rows are zero."""
    for others in (0.0, 100.0):
        check = ReferenceCheck()
        expected = torch.tensor([[0.0, 0.0], [others, others]])
        check.compare("same", expected.clone(), expected)
        check.compare("kernel", torch.tensor([[found, 0.0], [others, others]]), expected)
        assert check.worst["same"] == 0 and len(check.wrong) == 1
