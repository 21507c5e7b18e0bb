from __future__ import annotations

import pytest
import torch

from loramux.runner.products import fastest_products


class Preference:
    """A process's setting, which only a build for CUDA has."""

    def __init__(self) -> None:
        self.name = "default"

    def __call__(self, name: str | None = None) -> str:
        self.name = name or self.name
        return self.name


@pytest.mark.parametrize(
    ("num_rows", "inside"), [(1, "default"), (32, "cublaslt"), (96, "cublaslt"), (256, "default")]
)
def test_a_capture_leaves_no_choice_behind(num_rows: int, inside: str) -> None:
    """Catches a setting of the process that outlives the capture it was made for."""
    prefer = Preference()
    with (
        pytest.raises(ZeroDivisionError),
        fastest_products(num_rows, torch.device("cuda"), prefer),
    ):
        assert prefer.name == inside
        raise ZeroDivisionError
    assert prefer.name == "default"


def test_a_cpu_has_no_such_choice() -> None:
    prefer = Preference()
    with fastest_products(32, torch.device("cpu"), prefer):
        assert prefer.name == "default"
