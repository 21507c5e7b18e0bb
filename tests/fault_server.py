"""A web server on a thread that serves files or proxies another server, and fails on demand."""

from __future__ import annotations

import hashlib
import http.client
import re
import ssl
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar, Self
from urllib.parse import unquote, urlsplit

HOP_HEADERS = {"connection", "transfer-encoding", "content-length", "date", "server"}
RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of the next request with this method and end of the path."""

    method: str = "GET"
    path_end: str = ""
    answer: Answer | None = None
    """The status to send instead of the real one."""
    cut_at: int | None = None
    """The number of body bytes after which the connection is closed."""
    is_silent: bool = False
    """Whether the server never replies."""
    headers: dict[str, str] = field(default_factory=dict)
    """Headers that replace those of the real response."""


@dataclass(frozen=True, slots=True)
class Seen:
    method: str
    path: str
    headers: dict[str, str]


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores disconnected clients, which these tests cause on purpose."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class FaultServer:
    def __init__(
        self,
        files: dict[str, bytes] | None = None,
        *,
        upstream: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Serve `files` by path without the first slash."""
        self.files = files if files is not None else {}
        self.headers: dict[str, str] = {"Accept-Ranges": "bytes"}
        """Headers that are sent with every file."""
        self.has_etags = True
        self.faults: list[Fault] = []
        self.seen: list[Seen] = []
        self._upstream = upstream
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._is_silent = threading.Event()
        handler = type("BoundHandler", (Handler,), {"owner": self})
        self._server = QuietServer(("127.0.0.1", 0), handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.host = f"127.0.0.1:{self._server.server_address[1]}"
        self.url = f"http://{self.host}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def wait_for_silence(self, timeout_s: float) -> bool:
        """Blocks until a request has arrived that gets no reply."""
        return self._is_silent.wait(timeout_s)

    def requests(self, method: str, path_end: str = "") -> list[Seen]:
        return [
            seen for seen in self.seen if seen.method == method and seen.path.endswith(path_end)
        ]

    def respond(self, seen: Seen, body: bytes) -> tuple[Answer, Fault]:
        with self._lock:
            self.seen.append(seen)
            fault = next(
                (
                    fault
                    for fault in self.faults
                    if fault.method == seen.method
                    and urlsplit(seen.path).path.endswith(fault.path_end)
                ),
                None,
            )
            if fault is not None:
                self.faults.remove(fault)
        if fault is not None and fault.is_silent:
            self._is_silent.set()
            self._closing.wait()
        if fault is not None and fault.answer is not None:
            return fault.answer, fault
        answer = self.forward(seen, body) if self._upstream else self.answer(seen)
        return answer, fault or Fault()

    def answer(self, seen: Seen) -> Answer:
        path = unquote(urlsplit(seen.path).path).removeprefix("/")
        if path not in self.files:
            return Answer(status=404)
        return self.serve(self.files[path], seen)

    def serve(self, content: bytes, seen: Seen) -> Answer:
        etag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
        headers = {**self.headers, **({"ETag": etag} if self.has_etags else {})}
        wanted = RANGE.fullmatch(seen.headers.get("range", ""))
        is_current = seen.headers.get("if-range", etag) == etag
        if wanted is None or not is_current or "Accept-Ranges" not in headers:
            return Answer(headers=headers, body=content)
        start = int(wanted[1])
        end = min(int(wanted[2] or len(content)), len(content) - 1)
        headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
        return Answer(status=206, headers=headers, body=content[start : end + 1])

    def forward(self, seen: Seen, body: bytes) -> Answer:
        """Forward a request with the same Host, which a signature covers."""
        assert self._upstream is not None
        connection = http.client.HTTPConnection(self._upstream.removeprefix("http://"))
        try:
            connection.putrequest(seen.method, seen.path, skip_host=True, skip_accept_encoding=True)
            for name, value in seen.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body or None)
            reply = connection.getresponse()
            content = reply.read()
        finally:
            connection.close()
        headers = {
            name: value for name, value in reply.getheaders() if name.lower() not in HOP_HEADERS
        }
        if seen.method == "HEAD":
            headers["Content-Length"] = reply.getheader("Content-Length", "0")
        return Answer(status=reply.status, headers=headers, body=content)


class Handler(BaseHTTPRequestHandler):
    owner: ClassVar[FaultServer]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self.rfile.read(int(headers.get("content-length", 0)))
        answer, fault = self.owner.respond(Seen(self.command, self.path, headers), body)
        sent = {"content-length": str(len(answer.body))}
        sent |= {name.lower(): value for name, value in answer.headers.items()}
        sent |= {name.lower(): value for name, value in fault.headers.items()}
        try:
            self.send_response(answer.status)
            for name, value in sent.items():
                if value:
                    self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body[: fault.cut_at])
        except OSError:
            # The client has disconnected.
            self.close_connection = True
        if fault.cut_at is not None or not sent["content-length"]:
            self.close_connection = True

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def log_message(self, *_: object) -> None:
        pass
