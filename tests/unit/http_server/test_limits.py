"""Clients that send too much, too slowly or nothing, on real sockets."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.unit.http_server.serving import GET, Client, Serving, serve_and

CHUNKED = b"POST %b HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"
LENGTH = b"POST %b HTTP/1.1\r\nHost: here\r\nContent-Length: 100000\r\n\r\n"


def exchange(sent: bytes, *, pieces: tuple[bytes, ...] = (), **settings: object) -> bytes:
    """Return all that the server sends until it ends the connection by itself."""

    async def work(server: Serving) -> bytes:
        client = await server.connect()
        await client.send(sent)
        for piece in pieces:
            await client.send(piece)
        answer = await client.read_to_end()
        assert (await server.get()).endswith(b"0\r\n\r\n")
        return answer

    found: bytes = serve_and(work, **settings)
    return found


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def error_of(answer: bytes) -> str:
    return str(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"])


def test_a_connection_without_a_request_is_closed_without_an_answer() -> None:
    assert exchange(b"", header_timeout_s=0.1) == b""


@pytest.mark.parametrize("sent", [b"GET / HT", GET[:-2], b"GET / HTTP/1.1\r\nX: " + b"x" * 50])
def test_half_sent_headers_are_answered_with_408(sent: bytes) -> None:
    assert status_of(exchange(sent, header_timeout_s=0.1)) == 408


def test_the_second_request_of_a_connection_has_a_time_limit_too() -> None:
    assert exchange(GET + GET[:10], header_timeout_s=0.1).count(b"HTTP/1.1 ") == 2


def test_a_connection_between_two_requests_is_closed_after_its_time() -> None:
    assert exchange(GET, keep_alive_s=0.1).count(b"HTTP/1.1 200") == 1


@pytest.mark.parametrize(
    "headers",
    [b"X: 1\r\n" * 20, b"X: " + b"x" * 2000 + b"\r\n", b"X: 1\r\nY: " + b"x" * 100_000 + b"\r\n"],
)
def test_too_many_or_too_large_headers_are_answered_with_431(headers: bytes) -> None:
    sent = GET[:-2] + headers + b"\r\n"
    answer = exchange(sent, max_headers=10, max_header_size=1500)
    assert status_of(answer) == 431 and "header" in error_of(answer)


def test_a_long_url_counts_as_a_header() -> None:
    sent = GET.replace(b" / ", b" /" + b"x" * 5000 + b" ")
    assert status_of(exchange(sent, max_header_size=2000)) == 431


def test_a_header_that_never_ends_is_not_collected() -> None:
    pieces = (b"x" * 2**16,) * 8

    async def work(server: Serving) -> bytes:
        client = await server.connect()
        await client.send(GET[:-2] + b"X: ")
        try:
            for piece in pieces:
                await client.send(piece)
                await asyncio.sleep(0.01)
        except ConnectionError:
            pass
        return await client.read_to_end()

    assert serve_and(work, max_header_size=2**17)[:12] in (b"HTTP/1.1 431", b"")


def test_trailers_that_never_end_are_not_collected() -> None:
    async def work(server: Serving) -> None:
        client = await server.connect()
        await client.send(CHUNKED % b"/" + b"0\r\nX: ")
        with pytest.raises(ConnectionError):
            while True:
                await client.send(b"x" * 2**16)

    serve_and(work, max_header_size=2**17)


def test_a_body_that_is_too_slow_is_answered_with_408() -> None:
    answer = exchange(LENGTH % b"/" + b"x" * 10, body_timeout_s=0.2)
    assert status_of(answer) == 408 and error_of(answer) == "The body took too long."


def test_the_time_of_a_body_does_not_run_while_the_server_reads_nothing() -> None:
    async def work(server: Serving) -> bytes:
        client = await server.connect()
        body = b"x" * 100_000
        await client.send((LENGTH % b"/refused").replace(b"refused", b"held"))
        await client.send(body)
        await server.app.begun.wait()
        await asyncio.sleep(2)
        server.app.released.set()
        return await client.reader.readuntil(b"100000")

    assert status_of(serve_and(work, body_timeout_s=1)) == 200


def test_a_body_that_goes_on_after_the_answer_ends_with_the_connection() -> None:
    async def work(server: Serving) -> bytes:
        client = await server.connect()
        await client.send(CHUNKED % b"/refused")
        answer = await client.reader.readuntil(b"\r\n0\r\n")
        chunk = b"10000\r\n" + b"x" * 2**16 + b"\r\n"
        with pytest.raises(ConnectionError):
            while True:
                await client.send(chunk)
        return answer

    assert status_of(serve_and(work)) == 200


def test_a_client_that_reads_nothing_is_left() -> None:
    async def work(server: Serving) -> None:
        client = await server.connect()
        await client.send(GET.replace(b" / ", b" /endless "))
        await server.app.left.wait()

    serve_and(work, write_timeout_s=0.2)


def test_a_client_that_reads_slowly_is_kept() -> None:
    async def work(server: Serving) -> None:
        client = await server.connect()
        await client.send(GET.replace(b" / ", b" /endless "))
        for _ in range(30):
            await client.reader.readexactly(2**20)
            await asyncio.sleep(0.07)
        assert not server.app.left.is_set()

    serve_and(work, write_timeout_s=1.5)


def test_a_new_connection_closes_the_one_that_was_idle_longest() -> None:
    async def work(server: Serving) -> None:
        idle = [await server.connect() for _ in range(3)]
        assert (await server.get()).startswith(b"HTTP/1.1 200")
        assert await idle[0].read_to_end() == b""
        await idle[2].send(GET)
        assert (await idle[2].reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")

    serve_and(work, max_connections=3)


def test_without_an_idle_connection_a_new_one_is_refused() -> None:
    async def work(server: Serving) -> bytes:
        held = [await held_request(server) for _ in range(2)]
        answer = await server.get()
        server.app.released.set()
        for client in held:
            await client.reader.readuntil(b"0\r\n\r\n")
        return answer

    answer = serve_and(work, max_connections=2)
    # The request may arrive after the socket was closed, and then resets it.
    assert answer == b"" or (status_of(answer), b"retry-after: 1" in answer) == (503, True)


async def held_request(server: Serving) -> Client:
    client = await server.connect()
    server.app.begun.clear()
    await client.send(GET.replace(b" / ", b" /held "))
    await server.app.begun.wait()
    return client


def test_one_address_may_have_a_limit_of_its_own() -> None:
    async def work(server: Serving) -> None:
        first = await server.connect()
        await first.send(GET)
        await first.reader.readuntil(b"0\r\n\r\n")
        assert b"200 OK" not in await server.get()
        first.writer.close()
        while b"200 OK" not in await server.get():
            await asyncio.sleep(0.01)

    serve_and(work, max_connections_per_address=1)


def test_after_descriptors_have_run_out_the_server_accepts_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work(server: Serving) -> bytes:
        loop = asyncio.get_running_loop()
        waiting = socket.socket()
        waiting.setblocking(False)
        with no_descriptors():
            # The kernel accepts the connection, and the listener cannot open it.
            await loop.sock_connect(waiting, ("127.0.0.1", server.port))
            await asyncio.sleep(0.6)
        with waiting:
            await loop.sock_sendall(waiting, GET)
            return await loop.sock_recv(waiting, 12)

    with caplog.at_level(logging.WARNING):
        assert serve_and(work) == b"HTTP/1.1 200"
    assert len(caplog.records) == 1 and "tries again" in caplog.records[0].getMessage()


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Lets this process open nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    taken = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_bytes_that_are_no_request_are_answered_with_400_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work(server: Serving) -> list[bytes]:
        answers = []
        for _ in range(5):
            client = await server.connect()
            await client.send(b"nothing\r\n\r\n")
            answers.append(await client.read_to_end())
        return answers

    answers = serve_and(work)
    assert {status_of(one) for one in answers} == {400}
    assert "no valid HTTP request" in error_of(answers[0])
    assert sum("Invalid HTTP" in one.getMessage() for one in caplog.records) <= 1


def test_requests_that_follow_one_another_without_waiting_are_answered_in_order() -> None:
    async def work(server: Serving) -> bytes:
        client = await server.connect()
        await client.send(GET * 5)
        answers = [await client.reader.readuntil(b"\r\n0\r\n\r\n") for _ in range(5)]
        return b"".join(answers)

    assert serve_and(work).count(b"HTTP/1.1 200") == 5


SLOW = b"POST /slow HTTP/1.1\r\nHost: here\r\nContent-Length: 2\r\n\r\nhi"


def test_a_client_that_sends_no_more_gets_its_answer() -> None:
    async def work(server: Serving) -> bytes:
        client = await server.connect()
        await client.send(SLOW)
        client.writer.write_eof()
        await server.app.begun.wait()
        interim = await client.reader.readuntil(b"\r\n\r\n")
        assert status_of(interim) == 100
        server.app.released.set()
        return await client.read_to_end()

    answer = serve_and(work)
    assert status_of(answer) == 200 and b"2" in answer.partition(b"\r\n\r\n")[2]


def test_the_request_of_a_client_that_is_gone_is_given_up() -> None:
    async def work(server: Serving) -> None:
        client = await server.connect()
        await client.send(SLOW)
        await server.app.begun.wait()
        client.writer.close()
        await server.app.left.wait()

    serve_and(work)


TWO_HOSTS = b"GET / HTTP/1.1\r\nHost: here\r\nHost: there\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (TWO_HOSTS, "several Host headers"),
        (TWO_HOSTS.replace(b"there", b"here"), "several Host headers"),
        (b"GET / HTTP/1.1\r\n\r\n", "no Host header"),
        (GET.replace(b" / ", b" http://there/ "), "another host"),
        (GET.replace(b" / ", b" http://here@there/ "), "another host"),
        (GET.replace(b" / ", b" http://there?here "), "another host"),
        (GET.replace(b" / ", b" ftp://here/ "), "is a path"),
        (b"CONNECT here:80 HTTP/1.1\r\nHost: here:80\r\n\r\n", "is a path"),
    ],
)
def test_a_request_whose_host_is_not_certain_is_refused(sent: bytes, reason: str) -> None:
    answer = exchange(sent + GET)
    assert status_of(answer) == 400 and answer.count(b"HTTP/1.1 ") == 1
    assert reason in error_of(answer)


@pytest.mark.parametrize(
    "sent",
    [
        GET.replace(b" / ", b" http://HERE/ "),
        GET.replace(b" / ", b" http://here:80/path "),
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET http://here/ HTTP/1.0\r\n\r\n",
    ],
)
def test_a_request_with_one_host_is_answered(sent: bytes) -> None:
    assert status_of(exchange(sent, keep_alive_s=0.1)) == 200


def test_trailers_are_dropped() -> None:
    trailers = b"X-API-Key: stolen\r\nOrigin: http://there\r\nX-Tenant: other\r\n"
    body = b"2\r\nhi\r\n0\r\n" + trailers + b"\r\n"
    seen: list[list[tuple[bytes, bytes]]] = []

    async def work(server: Serving) -> bytes:
        client = await server.connect()
        # One request with the trailers in the same packet, one with its body later.
        await client.send(CHUNKED % b"/headers" + body)
        await client.reader.readuntil(b"\r\n0\r\n\r\n")
        await client.send(CHUNKED % b"/headers")
        await client.send(body)
        answer = await client.reader.readuntil(b"\r\n0\r\n\r\n")
        seen.extend(server.app.headers)
        await client.send(GET)
        await client.reader.readuntil(b"\r\n0\r\n\r\n")
        return answer

    assert status_of(serve_and(work)) == 200
    assert seen == [[(b"host", b"here"), (b"transfer-encoding", b"chunked")]] * 2


BODY_BYTES = 20 * 2**20


@pytest.mark.parametrize("connection", [b"close", b"keep-alive"])
def test_a_client_that_sends_all_of_a_refused_body_reads_the_answer(connection: bytes) -> None:
    head = b"POST /refused HTTP/1.1\r\nHost: here\r\nConnection: %b\r\nContent-Length: %d\r\n\r\n"

    async def work(server: Serving) -> bytes:
        client = await server.connect()
        await client.send(head % (connection, BODY_BYTES))
        await server.app.begun.wait()
        await client.send(b"x" * BODY_BYTES)
        # No suppressed ConnectionError, as read_to_end() has: a reset fails the test.
        answer = await client.reader.readuntil(b"\r\n0\r\n\r\n")
        if connection == b"close":
            assert await client.reader.read() == b""
        else:
            await client.send(GET)
            answer = await client.reader.readuntil(b"\r\n0\r\n\r\n")
        return answer

    assert status_of(serve_and(work)) == 200


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST / HTTP/1.1\r\nHost: a\r\nHost: b\r\nContent-Length: %d\r\n\r\n", 400),
        (
            b"POST / HTTP/1.1\r\nHost: a\r\n" + b"X: 1\r\n" * 200 + b"Content-Length: %d\r\n\r\n",
            431,
        ),
    ],
)
def test_a_refusal_of_headers_is_read_by_a_client_that_sends_its_body(
    head: bytes, status: int
) -> None:
    async def work(server: Serving) -> bytes:
        client = await server.connect()
        await client.send(head % BODY_BYTES + b"x" * BODY_BYTES)
        return await client.reader.read()

    assert status_of(serve_and(work)) == status


def test_a_client_that_never_ends_its_refused_body_is_left_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("loramux.http_server.protocol.MAX_UNREAD_S", 0.1)

    async def work(server: Serving) -> bytes:
        client = await server.connect()
        await client.send(
            (LENGTH % b"/refused").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        )
        answer = await client.read_to_end()
        # The server's side is closed; the connection goes when its time has passed.
        while server.server.server_state.connections:
            await asyncio.sleep(0.01)
        return answer

    assert status_of(serve_and(work, body_timeout_s=0.2)) == 200
