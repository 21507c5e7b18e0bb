from __future__ import annotations

import torch

from loramux.runner.batch import build_batch, half_filled_pages, selected_rows
from loramux.types.step import Chunk
from tests.chunk_factory import make_chunk
from tests.device_factory import row

CPU = torch.device("cpu")


def chunk(start: int, num_tokens: int, page_ids: list[int]) -> Chunk:
    return make_chunk(0, list(range(num_tokens)), start, page_ids, ())


def test_rows_are_in_chunk_order() -> None:
    batch = build_batch([chunk(5, 2, [1, 2]), chunk(0, 3, [3])], CPU)
    assert batch.positions.tolist() == [5, 6, 0, 1, 2]
    assert [list(batch.rows(i)) for i in (0, 1)] == [[0, 1], [2, 3, 4]]
    assert batch.num_rows == 5


def test_pages_that_a_step_starts_but_does_not_fill_are_cleared() -> None:
    cases = {
        "begins and leaves a rest": (chunk(0, 6, [7, 8]), [8]),
        "fills both to the end": (chunk(0, 8, [7, 8]), []),
        "goes on in a begun page": (chunk(5, 2, [7, 8]), []),
        "decode begins a page": (chunk(4, 1, [7, 8]), [8]),
        "decode inside a page": (chunk(6, 1, [7, 8]), []),
        "ends one and begins the next": (chunk(2, 3, [7, 8]), [8]),
    }
    for name, (piece, expected) in cases.items():
        assert half_filled_pages([piece], block_tokens=4) == expected, name


def test_the_rows_that_are_read_are_selected_if_others_are_not() -> None:
    """A row too few is a wrong token, a row too many is time."""
    inner, last = chunk(0, 5, [1]), make_chunk(1, [1, 2, 3], 4, [2], (), sample=row())
    decode = make_chunk(2, [1], 8, [3], (), sample=row())
    asks = make_chunk(3, [1, 2], 0, [4], (), row(), following=[2])
    cases = {
        "inner parts alone": ([inner], []),
        "one of many rows": ([inner, last], [7]),
        "in the order of the rows": ([decode, inner, last], [0, 8]),
        "decodes alone": ([decode, decode], None),
        "nearly all rows": ([*[decode] * 6, last], None),
        "beside scored rows": ([inner, asks], [5, 6]),
        "scored rows of most": ([asks, asks], None),
    }
    for name, (chunks, expected) in cases.items():
        assert selected_rows(build_batch(chunks, CPU)) == expected, name
