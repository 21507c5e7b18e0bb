"""HTTP to the replicas, behind one function: status, headers and undecoded bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import aiohttp
from aiohttp import ClientTimeout
from yarl import URL

Headers = list[tuple[bytes, bytes]]
# Less than the servers keep an idle connection (loramux 30 s, uvicorn 5 s).
_KEEP_IDLE_S = 4
_CONNECT_S = 2.0


class Unreachable(Exception):
    """No byte of an answer came: the connection was refused or lost."""

    def __init__(self, message: str, *, was_sent: bool = True) -> None:
        super().__init__(message)
        self.was_sent = was_sent
        """Whether the replica may have received the request."""


class ClosedIdle(Unreachable):
    """The replica closed a connection before it answered: it may have been idle for too long."""


class Broken(Exception):
    """The connection was lost after the answer had begun."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Headers
    _response: aiohttp.ClientResponse

    def header(self, name: bytes) -> str:
        return next(iter(self.values(name)), "")

    def values(self, name: bytes) -> list[str]:
        return [v.decode("latin-1") for n, v in self.headers if n.lower() == name]

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield bytes as they come; raise Broken."""
        try:
            async for chunk in self._response.content.iter_any():
                yield chunk
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Broken(str(error) or type(error).__name__) from error

    async def whole(self, max_bytes: int | None = None) -> bytes:
        """Return the body; raise Broken, also for one that is larger."""
        pieces, size = [], 0
        async for chunk in self.chunks():
            size += len(chunk)
            if max_bytes is not None and size > max_bytes:
                raise Broken(f"the answer has more than {max_bytes} bytes")
            pieces.append(chunk)
        return b"".join(pieces)


class Upstream:
    """Connections to all replicas; used as an asynchronous context."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Upstream:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_IDLE_S)
        self._session = aiohttp.ClientSession(
            auto_decompress=False,
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=ClientTimeout(total=None, sock_connect=_CONNECT_S),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )
        # aiohttp would repeat GET and DELETE by itself, uncounted.
        self._session._retry_connection = False
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._session is not None
        await self._session.close()

    def ask(
        self,
        method: str,
        url: str,
        *,
        headers: Sequence[tuple[str, str]] = (),
        body: bytes | None = None,
        timeout_s: float | None = None,
    ) -> AbstractAsyncContextManager[Answer]:
        """Send a request; raise Unreachable if no answer begins."""
        return self._ask(method, url, list(headers), body, timeout_s)

    @asynccontextmanager
    async def _ask(
        self,
        method: str,
        url: str,
        headers: list[tuple[str, str]],
        body: bytes | None,
        timeout_s: float | None,
    ) -> AsyncIterator[Answer]:
        assert self._session is not None, "enter first"
        timeout = ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S)
        try:
            response = await self._session.request(
                method,
                URL(url, encoded=True),
                data=body,
                headers=headers,
                allow_redirects=False,
                timeout=timeout,
            )
        except aiohttp.ServerDisconnectedError as error:
            raise ClosedIdle(str(error)) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            was_sent = not isinstance(error, aiohttp.ClientConnectorError)
            message = str(error) or type(error).__name__
            raise Unreachable(message, was_sent=was_sent) from error
        try:
            yield Answer(response.status, list(response.raw_headers), response)
        finally:
            # An answer that was not read to its end closes its connection, and so aborts there.
            if response.content.at_eof():
                response.release()
            else:
                response.close()
