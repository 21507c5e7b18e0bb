from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

from loramux.kernels.gpu.lora_augmented import ops as augmented_gpu
from loramux.kernels.reference import lora_augmented as augmented_reference
from tests.augmented_factory import TILE, make_augmented_world  # noqa: E402
from tests.lora_factory import Selection, random_rows  # noqa: E402

O_PROJ = 1
ROWS: list[Selection] = [((0, 1.0),)] * 17 + [((1, 1.0),)]


def test_what_stands_behind_the_last_record_changes_nothing() -> None:
    """Records are read before it is known how many there are: those of earlier steps remain."""
    world = make_augmented_world([{"o_proj": 3}, {"o_proj": 16}], augmented_reference)
    world.step(ROWS, TILE)
    tables = world.at(1, O_PROJ, TILE).tables
    tables.records[:, int(tables.work[2]) :] = torch.iinfo(torch.int32).max
    x, _ = random_rows(len(ROWS), O_PROJ)
    actual = augmented_gpu.expand(world.product(x, 1, O_PROJ), world.at(1, O_PROJ, TILE))
    expected = world.expected(x, ROWS, 1, O_PROJ)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_parts_are_summed_before_they_are_rounded(num_parts: int) -> None:
    world = make_augmented_world(
        [{"o_proj": 3}, {"o_proj": 16}], augmented_reference, dtype=torch.float16
    )
    world.step(ROWS, TILE)
    x, _ = random_rows(len(ROWS), O_PROJ, dtype=torch.float16)
    y = world.parts(x, 1, O_PROJ, num_parts) if num_parts > 1 else world.product(x, 1, O_PROJ)
    # In place, where y is one part.
    expected = augmented_reference.expand(y.clone(), world.at(1, O_PROJ, TILE))
    actual = augmented_gpu.expand(y, world.at(1, O_PROJ, TILE))
    torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)
