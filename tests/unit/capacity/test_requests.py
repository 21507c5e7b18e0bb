from __future__ import annotations

from typing import Any

import pytest

from loramux.capacity.plan import PROJECTIONS, Budgets, Fleet, parse_dtype, parse_targets
from loramux.errors import InvalidRequest


def test_names_of_targets() -> None:
    assert parse_targets(["v", "q_proj"]) == ("q_proj", "v_proj")
    assert parse_targets(["all-linear"]) == parse_targets(["attention", "mlp"]) == PROJECTIONS
    with pytest.raises(InvalidRequest, match="Did you mean q_proj"):
        parse_targets(["q_prj"])
    with pytest.raises(InvalidRequest, match="targets must be"):
        parse_targets([])
    assert parse_dtype("bf16") == parse_dtype("bfloat16") == "bfloat16"


@pytest.mark.parametrize(
    ("fleet", "budgets", "param"),
    [
        ({"num_adapters": 0}, {}, "adapters"),
        ({"num_adapters": 10**9}, {}, "adapters"),
        ({"ranks": ()}, {}, "rank"),
        ({"ranks": (8, 0)}, {}, "rank"),
        ({"zipf": -1.0}, {}, "zipf"),
        ({"zipf": float("nan")}, {}, "zipf"),
        ({}, {"device_bytes": -1}, "device_memory"),
        ({}, {"host_bytes": 2**80}, "host_memory"),
        ({}, {"adapter_fraction": 0.0}, "adapter_memory_fraction"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(
    fleet: dict[str, Any], budgets: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Fleet(**{"num_adapters": 3, "ranks": (8,), "targets": ("q_proj",), **fleet})
        Budgets(**{"device_bytes": 1, **budgets})
    assert caught.value.param == param
