"""Questions to the engine that wait for their own answer."""

from __future__ import annotations

import asyncio
from itertools import count

from loramux.engine.messages import Answer, make_error
from loramux.errors import LoramuxError


class PendingCalls:
    def __init__(self) -> None:
        self._ids = count()
        self._futures: dict[int, asyncio.Future[Answer]] = {}

    def open(self) -> tuple[int, asyncio.Future[Answer]]:
        call_id = next(self._ids)
        future = self._futures[call_id] = asyncio.get_running_loop().create_future()
        return call_id, future

    def answer(self, answer: Answer) -> None:
        future = self._futures.pop(answer.call_id, None)
        if future is None or future.done():
            return
        if answer.error is not None:
            future.set_exception(make_error(answer.error))
        else:
            future.set_result(answer)

    def fail(self, error: LoramuxError) -> None:
        for future in self._futures.values():
            if not future.done():
                future.set_exception(error)
        self._futures.clear()
