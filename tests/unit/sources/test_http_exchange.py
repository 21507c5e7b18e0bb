from __future__ import annotations

import logging
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx2
import pytest

from loramux.errors import SourceForbidden, SourceRefused
from loramux.sources.config import HttpConfig, Secret
from loramux.sources.origins.http import MAX_REDIRECTS, GuardedClient
from tests.fault_server import Answer, Fault, FaultServer
from tests.unit.sources.source_factory import FAST

TOKEN = "token-of-the-first-host"


@contextmanager
def client_for(config: HttpConfig, *addresses: str) -> Iterator[GuardedClient]:
    """With addresses: every name resolves to them."""
    resolvers = {"resolver": lambda *_: addresses} if addresses else {}
    client = GuardedClient(config, FAST, **resolvers)
    try:
        yield client
    finally:
        client.close()


def get(client: GuardedClient, url: str) -> bytes:
    with client.send("GET", url, {}) as response:
        return response.read()


def redirect(location: str, status: int = 302) -> Fault:
    return Fault(answer=Answer(status=status, headers={"Location": location}))


@pytest.fixture
def server() -> Iterator[FaultServer]:
    with FaultServer({"x": b"content"}) as server:
        yield server


@pytest.fixture
def other() -> Iterator[FaultServer]:
    with FaultServer({"x": b"other"}) as server:
        yield server


def test_a_name_is_connected_to_by_the_address_that_was_checked(server: FaultServer) -> None:
    host = server.host.replace("127.0.0.1", "models.test")
    with client_for(HttpConfig(private_hosts=(host,)), "127.0.0.1") as client:
        assert get(client, f"http://{host}/x") == b"content"
    assert server.seen[0].headers["host"] == host


def test_a_name_that_leads_inside_is_refused_before_it_is_asked(server: FaultServer) -> None:
    host = server.host.replace("127.0.0.1", "rebound.test")
    with (
        client_for(HttpConfig(allowed_hosts=(host,)), "127.0.0.1") as client,
        pytest.raises(SourceForbidden, match="private, loopback or link-local"),
    ):
        get(client, f"http://{host}/x")
    assert server.seen == []


def test_a_name_is_looked_up_once_since_a_second_answer_could_be_another(
    server: FaultServer,
) -> None:
    host = server.host.replace("127.0.0.1", "rebinding.test")
    answers = iter([("127.0.0.1",)])
    client = GuardedClient(
        HttpConfig(private_hosts=(host,)), FAST, resolver=lambda *_: next(answers)
    )
    assert get(client, f"http://{host}/x") == b"content"
    client.close()


def test_the_next_address_is_tried_when_one_does_not_answer(server: FaultServer) -> None:
    host = server.host.replace("127.0.0.1", "models.test")
    config = HttpConfig(private_hosts=(host,))
    # Nothing listens there.
    with client_for(config, "127.0.0.2", "127.0.0.1") as client:
        assert get(client, f"http://{host}/x") == b"content"
    with client_for(config, "127.0.0.2") as client, pytest.raises(httpx2.ConnectError):
        get(client, f"http://{host}/x")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_to_allowed_hosts_are_followed(
    server: FaultServer, other: FaultServer, status: int
) -> None:
    server.faults.append(redirect(f"{other.url}/x", status))
    with client_for(HttpConfig(private_hosts=(server.host, other.host))) as client:
        assert get(client, f"{server.url}/x") == b"other"


@pytest.mark.parametrize(
    "location",
    ["http://169.254.169.254/latest/meta-data", "http://localhost/x", "http://[::1]/x"]
    + ["//evil.org/x", "https://evil.org/x"],
)
def test_redirects_to_other_hosts_are_refused(server: FaultServer, location: str) -> None:
    server.faults.append(redirect(location))
    with (
        client_for(HttpConfig(private_hosts=(server.host,))) as client,
        pytest.raises(SourceForbidden, match="not on the list"),
    ):
        get(client, f"{server.url}/x")


def test_a_redirect_to_an_allowed_host_of_the_inside_is_refused(
    server: FaultServer, other: FaultServer
) -> None:
    server.faults.append(redirect(f"{other.url}/x"))
    config = HttpConfig(private_hosts=(server.host,), allowed_hosts=(other.host,))
    with client_for(config) as client, pytest.raises(SourceForbidden) as refused:
        get(client, f"{server.url}/x")
    assert refused.value.code == "private_address"
    assert other.seen == []


@pytest.mark.parametrize(
    "location",
    [
        "",
        "ftp://host/x",
        "file:///etc/passwd",
        "http://u:p@host/x",
        "http://2130706433/",
        "http://[",
    ]
    + ["http://exa mple/"],
)
def test_redirects_that_are_no_plain_urls_are_refused(server: FaultServer, location: str) -> None:
    server.faults.append(redirect(location))
    with (
        client_for(HttpConfig(private_hosts=(server.host,))) as client,
        pytest.raises(SourceRefused) as refused,
    ):
        get(client, f"{server.url}/x")
    assert refused.value.code == "bad_redirect"


def test_an_endless_chain_of_redirects_is_cut(server: FaultServer) -> None:
    server.faults += [redirect("/x")] * 20
    with (
        client_for(HttpConfig(private_hosts=(server.host,))) as client,
        pytest.raises(SourceRefused, match="redirected over 5 times"),
    ):
        get(client, f"{server.url}/x")
    assert len(server.seen) == MAX_REDIRECTS + 1


def test_a_token_goes_to_its_host_and_not_on_to_another(
    server: FaultServer, other: FaultServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server.faults.append(redirect(f"{other.url}/x"))
    config = HttpConfig(
        private_hosts=(server.host, other.host), tokens=((server.host, Secret(TOKEN)),)
    )
    with client_for(config) as client:
        get(client, f"{server.url}/x")
    assert server.seen[0].headers["authorization"] == f"Bearer {TOKEN}"
    assert "authorization" not in other.seen[0].headers
    assert TOKEN not in caplog.text


def test_the_signature_of_a_redirect_is_not_logged_by_the_client(
    server: FaultServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server.faults.append(redirect("/x?Signature=sealed"))
    with client_for(HttpConfig(private_hosts=(server.host,))) as client:
        get(client, f"{server.url}/x")
    assert server.seen[1].path == "/x?Signature=sealed"
    assert "HTTP Request" in caplog.text
    assert "sealed" not in caplog.text


def make_certificate(folder: Path, host: str) -> tuple[Path, Path]:
    """Signed by itself, so that it is its own root."""
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "certificate").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return folder / "certificate", folder / "key"


def test_the_certificate_must_be_for_the_name_though_the_address_is_connected_to(
    tmp_path: Path,
) -> None:
    certificate, key = make_certificate(tmp_path, "models.test")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with FaultServer({"x": b"sealed"}, tls=context) as server:
        port = server.host.rpartition(":")[2]
        hosts = (f"models.test:{port}", f"other.test:{port}")
        trusting = HttpConfig(private_hosts=hosts, ca_path=certificate)
        with client_for(trusting, "127.0.0.1") as client:
            assert get(client, f"https://models.test:{port}/x") == b"sealed"
            with pytest.raises(httpx2.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                get(client, f"https://other.test:{port}/x")
            server.faults.append(redirect(f"http://models.test:{port}/x"))
            with pytest.raises(SourceRefused, match="unencrypted"):
                get(client, f"https://models.test:{port}/x")
