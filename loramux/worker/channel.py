"""Sends messages over a socket pair as four bytes of length and a msgpack body."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from typing import Any

import msgspec

from loramux.worker.messages import Message

_LENGTH = struct.Struct("!I")


class EngineChannel:
    """The engine's end of the channel; it blocks, and several threads may send."""

    def __init__(self, connection: socket.socket, commands: Any) -> None:
        """`commands`: the union of the messages that the engine takes."""
        self._connection = connection
        self._reader = connection.makefile("rb")
        self._lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(commands)

    def receive(self) -> Message | None:
        """Return the next command; None if the server is gone, after which nothing can be read."""
        command = self._read()
        if command is None:
            self.close()
        return command

    def close(self) -> None:
        """End receive(); what is sent still arrives."""
        self._reader.close()

    def _read(self) -> Message | None:
        try:
            head = self._reader.read(_LENGTH.size)
            if len(head) < _LENGTH.size:
                return None
            (length,) = _LENGTH.unpack(head)
            body = self._reader.read(length)
        except ConnectionError:
            # A peer that dies with unread messages resets the connection.
            return None
        if len(body) < length:
            return None
        command: Message = self._decoder.decode(body)
        return command

    def send(self, reply: Message) -> None:
        with self._lock:
            body = self._encoder.encode(reply)
            self._connection.sendall(_LENGTH.pack(len(body)) + body)


class ServerChannel:
    """The server's end of the channel, on an event loop."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, replies: Any
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(replies)

    @classmethod
    async def open(cls, connection: socket.socket, replies: Any) -> ServerChannel:
        """Take the union of the messages that the engine sends as `replies`."""
        return cls(*await asyncio.open_connection(sock=connection), replies)

    async def receive(self) -> Message | None:
        """Return the next reply; None if the engine is gone."""
        try:
            head = await self._reader.readexactly(_LENGTH.size)
            (length,) = _LENGTH.unpack(head)
            reply: Message = self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return reply

    def send(self, command: Message) -> None:
        """Queues a command without waiting; receive() detects a dead engine."""
        if not self._writer.is_closing():
            body = self._encoder.encode(command)
            self._writer.write(_LENGTH.pack(len(body)) + body)

    def close(self) -> None:
        self._writer.close()
