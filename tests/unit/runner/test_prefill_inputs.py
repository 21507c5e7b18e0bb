from __future__ import annotations

import torch

from loramux.runner.gpu_sampler import SampleInputs
from loramux.runner.prefill_inputs import PrefillInputs, PrefillLimits
from loramux.runner.token_buffer import TokenBuffer
from loramux.types.step import UNKNOWN_TOKEN
from tests.chunk_factory import make_chunk
from tests.device_factory import row

CPU = torch.device("cpu")
LIMITS = PrefillLimits(
    max_tokens=8,
    max_sequences=3,
    max_pages=3,
    block_tokens=4,
    num_items=(2, 1),
    num_lora_words=5,
)


def make_inputs() -> PrefillInputs:
    token_buffer = TokenBuffer(torch.zeros(2 * 3, dtype=torch.int32))
    token_buffer.store(torch.tensor([70, 71]))
    token_buffer.publish([5, 6])
    return PrefillInputs(LIMITS, token_buffer, CPU)


def test_tokens_have_their_positions_and_kv_slots() -> None:
    inputs = make_inputs()
    chunks = [
        make_chunk(9, (11, 12, 13), 3, [2, 7], ()),
        make_chunk(6, (UNKNOWN_TOKEN,), 9, [1, 5, 4], (), sample=row()),
        make_chunk(5, (21, UNKNOWN_TOKEN), 0, [3], (), sample=row()),
    ]
    items = [torch.arange(8, dtype=torch.int32).view(1, 8), torch.ones(1, 8, dtype=torch.int32)]
    inputs.begin()
    inputs.host_lora_words[:5] = range(5)
    inputs.fill(chunks, [3, 5], SampleInputs([0.0, 0.5], [0.0, 0.25], []), items)
    inputs.send()
    assert inputs.token_ids(8).tolist() == [11, 12, 13, 71, 21, 70, 0, 0]
    assert inputs.positions[:8].tolist() == [3, 4, 5, 9, 0, 1, 0, 0]
    assert inputs.slots[:8].tolist() == [11, 28, 29, 17, 12, 13, -1, -1]
    assert inputs.sampled_rows[:3].tolist() == [3, 5, 0]
    assert inputs.temperatures[:3].tolist() == [0.0, 0.5, 0.0]
    assert inputs.noise[:3].tolist() == [0.0, 0.25, 0.0]
    assert inputs.lora_words[:5].tolist() == list(range(5))
    assert [kind.tolist() for kind in inputs.items] == [[list(range(8)), [0] * 8], [[1] * 8]]
    table = torch.full((3, 3), -1, dtype=torch.int32)
    inputs.pages.write_table(table)
    assert (table[0, :2].tolist(), table[1].tolist(), table[2, :1].tolist()) == (
        [2, 7],
        [1, 5, 4],
        [3],
    )


def test_a_smaller_step_has_no_values_of_a_larger_one() -> None:
    inputs = make_inputs()
    large = [make_chunk(i, (30 + i, 40 + i), 4, [i, i], (), sample=row()) for i in range(3)]
    ones = [torch.ones(2, 8, dtype=torch.int32), torch.ones(1, 8, dtype=torch.int32)]
    for _ in range(2):
        inputs.begin()
        inputs.fill(large, [1, 3, 5], SampleInputs([1.0] * 3, [0.5] * 3, []), ones)
        inputs.send()
    inputs.begin()
    none = torch.zeros(0, 8, dtype=torch.int32)
    inputs.fill([make_chunk(0, (50,), 0, [2], ())], [], SampleInputs([], [], []), [none, none])
    inputs.send()
    assert inputs.token_ids(8).tolist() == [50, *[0] * 7]
    assert inputs.slots[:8].tolist() == [8, *[-1] * 7]
    assert inputs.sampled_rows[:3].tolist() == [0, 0, 0] == inputs.temperatures[:3].tolist()
    assert all(not kind.any() for kind in inputs.items)
