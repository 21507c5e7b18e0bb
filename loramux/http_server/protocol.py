"""uvicorn's HTTP protocol with limits of headers, bodies and time."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from loramux.http_server.error_body import encode_error
from loramux.http_server.lingering import MAX_UNREAD_S, LingeringTransport
from loramux.http_server.table import Connections, Place

BODY_GRACE_S = 5.0
# Asks a client that sends no more whether it still reads: all clients skip interim answers.
STILL_THERE = b"HTTP/1.1 100 Continue\r\n\r\n"
DEFAULT_PORTS = {b"http": b":80", b"https": b":443"}
Headers = Sequence[tuple[bytes, bytes]]
FIRST_LOOK_S, LOOK_S = 0.05, 1.0


class _Phase(Enum):
    """What the client sends now."""

    NOTHING = auto()
    HEADERS = auto()
    BODY = auto()


class _HeadersRefused(Exception):
    """Ends the parser; the answer is kept by the protocol."""


class GuardedProtocol(HttpToolsProtocol):
    """One connection; its time limits are checked by the table of connections."""

    def __init__(self, connections: Connections, place: Place, **given: Any) -> None:
        super().__init__(**given)
        self._table = connections
        self._place = place
        self._limits = connections.config
        self._phase = _Phase.HEADERS
        self._since = self._checked_at = self.loop.time()
        self._num_headers = self._header_bytes = self._body_bytes = 0
        self._unparsed_bytes = 0
        self._refusal: bytes | None = None
        self._unsent = 0
        self._unsent_since = 0.0

    # Events of the connection

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._lingering = LingeringTransport(
            transport,
            is_sending=lambda: self._phase is _Phase.BODY,
            on_linger=self._begin_lingering,
        )
        self.transport = self._lingering  # type: ignore[assignment]
        self._table.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.discard(self)
        self._place.release()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            self._lingering.discard(len(data))
            return
        if self._phase is _Phase.NOTHING:
            self._begin_headers()
        before = self._header_bytes, self._body_bytes
        super().data_received(data)
        is_parsed = (self._header_bytes, self._body_bytes) != before
        # The parser keeps the beginning of a header until it ends, that of a trailer too.
        self._unparsed_bytes = 0 if is_parsed else self._unparsed_bytes + len(data)
        if self._unparsed_bytes > self._limits.max_header_size:
            self._refuse(answer(431, f"A header has over {self._limits.max_header_size} bytes."))

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection of a client that waits for its answer and has sent all it will.

        One that is gone has sent the same; it resets the connection when it is written to. An
        answer that has begun ends at once, as nothing may be written between its parts.
        """
        is_waiting = self._phase is _Phase.NOTHING and not self._is_answered
        if self._lingering.is_lingering:
            return False
        if not is_waiting or self.cycle.response_started or self.scope["scheme"] == "https":
            return False
        if self.scope["http_version"] != "1.1":
            return False
        self.transport.write(STILL_THERE)
        self.loop.call_later(FIRST_LOOK_S, self._look)
        return True

    def _look(self) -> None:
        """End the connection if the client has reset it, which no reading would tell."""
        if self.transport.is_closing():
            return
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        elif self._is_answered:
            self.transport.close()
        else:
            self.loop.call_later(LOOK_S, self._look)

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no valid request; uvicorn calls it."""
        self._refuse(self._refusal or answer(400, "The bytes are no valid HTTP request."))

    def shutdown(self) -> None:
        """Close the connection when uvicorn ends the server: clients that still send are not waited
        for.
        """
        if self._is_answered:
            self._lingering.close_now()
        else:
            super().shutdown()

    def resume_writing(self) -> None:
        self._unsent_since = self.loop.time()
        super().resume_writing()

    # Events of the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._phase is not _Phase.HEADERS:
            self._begin_headers()

    def on_url(self, url: bytes) -> None:
        self._add_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._add_header(len(name) + len(value))
        # A proxy has checked the headers alone: trailers would add to them behind its back.
        if self._phase is _Phase.HEADERS:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        fault = target_fault(self.url, self.headers, self.parser.get_http_version())
        if fault is not None:
            self._refusal = answer(400, fault)
            raise _HeadersRefused
        self._phase, self._since = _Phase.BODY, self.loop.time()
        self._body_bytes = self._lingering.unread_bytes = 0
        self._table.set_idle(self, False)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self.cycle is not None and self.cycle.response_complete:
            self._lingering.discard(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._phase = _Phase.NOTHING
        super().on_message_complete()
        self._note_idle()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note_idle()

    # Limits

    def check(self, now: float) -> None:
        """End the connection if its client is too slow."""
        elapsed_s, self._checked_at = now - self._checked_at, now
        if self._is_unread(now) or (
            self._lingering.is_lingering and now - self._since > MAX_UNREAD_S
        ):
            self.transport.abort()
        elif self.transport.is_closing():
            pass
        elif self._phase is _Phase.HEADERS:
            if self._is_answered and now - self._since > self._limits.header_timeout_s:
                self._end(answer(408, "The headers took too long.") if self._has_begun else b"")
        elif self._phase is _Phase.BODY:
            if self.flow.read_paused:
                # The server does not read now: not the client's time.
                self._since += elapsed_s
            else:
                self._check_body(now - self._since)

    def close_idle(self) -> None:
        self.transport.abort()

    @property
    def _is_answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _check_body(self, seconds: float) -> None:
        if self._is_answered:
            if seconds > MAX_UNREAD_S:
                self.transport.abort()
            return
        rate, after_s = self._limits.min_body_rate, seconds - BODY_GRACE_S
        is_slow = rate > 0 and after_s > 0 and self._body_bytes < rate * after_s
        if not is_slow and seconds <= self._limits.body_timeout_s:
            return
        self._fail(answer(408, "The body took too long."))

    def _is_unread(self, now: float) -> bool:
        """Whether the client has read nothing for too long of what waits for it."""
        before, unsent = self._unsent, self.transport.get_write_buffer_size()
        self._unsent = unsent
        if unsent < before or not before:
            self._unsent_since = now
        return unsent > 0 and now - self._unsent_since > self._limits.write_timeout_s

    def _begin_headers(self) -> None:
        self._phase, self._since = _Phase.HEADERS, self.loop.time()
        self._num_headers = self._header_bytes = 0

    def _add_header(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        if self._num_headers > self._limits.max_headers:
            what = f"more than {self._limits.max_headers} headers"
        elif self._header_bytes > self._limits.max_header_size:
            what = f"more than {self._limits.max_header_size} bytes of headers"
        else:
            return
        self._refusal = answer(431, f"The request has {what}.")
        raise _HeadersRefused

    def _note_idle(self) -> None:
        self._table.set_idle(self, self._phase is _Phase.NOTHING and self._is_answered)

    @property
    def _has_begun(self) -> bool:
        """Whether the client has sent a part of a request."""
        return self._header_bytes + self._unparsed_bytes > 0

    def _refuse(self, last: bytes) -> None:
        """Answer a request that cannot be parsed, and discard the rest of it."""
        if not self.transport.is_closing() and self._may_answer:
            self.transport.write(last)
            self._lingering.linger()
        else:
            self.transport.abort()

    def _begin_lingering(self) -> None:
        self._since = self.loop.time()
        self._table.set_idle(self, True)
        self.flow.resume_reading()
        if not self._is_answered:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _fail(self, last: bytes) -> None:
        """End the connection with an answer, unless another one has begun."""
        if self._may_answer:
            self._end(last)
        else:
            self.transport.abort()

    def _end(self, last: bytes) -> None:
        """Send an answer that ends the connection."""
        if not self.transport.is_closing():
            self.transport.write(last)
            self._lingering.close_now()

    @property
    def _may_answer(self) -> bool:
        return self._is_answered or not self.cycle.response_started


def target_fault(target: bytes, headers: Headers, version: str) -> str | None:
    """Return why it is not certain which host a request is for; None: it is.

    A proxy and this server could take such a request for requests to two hosts.
    """
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1:
        return "The request has several Host headers. Send one."
    if not hosts and version != "1.0":
        return "The request has no Host header. Send one."
    if target.startswith(b"/") or target == b"*":
        return None
    scheme, separator, rest = target.lower().partition(b"://")
    if not separator or scheme not in DEFAULT_PORTS:
        return "The target of a request is a path, such as /v1/models."
    authority, port = re.split(rb"[/?#]", rest, maxsplit=1)[0], DEFAULT_PORTS[scheme]
    if hosts and authority.removesuffix(port) != hosts[0].strip().lower().removesuffix(port):
        return "The target of the request names another host than its Host header."
    return None


def answer(status: int, message: str, **headers: str) -> bytes:
    """Return an error in the own API's shape, for requests that reach no route."""
    body = encode_error(status, message)
    lines = [
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        b"connection: close",
        *(f"{name.replace('_', '-')}: {value}".encode() for name, value in headers.items()),
    ]
    return STATUS_LINE[status] + b"\r\n".join(lines) + b"\r\n\r\n" + body
