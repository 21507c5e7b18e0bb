"""A streamed answer over a raw socket, whose reader controls when bytes are read."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

LAST_CHUNK = b"\r\n0\r\n\r\n"


@dataclass(frozen=True)
class Answer:
    """The received part of an answer."""

    status: int
    text: str
    finish_reason: str | None
    num_tokens: int | None
    is_done: bool
    error: str | None

    @property
    def is_whole(self) -> bool:
        return self.finish_reason is not None and self.is_done and self.error is None


class RawStream:
    """One streaming POST /v1/completions; bytes are received only by read()."""

    def __init__(
        self,
        url: str,
        body: dict[str, Any],
        *,
        receive_buffer: int | None = None,
        api_key: str | None = None,
    ) -> None:
        address = urlsplit(url)
        assert address.hostname and address.port
        self._address = (address.hostname, address.port)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        content = json.dumps({**body, **options}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
            + ("" if api_key is None else f"Authorization: Bearer {api_key}\r\n")
            + "\r\n"
        )
        self._request = head.encode() + content
        self._received = bytearray()
        self._socket = socket.socket()
        self._socket.setblocking(False)
        if receive_buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)

    async def send(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self._socket, self._address)
        await loop.sock_sendall(self._socket, self._request)

    async def read(self, num_bytes: int = 65536) -> bool:
        """Receive some bytes, waiting for them if needed; return False at the end of the answer."""
        piece = await asyncio.get_running_loop().sock_recv(self._socket, num_bytes)
        self._received += piece
        return bool(piece) and not self.is_over

    async def read_all(self) -> None:
        while not self.is_over and await self.read():
            pass

    @property
    def is_over(self) -> bool:
        return self._received.endswith(LAST_CHUNK)

    @property
    def num_bytes(self) -> int:
        return len(self._received)

    def close(self) -> None:
        self._socket.close()

    def answer(self) -> Answer:
        head, _, chunked = bytes(self._received).partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1]) if head else 0
        if b"transfer-encoding: chunked" not in head.lower():
            return Answer(status, "", None, None, False, chunked.decode(errors="replace"))
        return read_events(status, join_chunks(chunked).decode())


def join_chunks(chunked: bytes) -> bytes:
    pieces = []
    while chunked:
        size, _, rest = chunked.partition(b"\r\n")
        length = int(size, 16)
        pieces.append(rest[:length])
        chunked = rest[length + 2 :]
    return b"".join(pieces)


def read_events(status: int, text: str) -> Answer:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    is_done = lines[-1:] == ["[DONE]"]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    choices = [choice for event in events for choice in event.get("choices", ())]
    reasons = [c["finish_reason"] for c in choices if c["finish_reason"] is not None]
    usages = [event["usage"] for event in events if event.get("usage")]
    errors = [event["error"]["message"] for event in events if "error" in event]
    return Answer(
        status=status,
        text="".join(choice["text"] for choice in choices),
        finish_reason=reasons[0] if reasons else None,
        num_tokens=usages[-1]["completion_tokens"] if usages else None,
        is_done=is_done,
        error=errors[0] if errors else None,
    )
