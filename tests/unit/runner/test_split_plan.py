from __future__ import annotations

from loramux.runner.split_plan import halves, join, without_drafts
from loramux.types.pooling import Pooling
from loramux.types.request import TokenLogprob
from loramux.types.step import Chunk, NextTokens, Rows, StepPlan, StepResult
from tests.chunk_factory import make_chunk
from tests.device_factory import row


def test_the_middle_chunk_is_split_and_samples_in_its_second_half() -> None:
    following = make_chunk(2, (9,), 0, [1], (), sample=row())
    whole = make_chunk(1, (1, 2, 3, 4, 5), 10, [0], (), row(), following=(2, 3, 4))
    first, second = halves(StepPlan((whole, following)))
    (before,), (after, last) = first.chunks, second.chunks
    assert (before.token_ids, before.start) == ((1, 2, 3), 10)
    assert (after.token_ids, after.start) == ((4, 5), 13)
    assert before.rows == (Rows(0, 3, NextTokens((2, 3, 4), 0)),)
    assert after.rows == (Rows(1, 1, whole.rows[-1].use),)
    assert last is following


def test_every_token_is_in_exactly_one_half() -> None:
    for sizes in ([1, 1], [2], [1, 5, 1], [7, 1], [1, 1, 1]):
        chunks = [make_chunk(i, tuple(range(n)), 0, [], (), None) for i, n in enumerate(sizes)]
        first, second = halves(StepPlan(tuple(chunks)))
        assert first.num_tokens == sum(sizes) // 2
        assert first.num_tokens + second.num_tokens == sum(sizes)


def test_prompt_logprobs_of_a_split_chunk_are_concatenated() -> None:
    parts = [TokenLogprob(n, -1.0, 1) for n in range(3)]
    joined = join(
        StepResult({1: [4]}, {1: [parts[0]], 7: parts[:2]}),
        StepResult({7: [5]}, {7: parts[2:]}),
    )
    assert joined.accepted == {1: [4], 7: [5]}
    assert joined.logprobs == {1: [parts[0]], 7: parts}


def test_pooled_rows_are_split_at_the_same_token() -> None:
    chunk = Chunk(1, (1, 2, 3, 4, 5), 10, [0], (), (Rows(0, 5, Pooling.MEAN),))
    before, after = halves(StepPlan((chunk,)))
    assert before.chunks[0].rows == (Rows(0, 2, Pooling.MEAN),)
    assert after.chunks[0].rows == (Rows(0, 3, Pooling.MEAN),)
    last = Chunk(1, (1, 2, 3), 0, [0], (), (Rows(2, 1, Pooling.LAST),))
    assert [plan.chunks[0].rows for plan in halves(StepPlan((last,)))] == [
        (),
        (Rows(1, 1, Pooling.LAST),),
    ]


def test_drafts_are_left_out_with_the_rows_after_them() -> None:
    rows = tuple(Rows(i, 1, row()) for i in (0, 1, 2))
    drafted = Chunk(1, (4, 5, 6), 7, [0], (), rows, num_sampled=3)
    other = make_chunk(2, (9,), 0, [1], sample=row())
    plain, same = without_drafts(StepPlan((drafted, other))).chunks
    assert plain == Chunk(1, (4,), 7, [0], (), rows[:1], 1)
    assert same is other
