"""Clients that hold connections of a server: idle ones, slow readers, and bodies without an end.

    python -m tests.storm URL IDLE SLOW ENDLESS

Half of the idle connections have sent a part of a request. A slow reader has asked for the largest
documents of the server and reads a few bytes a second. Connections that the server ends are opened
again. The program prints a line when all are open, and ends when its input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

OPEN = "open"
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Ty"
LARGE = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 8
ENDLESS = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b'Transfer-Encoding: chunked\r\n\r\n17\r\n{"prompt": "hi", "x": "\r\n'
)
CHUNK = b"1000\r\n" + b"x" * 4096 + b"\r\n"
RECEIVE_BUFFER = 4096
PAUSE_S = 1.0
OPENED_AT_ONCE = 100


class Attack:
    """One connection that is opened again whenever the server ends it."""

    def __init__(self, address: tuple[str, int], hold: Callable[[socket.socket], Awaitable[None]]):
        self._address = address
        self._hold = hold
        self.was_open = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with socket.socket() as connection, contextlib.suppress(OSError):
                connection.setblocking(False)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
                await loop.sock_connect(connection, self._address)
                self.was_open.set()
                await self._hold(connection)
            await asyncio.sleep(PAUSE_S)


async def hold_idle(connection: socket.socket) -> None:
    await asyncio.get_running_loop().sock_recv(connection, 1)


async def hold_half_sent(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, HALF)
    await loop.sock_recv(connection, 1)


async def read_slowly(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, LARGE)
    while await loop.sock_recv(connection, 64):
        await asyncio.sleep(PAUSE_S)


async def send_for_ever(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, ENDLESS)
    while True:
        await loop.sock_sendall(connection, CHUNK)
        await asyncio.sleep(PAUSE_S)


async def attack(url: str, num_idle: int, num_slow: int, num_endless: int) -> None:
    parts = urlsplit(url)
    address = (parts.hostname or "", parts.port or 80)
    holds = [
        *([hold_idle, hold_half_sent] * (num_idle // 2)),
        *([read_slowly] * num_slow),
        *([send_for_ever] * num_endless),
    ]
    attacks = [Attack(address, hold) for hold in holds]
    tasks = []
    for start in range(0, len(attacks), OPENED_AT_ONCE):
        some = attacks[start : start + OPENED_AT_ONCE]
        tasks += [asyncio.create_task(one.run()) for one in some]
        await asyncio.gather(*(one.was_open.wait() for one in some))
    print(OPEN, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for task in tasks:
        task.cancel()


@contextmanager
def storm(url: str, num_idle: int, num_slow: int, num_endless: int) -> Iterator[None]:
    """Hold connections from another process, all of which were open at the start."""
    numbers = map(str, (num_idle, num_slow, num_endless))
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.storm", url, *numbers],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    with process:
        try:
            assert process.stdout.readline().strip() == OPEN
            yield
        finally:
            process.stdin.close()


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(attack(sys.argv[1], *map(int, sys.argv[2:5])))
