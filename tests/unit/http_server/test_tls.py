"""HTTPS with certificates that are replaced, and certificates of clients."""

from __future__ import annotations

import asyncio
import logging
import ssl
from contextlib import suppress
from pathlib import Path

import pytest

from loramux.config.connections import ConnectionConfig
from loramux.errors import InvalidRequest
from loramux.http_server.tls import Certificates
from tests.certificates import Authority
from tests.unit.http_server.serving import Serving, serve_and


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=authority.certificate)


def test_requests_are_answered_over_tls_and_others_are_not(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("localhost")

    async def work(server: Serving) -> bytes:
        answer = await server.get(tls=trusting(authority))
        plain = await server.connect()
        await plain.send(b"GET / HTTP/1.1\r\n\r\n")
        assert b"200" not in await plain.read_to_end()
        with pytest.raises(ssl.SSLCertVerificationError):
            await server.get(tls=ssl.create_default_context())
        return answer

    answer = serve_and(work, ssl_certfile=str(certificate), ssl_keyfile=str(key))
    assert answer.startswith(b"HTTP/1.1 200")


def test_a_client_that_begins_no_handshake_is_left(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path).issue("localhost")

    async def work(server: Serving) -> bytes:
        return await (await server.connect()).read_to_end()

    settings = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    assert serve_and(work, header_timeout_s=0.2, **settings) == b""


def test_new_connections_get_a_replaced_certificate_and_open_ones_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    certificate, key = old.issue("localhost")

    async def work(server: Serving) -> None:
        client = await server.connect(trusting(old))
        fresh_certificate, fresh_key = new.issue("localhost")
        fresh_key.replace(key)
        # Half of the files are new: the old pair stays.
        assert (await server.get(tls=trusting(old))).startswith(b"HTTP/1.1 200")
        fresh_certificate.replace(certificate)
        assert (await server.get(tls=trusting(new))).startswith(b"HTTP/1.1 200")
        with pytest.raises(ssl.SSLCertVerificationError):
            await server.get(tls=trusting(old))
        await client.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await client.reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")

    with caplog.at_level(logging.WARNING):
        serve_and(work, ssl_certfile=str(certificate), ssl_keyfile=str(key))
    assert "old one stays" in caplog.text


def test_clients_must_show_a_certificate_of_the_authorities_that_are_given(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("localhost")
    known = trusting(authority)
    known.load_cert_chain(*authority.issue("client"))

    async def work(server: Serving) -> bytes:
        client = await server.connect(trusting(authority))
        with suppress(OSError):
            await client.send(b"GET / HTTP/1.1\r\n\r\n")
            assert await client.reader.read() == b""
        return await server.get(tls=known)

    answer = serve_and(
        work,
        ssl_certfile=str(certificate),
        ssl_keyfile=str(key),
        ssl_ca_certs=str(authority.certificate),
    )
    assert answer.startswith(b"HTTP/1.1 200")


def test_a_key_with_a_password_is_opened_by_it(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path).issue("localhost", password="secret")
    files = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    assert Certificates(ConnectionConfig(**files, ssl_keyfile_password="secret")).context()
    for password in (None, "wrong"):
        with pytest.raises(InvalidRequest, match="cannot be used") as caught:
            Certificates(ConnectionConfig(**files, ssl_keyfile_password=password))
        assert caught.value.param == "ssl_certfile"


def test_files_that_are_missing_or_no_certificates_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    for path in (tmp_path / "text", tmp_path / "missing"):
        with pytest.raises(InvalidRequest, match="cannot be used"):
            Certificates(ConnectionConfig(ssl_certfile=str(path)))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"ssl_keyfile": "k"}, "ssl_keyfile"),
        ({"ssl_ca_certs": "c"}, "ssl_ca_certs"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 2}, "ssl_cert_reqs"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(
    settings: dict[str, object], named: str
) -> None:
    with pytest.raises(InvalidRequest, match=named) as caught:
        ConnectionConfig(**settings)  # type: ignore[arg-type]
    assert caught.value.param == named


def test_the_first_answer_does_not_wait_for_another_handshake(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("localhost")

    async def work(server: Serving) -> None:
        silent = [await server.connect() for _ in range(20)]
        assert (await server.get(tls=trusting(authority))).startswith(b"HTTP/1.1 200")
        assert len(silent) == 20
        await asyncio.sleep(0)

    serve_and(work, ssl_certfile=str(certificate), ssl_keyfile=str(key))
