"""The GPU checks as tests: the engine and every kernel against the torch reference.

Without pytest the same checks run as programs: `python -m tests.gpu.engine_check`,
`python -m tests.gpu.reference_check`, `python -m tests.gpu.kernel_check`,
`python -m tests.gpu.numeric_check` and `python -m tests.gpu.images_check`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from tests.gpu import engine_check, kernel_check, numeric_check, reference_check  # noqa: E402


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return engine_check.write_adapters(tmp_path_factory.mktemp("adapters"), engine_check.SMALL)


def test_greedy_tokens_are_those_of_the_reference(adapters: list[Path]) -> None:
    section = engine_check.check_tokens(adapters, engine_check.SMALL, count=60)
    assert [row[engine_check.DIFFER] for row in section.rows] == [0, 0, 0]


def test_logits_are_near_those_of_the_reference(adapters: list[Path]) -> None:
    section = engine_check.check_logits("small random model", adapters, engine_check.SMALL)
    errors = {str(row["logits"]): float(str(row[engine_check.RELATIVE])) for row in section.rows}
    assert errors["engine in float32"] < 1e-4
    assert errors["engine in bfloat16"] < 1.1 * errors["reference in bfloat16"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_kernel_call_of_mixed_traffic_agrees_with_its_reference(
    dtype: str, tmp_path: Path
) -> None:
    scale = reference_check.SCALE
    folders = engine_check.write_adapters(tmp_path, scale)
    make = partial(engine_check.random_engine, folders, dtype, reference=False, scale=scale)
    check = reference_check.check_traffic(make, partial(engine_check.mixed_requests, count=30))
    assert check.wrong == []
    assert check.num_calls > 0


def test_rows_beside_an_adapter_that_overflows_keep_their_bits(tmp_path: Path) -> None:
    scale = numeric_check.Scale(engine_check.SMALL.shape, "bfloat16")
    assert numeric_check.is_right(numeric_check.check_rows(scale, tmp_path / "rows"))
    assert numeric_check.is_right(numeric_check.check_requests(scale, tmp_path / "requests"))


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_images_are_those_of_a_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers", reason="needs diffusers")
    from tests.gpu import images_check

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert images_check.is_right(images_check.check_family(name))


@pytest.mark.slow
def test_kernels_agree_with_their_reference_in_every_shape_and_dtype() -> None:
    errors = kernel_check.check_all()
    assert {key: e for key, e in errors.items() if e > kernel_check.LIMITS[key[1]]} == {}
