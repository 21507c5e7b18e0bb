from __future__ import annotations

import torch

from loramux.runner.decode_inputs import DecodeInputs
from loramux.types.step import UNKNOWN_TOKEN
from tests.chunk_factory import make_chunk

CPU = torch.device("cpu")


def test_rows_are_filled_from_the_front_and_padded() -> None:
    inputs = DecodeInputs(max_rows=5, max_sequences=5, max_pages=3, num_lora_words=7, device=CPU)
    inputs.begin()
    chunks = [
        make_chunk(0, (11,), 4, [8, 2], ()),
        make_chunk(1, (12,), 0, [5], ()),
        make_chunk(2, (13,), 40, [1, 9, 7], ()),
    ]
    inputs.host_lora_words[:7] = range(7)
    inputs.fill(chunks, [0.0, 0.5, 1.5], [0.0, 0.25, 1 - 2**-53])
    inputs.send()
    assert inputs.token_ids(5).tolist() == [11, 12, 13, 0, 0]
    assert inputs.num_tokens[:5].tolist() == [5, 1, 41, 0, 0]
    assert inputs.temperatures[:4].tolist() == [0.0, 0.5, 1.5, 0.0]
    assert inputs.noise[:4].tolist() == [0.0, 0.25, 1 - 2**-53, 0.0]
    assert inputs.lora_words[:7].tolist() == list(range(7))
    table = torch.full((5, 3), -1, dtype=torch.int32)
    inputs.pages.write_table(table)
    assert table[0, :2].tolist() == [8, 2]
    assert table[1, :1].tolist() == [5]
    assert table[2].tolist() == [1, 9, 7]


def test_a_smaller_step_has_no_values_of_a_larger_one() -> None:
    inputs = DecodeInputs(max_rows=3, max_sequences=3, max_pages=1, num_lora_words=1, device=CPU)
    chunks = [make_chunk(i, (20 + i,), i, [i], ()) for i in range(3)]
    for _ in range(2):
        inputs.begin()
        inputs.fill(chunks, [1.0] * 3, [0.5] * 3)
        inputs.send()
    inputs.begin()
    inputs.fill(chunks[:1], [0.0], [0.0])
    inputs.send()
    assert inputs.num_tokens[:3].tolist() == [1, 0, 0]
    assert inputs.temperatures[:3].tolist() == [0.0, 0.0, 0.0]


def test_an_unknown_token_is_gathered_from_the_last_step() -> None:
    inputs = DecodeInputs(max_rows=3, max_sequences=20, max_pages=1, num_lora_words=1, device=CPU)
    inputs.token_buffer.store(torch.tensor([70, 71, 72]))
    inputs.token_buffer.publish([5, 6, 7])
    chunks = [
        make_chunk(7, (UNKNOWN_TOKEN,), 4, [0], ()),
        make_chunk(8, (20,), 0, [1], ()),
        make_chunk(5, (UNKNOWN_TOKEN,), 2, [2], ()),
    ]
    inputs.begin()
    inputs.fill(chunks, [0.0] * 3, [0.0] * 3)
    inputs.send()
    assert inputs.token_ids(3).tolist() == [72, 20, 70]
    # The next step's own tokens stand where this one had others'.
    inputs.begin()
    inputs.fill(chunks[1:2], [0.0], [0.0])
    inputs.send()
    assert inputs.token_ids(3).tolist() == [20, 0, 0]
