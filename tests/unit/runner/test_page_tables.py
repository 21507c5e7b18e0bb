from __future__ import annotations

import torch

from loramux.runner.host_buffer import HostBuffer
from loramux.runner.page_tables import PageTables
from tests.chunk_factory import make_chunk


def test_page_lists_are_expanded_to_a_table() -> None:
    words = HostBuffer([3, PageTables.most_words(3, 4)], torch.device("cpu"))
    lists = PageTables(words, starts=0, max_pages=4)
    chunks = [make_chunk(i, (1,), 0, pages, ()) for i, pages in enumerate([[8, 2], [5]])]
    words.begin()
    assert lists.fill(chunks).tolist() == [0, 2]
    assert lists.num_words == 3
    words.send(lists.num_words)
    table = torch.full((3, 4), -1, dtype=torch.int32)
    lists.write_table(table)
    assert (table[0, :2].tolist(), table[1, :1].tolist()) == ([8, 2], [5])
