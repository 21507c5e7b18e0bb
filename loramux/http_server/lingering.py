"""A close that lets the client read the answer before the connection ends.

The kernel resets a connection that is closed with unread data, and a reset drops an answer that the
client has not read yet. So the server ends its side, and discards input within limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

# What a client may still send after the answer.
MAX_UNREAD_BYTES, MAX_UNREAD_S = 2**26, 30.0


class LingeringTransport:
    """A transport whose close() lingers while the client is still sending its request."""

    def __init__(
        self,
        transport: asyncio.Transport,
        *,
        is_sending: Callable[[], bool],
        on_linger: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._is_sending = is_sending
        self._on_linger = on_linger
        self.unread_bytes = 0
        self.is_lingering = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self.is_lingering or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        if not self.is_lingering:
            self._transport.write(data)

    def close(self) -> None:
        if self.is_closing():
            return
        if self._is_sending():
            self.linger()
        else:
            self._transport.close()

    def close_now(self) -> None:
        self._transport.close()

    def linger(self) -> None:
        self.is_lingering = True
        # TLS has no half-closed connections.
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._on_linger()

    def discard(self, num_bytes: int) -> None:
        """Count input after the answer; reset the connection beyond the limit."""
        self.unread_bytes += num_bytes
        if self.unread_bytes > MAX_UNREAD_BYTES:
            self._transport.abort()
