"""Sends messages over a socket pair as four bytes of length and a msgpack body."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading

import msgspec

from loramux.engine.messages import Command, Reply

_LENGTH = struct.Struct("!I")


class EngineChannel:
    """The engine's end of the channel; it blocks, and several threads may send."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = connection.makefile("rb")
        self._lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Command)

    def receive(self) -> Command | None:
        """Returns the next command; None if the server is gone, after which nothing can be read."""
        command = self._read()
        if command is None:
            self._reader.close()
        return command

    def _read(self) -> Command | None:
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
        command: Command = self._decoder.decode(body)
        return command

    def send(self, reply: Reply) -> None:
        with self._lock:
            body = self._encoder.encode(reply)
            self._connection.sendall(_LENGTH.pack(len(body)) + body)


class ServerChannel:
    """The server's end of the channel, on an event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Reply)

    @classmethod
    async def open(cls, connection: socket.socket) -> ServerChannel:
        return cls(*await asyncio.open_connection(sock=connection))

    async def receive(self) -> Reply | None:
        """Returns the next reply; None if the engine is gone."""
        try:
            head = await self._reader.readexactly(_LENGTH.size)
            (length,) = _LENGTH.unpack(head)
            reply: Reply = self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return reply

    def send(self, command: Command) -> None:
        """Queues a command without waiting; receive() detects a dead engine."""
        if not self._writer.is_closing():
            body = self._encoder.encode(command)
            self._writer.write(_LENGTH.pack(len(body)) + body)

    def close(self) -> None:
        self._writer.close()
