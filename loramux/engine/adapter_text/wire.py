"""Messages between the server and the processes that interpret files of adapters.

A message is its length in four bytes and its content. That of an answer begins with a letter for
its kind.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from loramux.engine.adapter_text.description import Description
from loramux.errors import InvalidRequest, LoramuxError
from loramux.worker.messages import WireError, decode_error, encode_error

_LENGTH = struct.Struct("<I")
_DESCRIPTION, _IDS, _ERROR = b"D", b"T", b"E"


class Closed(Exception):
    """The other end is gone."""


def send_request(connection: socket.socket, request: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(request)) + request)


def encode_request(fields: Mapping[str, Any]) -> bytes:
    """Raise InvalidRequest for what is not JSON, and RecursionError."""
    try:
        return json.dumps(fields).encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"The messages are not JSON: {error}.", param="messages") from error


def receive(connection: socket.socket, *, limit: int, deadline: float | None = None) -> bytes:
    """Raise Closed, or TimeoutError after the deadline of time.monotonic()."""
    (length,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size, deadline))
    if length > limit:
        raise Closed(f"a message of {length} bytes")
    return _receive_exactly(connection, length, deadline)


def send_description(connection: socket.socket, description: Description) -> None:
    _send(connection, _DESCRIPTION, msgspec.msgpack.encode(description))


def send_ids(connection: socket.socket, token_ids: Sequence[int]) -> None:
    ids = array("I", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    _send(connection, _IDS, ids.tobytes())


def send_error(connection: socket.socket, error: LoramuxError) -> None:
    _send(connection, _ERROR, msgspec.msgpack.encode(encode_error(error)))


def read_description(message: bytes) -> Description:
    _raise_error(message)
    return msgspec.msgpack.decode(message[1:], type=Description)


def read_ids(message: bytes) -> list[int]:
    _raise_error(message)
    ids = array("I", message[1:])
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def _raise_error(message: bytes) -> None:
    if message[:1] == _ERROR:
        raise decode_error(msgspec.msgpack.decode(message[1:], type=WireError))


def _send(connection: socket.socket, kind: bytes, content: bytes) -> None:
    connection.sendall(_LENGTH.pack(1 + len(content)) + kind + content)


def _receive_exactly(connection: socket.socket, length: int, deadline: float | None) -> bytes:
    received = bytearray()
    while len(received) < length:
        if deadline is not None:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            piece = connection.recv(min(length - len(received), 2**20))
        except ConnectionError as error:
            raise Closed(str(error)) from error
        if not piece:
            raise Closed("the connection was closed")
        received += piece
    return bytes(received)
