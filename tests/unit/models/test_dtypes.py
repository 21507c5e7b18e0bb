from __future__ import annotations

import pytest
import torch

from loramux.errors import UnsupportedModel
from loramux.models import dtypes
from loramux.models.dtypes import SMALL_MODEL, features_in, resolve_dtype


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("float32", torch.float32), ("float16", torch.float16), ("bfloat16", torch.bfloat16)],
)
def test_named_dtypes_are_taken_as_they_are(name: str, dtype: torch.dtype) -> None:
    for num_parameters in (10**6, 10**10):
        assert resolve_dtype(name, "cpu", num_parameters=num_parameters) == dtype


def test_unknown_dtype_names_the_choices() -> None:
    with pytest.raises(UnsupportedModel, match="'int8'.*auto, bfloat16"):
        resolve_dtype("int8", num_parameters=1)


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ({"amx_bf16", "avx512_bf16"}, torch.bfloat16),
        ({"avx512_bf16"}, torch.bfloat16),
        ({"neon", "bf16", "i8mm"}, torch.bfloat16),
        ({"sve_bf16"}, torch.bfloat16),
        ({"avx512_f", "avx2"}, torch.float32),
        ({"neon", "dot"}, torch.float32),
        ({"bf16"}, torch.float32),
    ],
    ids=lambda value: " ".join(sorted(value)) if isinstance(value, set) else str(value),
)
def test_auto_on_cpu_follows_the_processor(
    monkeypatch: pytest.MonkeyPatch, features: set[str], expected: torch.dtype
) -> None:
    monkeypatch.setattr(dtypes, "cpu_features", lambda: frozenset(features))
    assert resolve_dtype("auto", "cpu", num_parameters=10**9) == expected
    assert resolve_dtype("auto", "cpu", num_parameters=SMALL_MODEL) == torch.float32
    for num_parameters in (1, 10**9):
        assert resolve_dtype("auto", "cuda", num_parameters=num_parameters) == torch.bfloat16


def test_this_processor_can_be_asked() -> None:
    found = resolve_dtype("auto", "cpu", num_parameters=10**9)
    assert found in (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(
    ("cpuinfo", "features"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx512_bf16\n\nprocessor\t: 1\n", {"fpu", "avx512_bf16"}),
        ("processor\t: 0\nFeatures\t: fp bf16 i8mm svebf16\n", {"fp", "bf16", "i8mm", "svebf16"}),
        ("", set()),
    ],
    ids=["x86", "arm", "empty"],
)
def test_features_are_read_from_cpuinfo_where_torch_cannot_tell(
    cpuinfo: str, features: set[str]
) -> None:
    assert features_in(cpuinfo) == features
