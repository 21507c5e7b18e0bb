from __future__ import annotations

import asyncio

import pytest

from loramux.engine.calls import PendingCalls
from loramux.engine.messages import Answer, describe_error
from loramux.errors import AdapterNotFound, EngineStopped


def test_answers_find_their_own_question_in_any_order() -> None:
    async def ask() -> None:
        calls = PendingCalls()
        (first_id, first), (second_id, second) = calls.open(), calls.open()
        calls.answer(Answer(call_id=second_id))
        calls.answer(Answer(call_id=99))
        assert (await second).call_id == second_id and not first.done()
        calls.answer(Answer(call_id=first_id, error=describe_error(AdapterNotFound("gone"))))
        with pytest.raises(AdapterNotFound, match="gone"):
            await first

    asyncio.run(ask())


def test_a_dead_engine_fails_all_questions() -> None:
    async def ask() -> None:
        calls = PendingCalls()
        futures = [calls.open()[1] for _ in range(3)]
        futures[0].cancel()
        calls.fail(EngineStopped("dead"))
        for future in futures[1:]:
            with pytest.raises(EngineStopped):
                await future

    asyncio.run(ask())
