"""A load generator: clients with open connections that send request after request.

Its processes only store what arrives and when; the answers are parsed after the last one is
complete. An event costs a process about 30 us, parsing included, so that four of them read 16,000
tokens per second at an eighth of a core each.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self, cast
from urllib.parse import urlsplit

from benchmarks.lib.raw_stream import LAST_CHUNK, join_chunks, read_events

TOKEN_EVENT = re.compile(rb'"choices":\[\{')
LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)
Body = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer; times are seconds of this machine's monotonic clock."""

    sent_s: float
    finished_s: float
    token_s: list[float]
    """Arrival of each event that carries text; empty for an answer that is not streamed."""
    num_tokens: int
    text: str


class LoadGenerator:
    """Processes that share the clients of a load."""

    def __init__(self, url: str, *, limit_s: float, num_processes: int | None = None) -> None:
        self._url = url
        self._limit_s = limit_s
        self._num_processes = num_processes or max(1, min(4, (os.cpu_count() or 1) // 4))
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(self._num_processes, mp_context=spawn)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown()

    def ask(self, bodies: Sequence[Body], num_clients: int) -> list[Reply]:
        """Send the bodies from `num_clients` connections; return the replies in their order."""
        count = min(self._num_processes, num_clients)
        parts = [
            self._pool.submit(
                run_load,
                self._url,
                bodies[number::count],
                len(range(number, num_clients, count)),
                self._limit_s,
            )
            for number in range(count)
        ]
        replies: list[Reply | None] = [None] * len(bodies)
        for number, part in enumerate(parts):
            replies[number::count] = part.result()
        return [reply for reply in replies if reply is not None]


def run_load(url: str, bodies: Sequence[Body], num_clients: int, limit_s: float) -> list[Reply]:
    """Send the bodies from `num_clients` connections; return the replies in the bodies' order."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_run(url, bodies, num_clients, limit_s))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed; None is asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _same(client: Client) -> Client:
    return client


async def _run(url: str, bodies: Sequence[Body], num_clients: int, limit_s: float) -> list[Reply]:
    address = urlsplit(url)
    loop = asyncio.get_running_loop()
    requests = iter(enumerate(_request(address.netloc, body) for body in list(bodies)))
    exchanges: dict[int, Exchange] = {}
    clients = [Client(requests, exchanges, loop.create_future()) for _ in range(num_clients)]
    assert address.hostname is not None and address.port is not None
    for client in clients:
        await loop.create_connection(partial(_same, client), address.hostname, address.port)
    # A collection during the run would appear as latency of the server.
    gc.collect()
    gc.disable()
    try:
        for client in clients:
            client.send_next()
        await asyncio.wait_for(asyncio.gather(*(client.done for client in clients)), limit_s)
    finally:
        gc.enable()
        for client in clients:
            client.close()
    return [exchanges[number].reply() for number in range(len(bodies))]


def _request(host: str, body: Body) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


class Exchange:
    """A request that was sent, and the pieces of its answer with their times."""

    def __init__(self) -> None:
        self.sent_s = time.perf_counter()
        self._times: list[float] = []
        self._pieces: list[bytes] = []
        self._ending = b""
        self._num_missing: int | None = None

    def take(self, data: bytes) -> bool:
        """Store a piece of the answer; return whether the answer is complete."""
        self._times.append(time.perf_counter())
        self._pieces.append(data)
        if len(self._pieces) == 1 and (length := LENGTH.search(data)) is not None:
            self._num_missing = data.index(b"\r\n\r\n") + 4 + int(length[1])
        if self._num_missing is not None:
            self._num_missing -= len(data)
            return self._num_missing <= 0
        self._ending = (self._ending + data)[-len(LAST_CHUNK) :]
        return self._ending == LAST_CHUNK

    def reply(self) -> Reply:
        received = b"".join(self._pieces)
        head, _, content = received.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if status != 200:
            raise RuntimeError(f"the server answered {status}: {content.decode(errors='replace')}")
        text, num_tokens = _parse_answer(head, content)
        return Reply(
            sent_s=self.sent_s,
            finished_s=self._times[-1],
            token_s=list(self._token_times()),
            num_tokens=num_tokens,
            text=text,
        )

    def _token_times(self) -> Iterator[float]:
        if self._num_missing is not None:
            return
        for piece, now in zip(self._pieces, self._times, strict=True):
            for _ in TOKEN_EVENT.finditer(piece):
                yield now


def _parse_answer(head: bytes, content: bytes) -> tuple[str, int]:
    if b"transfer-encoding: chunked" not in head.lower():
        answer = json.loads(content)
        return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]
    answer = read_events(200, join_chunks(content).decode())
    if not answer.is_whole or answer.num_tokens is None:
        raise RuntimeError(f"a stream ended early: {answer.error or answer.finish_reason}")
    return answer.text, answer.num_tokens


class Client(asyncio.Protocol):
    """One connection, which takes its next request when the answer to the last is complete."""

    def __init__(
        self,
        requests: Iterator[tuple[int, bytes]],
        exchanges: dict[int, Exchange],
        done: asyncio.Future[None],
    ) -> None:
        self._requests = requests
        self._exchanges = exchanges
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self.done = done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def send_next(self) -> None:
        number, request = next(self._requests, (0, b""))
        if not request:
            self.done.set_result(None)
            return
        assert self._transport is not None
        self._exchange = self._exchanges[number] = Exchange()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        if self._exchange is not None and self._exchange.take(data):
            self._exchange = None
            self.send_next()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(f"the server closed a connection: {error}"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
