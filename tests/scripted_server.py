"""A real HTTP server that answers each request with the next reply of a script, however broken."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Scripted:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    pieces: tuple[bytes, ...] | None = None
    """Sent as HTTP chunks, in place of a body."""
    cut: bool = False
    """Close the connection before the reply is whole."""
    endless: bool = False
    """Repeat the last piece until the client goes away."""


@dataclass(frozen=True)
class Received:
    method: str
    path: str
    headers: dict[str, str]
    fields: dict[str, Any]


class ThreadPerConnection(ThreadingHTTPServer):
    request_queue_size = 256
    # Handler threads must end with the test, or a later one would see their errors.
    daemon_threads = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore lost connections: a client that hangs up is part of many tests."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class ScriptedServer:
    def __init__(self, port: int = 0) -> None:
        self.replies: deque[Scripted] = deque()
        self.received: list[Received] = []
        self.connections: list[socket.socket] = []
        self.client_left = threading.Event()
        self.answer: Callable[[Received], Scripted] = lambda request: self.replies.popleft()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                owner.connections.append(self.connection)

            def handle_request(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                request = Received(
                    self.command,
                    self.path,
                    {name.lower(): value for name, value in self.headers.items()},
                    json.loads(body) if body else {},
                )
                owner.received.append(request)
                owner.send(self, owner.answer(request))

            do_GET = do_POST = handle_request

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.http = ThreadPerConnection(("127.0.0.1", port), Handler)
        self.port = self.http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def send(self, handler: BaseHTTPRequestHandler, reply: Scripted) -> None:
        handler.close_connection = handler.close_connection or reply.cut
        handler.send_response(reply.status)
        for name, value in reply.headers.items():
            handler.send_header(name, value)
        if reply.pieces is None:
            handler.send_header("Content-Length", str(len(reply.body) + reply.cut))
            handler.end_headers()
            handler.wfile.write(reply.body)
            return
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for piece in reply.pieces:
            self._write_chunk(handler, piece)
        if reply.endless:
            self._write_until_gone(handler, reply.pieces[-1])
        elif not reply.cut:
            self._write_chunk(handler, b"")

    def hang_up(self) -> None:
        """End idle connections too, as a process that exits does."""
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _write_until_gone(self, handler: BaseHTTPRequestHandler, piece: bytes) -> None:
        handler.close_connection = True
        try:
            while True:
                self._write_chunk(handler, piece)
        except OSError:
            self.client_left.set()

    def _write_chunk(self, handler: BaseHTTPRequestHandler, piece: bytes) -> None:
        handler.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        handler.wfile.flush()


@contextmanager
def scripted_server(*replies: Scripted, port: int = 0) -> Iterator[ScriptedServer]:
    server = ScriptedServer(port)
    server.replies.extend(replies)
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        thread.join()
        server.hang_up()
        server.http.server_close()


def reply_json(value: object, status: int = 200, **headers: str) -> Scripted:
    return Scripted(
        status,
        json.dumps(value).encode(),
        {"Content-Type": "application/json"}
        | {name.replace("_", "-"): text for name, text in headers.items()},
    )


def reply_error(
    status: int, message: str = "no", param: str | None = None, **headers: str
) -> Scripted:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": status}
    return reply_json({"error": error}, status, **headers)


def reply_events(*pieces: bytes, cut: bool = False, endless: bool = False) -> Scripted:
    headers = {"Content-Type": "text/event-stream"}
    return Scripted(headers=headers, pieces=pieces, cut=cut, endless=endless)


def event(value: object) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"data: {text}\n\n".encode()


DONE = event("[DONE]")


def chat_chunk(
    text: str | None = None, finish: str | None = None, *, index: int = 0, model: str = "base"
) -> dict[str, Any]:
    choice = {"index": index, "delta": {"content": text}, "finish_reason": finish}
    return {"id": "chat-1", "object": "chat.completion.chunk", "model": model, "choices": [choice]}


def completion_chunk(text: str, finish: str | None = None, *, index: int = 0) -> dict[str, Any]:
    choice = {"index": index, "text": text, "finish_reason": finish}
    return {"id": "cmpl-1", "object": "text_completion", "model": "base", "choices": [choice]}


def usage_chunk(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    total = prompt_tokens + completion_tokens
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": total,
    }
    return {"id": "chat-1", "model": "base", "choices": [], "usage": usage}


def chat_reply(text: str, finish: str = "stop", **fields: Any) -> Scripted:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return reply_json({"id": "chat-1", "model": "base", "choices": [choice], **fields})


def completion_reply(text: str, finish: str = "stop") -> Scripted:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return reply_json({"id": "cmpl-1", "model": "base", "choices": [choice]})


def model_list(base: str, adapters: Iterable[str]) -> Scripted:
    cards = [{"id": base, "object": "model", "root": "/models/base", "parent": None}]
    cards += [{"id": name, "object": "model", "root": name, "parent": base} for name in adapters]
    return reply_json({"object": "list", "data": cards})
