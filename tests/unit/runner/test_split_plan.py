from __future__ import annotations

from loramux.runner.split_plan import halves, join
from loramux.types.request import TokenLogprob
from loramux.types.step import Chunk, StepPlan, StepResult
from tests.device_factory import row


def test_the_middle_chunk_is_split_and_samples_in_its_second_half() -> None:
    following = Chunk(2, (9,), 0, [1], (), sample=row())
    whole = Chunk(
        1, (1, 2, 3, 4, 5), 10, [0], (), row(), prompt_logprobs=0, next_prompt_token_ids=(2, 3, 4)
    )
    first, second = halves(StepPlan((whole, following)))
    (before,), (after, last) = first.chunks, second.chunks
    assert (before.token_ids, before.start, before.sample) == ((1, 2, 3), 10, None)
    assert (after.token_ids, after.start) == ((4, 5), 13) and after.sample is whole.sample
    assert (before.next_prompt_token_ids, after.next_prompt_token_ids) == ((2, 3, 4), ())
    assert last is following


def test_every_token_is_in_exactly_one_half() -> None:
    for sizes in ([1, 1], [2], [1, 5, 1], [7, 1], [1, 1, 1]):
        chunks = [Chunk(i, tuple(range(n)), 0, [], (), None) for i, n in enumerate(sizes)]
        first, second = halves(StepPlan(tuple(chunks)))
        assert first.num_tokens == sum(sizes) // 2
        assert first.num_tokens + second.num_tokens == sum(sizes)


def test_prompt_logprobs_of_a_split_chunk_are_concatenated() -> None:
    parts = [TokenLogprob(n, -1.0, 1) for n in range(3)]
    joined = join(
        StepResult({1: [4]}, {1: [parts[0]]}, {7: parts[:2]}),
        StepResult({7: [5]}, {}, {7: parts[2:]}),
    )
    assert joined.token_ids == {1: [4], 7: [5]}
    assert joined.prompt_logprobs == {7: parts}
