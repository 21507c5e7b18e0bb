from __future__ import annotations

import logging
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx2
import pytest

from loramux.errors import (
    SourceChanged,
    SourceFailed,
    SourceForbidden,
    SourceNotFound,
    SourceRefused,
)
from loramux.sources.config import FetchLimits, HttpConfig, Secret, SourceConfig
from loramux.sources.origins.base import Checksum, RemoteFile
from loramux.sources.origins.http import (
    MAX_REDIRECTS,
    GuardedClient,
    HttpOrigin,
    check_body,
    hidden_request,
    range_headers,
    read_checksum,
    read_size,
    read_validator,
    status_error,
    transport_errors,
)
from loramux.sources.parse import parse_source
from tests.fault_server import Answer, Fault, FaultServer
from tests.unit.sources.source_factory import (
    CONFIG,
    CONFIG_NAME,
    FAST,
    IMPATIENT,
    WEIGHTS,
    WEIGHTS_NAME,
)

FILE = RemoteFile(path="x", size_bytes=100, validator='"v"')
ZEROS = "A" * 43 + "="


def answer(status: int, **headers: str) -> httpx2.Response:
    return httpx2.Response(
        status, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )


@pytest.mark.parametrize(
    ("status", "kind"),
    [(404, SourceNotFound), (410, SourceNotFound), (401, SourceForbidden), (403, SourceForbidden)]
    + [(500, SourceFailed), (400, SourceFailed), (302, SourceFailed)],
)
def test_each_status_has_its_error(status: int, kind: type[Exception]) -> None:
    assert type(status_error(answer(status), "x")) is kind


def test_only_some_failures_pass_by_themselves() -> None:
    busy = status_error(answer(429, Retry_After="9"), "x")
    assert isinstance(busy, SourceFailed)
    assert (busy.is_temporary, busy.retry_after_s) == (True, 9.0)
    wrong = status_error(answer(400), "x")
    assert isinstance(wrong, SourceFailed)
    assert not wrong.is_temporary


def test_the_whole_file_is_asked_for_without_a_range() -> None:
    assert "Range" not in range_headers(FILE, 0, 100)
    assert "Range" not in range_headers(FILE, 0, None)
    assert range_headers(FILE, 0, 50)["Range"] == "bytes=0-49"
    assert range_headers(FILE, 50, 100)["Range"] == "bytes=50-99"
    assert range_headers(FILE, 50, None)["Range"] == "bytes=50-"
    assert range_headers(FILE, 0, 100)["Accept-Encoding"] == "identity"


@pytest.mark.parametrize(
    ("response", "start", "is_range"),
    [
        (answer(200, Content_Length="99"), 0, False),
        (answer(200, Content_Length="100"), 50, True),
        (answer(206, Content_Range="bytes 0-49/100"), 50, True),
        (answer(206, Content_Range="bytes 50-98/99"), 50, True),
        (answer(206), 50, True),
        (answer(206, Content_Range="bytes=50-99/100"), 50, True),
        (answer(416), 50, True),
        (answer(412), 0, False),
    ],
)
def test_a_body_of_something_else_is_noticed(
    response: httpx2.Response, start: int, is_range: bool
) -> None:
    with pytest.raises(SourceChanged):
        check_body(response, FILE, "x", start=start, is_range=is_range)


def test_the_wanted_body_passes_and_a_compressed_one_does_not() -> None:
    check_body(answer(200, Content_Length="100"), FILE, "x", start=0, is_range=False)
    check_body(answer(206, Content_Range="bytes 50-99/*"), FILE, "x", start=50, is_range=True)
    with pytest.raises(SourceRefused, match="compressed"):
        check_body(answer(200, Content_Encoding="br"), FILE, "x", start=0, is_range=False)
    with pytest.raises(SourceFailed, match="status 500"):
        check_body(answer(500), FILE, "x", start=0, is_range=False)


@pytest.mark.parametrize(
    ("text", "size"),
    [("12", 12), ("", None), ("-1", None), ("1e3", None), ("٣", None), ("9" * 30, None)],
)
def test_a_size_is_a_plain_number(text: str, size: int | None) -> None:
    assert read_size(httpx2.Headers([(b"content-length", text.encode())])) == size


def test_only_a_strong_etag_tells_that_bytes_are_the_same() -> None:
    assert read_validator(answer(200, ETag='"a"').headers) == '"a"'
    assert read_validator(answer(200, ETag='W/"a"').headers) is None
    assert read_validator(answer(200).headers) is None


@pytest.mark.parametrize(
    ("headers", "algorithm"),
    [
        ({"x-amz-checksum-sha256": ZEROS}, "sha256"),
        ({"x-amz-checksum-sha256": f"{ZEROS}-3"}, None),
        ({"Repr-Digest": f"sha-512=:AA==:, sha-256=:{ZEROS}:"}, "sha256"),
        ({"Content-MD5": "A" * 22 + "=="}, "md5"),
        ({"Content-MD5": "not base64"}, None),
        ({"ETag": '"' + "0" * 32 + '"'}, None),
        ({"ETag": '"' + "0" * 32 + '"', "x-amz-request-id": "1"}, "md5"),
        ({"ETag": '"' + "0" * 32 + '-2"', "x-amz-request-id": "1"}, None),
        (
            {
                "ETag": '"' + "0" * 32 + '"',
                "x-amz-request-id": "1",
                "x-amz-server-side-encryption": "aws:kms",
            },
            None,
        ),
    ],
)
def test_checksums_are_taken_where_they_are_ones(
    headers: dict[str, str], algorithm: str | None
) -> None:
    found = read_checksum(httpx2.Headers(headers))
    assert (None if found is None else found.algorithm) == algorithm
    if algorithm == "sha256":
        assert found == Checksum("sha256", "00" * 32)


def test_a_request_is_not_logged_with_what_may_be_signed() -> None:
    url = httpx2.URL("https://host:81/path?Signature=secret")
    with httpx2.Client(verify=False) as client:
        request = hidden_request(client, "GET", url, {})
    assert str(request.url) == "https://host:81/"
    assert request.extensions["target"] == b"/path?Signature=secret"


@pytest.mark.parametrize(
    ("error", "is_temporary"),
    [
        (httpx2.ReadTimeout("secret"), True),
        (httpx2.ConnectError("secret"), True),
        (httpx2.ConnectError("CERTIFICATE_VERIFY_FAILED secret"), False),
        (httpx2.TooManyRedirects("secret"), False),
    ],
)
def test_client_errors_are_translated_without_their_texts(
    error: httpx2.RequestError, is_temporary: bool
) -> None:
    with pytest.raises(SourceFailed) as failed, transport_errors("https://host"):
        raise error
    assert failed.value.is_temporary is is_temporary
    assert "secret" not in str(failed.value)
    assert failed.value.__suppress_context__


TOKEN = "token-of-the-first-host"


@contextmanager
def client_for(config: HttpConfig, *addresses: str) -> Iterator[GuardedClient]:
    """Make a client; with addresses, every name resolves to them."""
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
    # No server listens on this port.
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
    """Make a self-signed certificate."""
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


@contextmanager
def origin_of(url: str, config: SourceConfig, limits: FetchLimits = FAST) -> Iterator[HttpOrigin]:
    origin = HttpOrigin(parse_source(url, config), config.http, limits)
    try:
        yield origin
    finally:
        origin.close()


@pytest.fixture
def origin(web: FaultServer, web_config: SourceConfig) -> Iterator[HttpOrigin]:
    with origin_of(f"{web.url}/pirate", web_config) as origin:
        yield origin


def test_a_file_is_found_and_a_range_of_it_is_read(origin: HttpOrigin, web: FaultServer) -> None:
    file = origin.find(WEIGHTS_NAME)
    assert file is not None
    assert (file.size_bytes, file.can_seek) == (len(WEIGHTS), True)
    assert origin.revision == file.validator
    with origin.read(file, 10, 20) as chunks:
        assert b"".join(chunks) == WEIGHTS[10:20]
    asked = web.requests("GET")[0].headers
    assert (asked["range"], asked["if-range"]) == ("bytes=10-19", file.validator)
    assert asked["accept-encoding"] == "identity"


def test_what_is_missing_is_none_and_what_is_forbidden_says_so(
    origin: HttpOrigin, web: FaultServer
) -> None:
    assert origin.find("other") is None
    web.faults.append(Fault(method="HEAD", answer=Answer(status=401)))
    with pytest.raises(SourceForbidden, match="Configure a token"):
        origin.find(WEIGHTS_NAME)


@pytest.mark.parametrize("status", [405, 501, 403])
def test_servers_without_head_are_asked_by_get(
    origin: HttpOrigin, web: FaultServer, status: int
) -> None:
    web.faults.append(Fault(method="HEAD", answer=Answer(status=status)))
    file = origin.find(CONFIG_NAME)
    assert file is not None
    assert file.size_bytes == len(CONFIG)


def test_a_server_without_ranges_or_etags_is_read_from_the_start(
    origin: HttpOrigin, web: FaultServer
) -> None:
    web.headers = {}
    file = origin.find(WEIGHTS_NAME)
    assert file is not None
    assert (file.can_seek, file.validator) == (False, None)
    web.headers, web.has_etags = {"Accept-Ranges": "bytes"}, False
    file = origin.find(WEIGHTS_NAME)
    assert file is not None
    assert not file.can_seek


def test_another_file_under_the_same_name_is_noticed(origin: HttpOrigin, web: FaultServer) -> None:
    file = origin.find(WEIGHTS_NAME)
    assert file is not None
    web.files[f"pirate/{WEIGHTS_NAME}"] = WEIGHTS[::-1]
    for start in (0, 10):
        with pytest.raises(SourceChanged), origin.read(file, start, len(WEIGHTS)):
            pass


def test_a_cut_and_an_error_are_failures_that_may_pass(
    origin: HttpOrigin, web: FaultServer
) -> None:
    file = origin.find(WEIGHTS_NAME)
    assert file is not None
    web.faults = [Fault(cut_at=100), Fault(answer=Answer(status=502))]
    for reason in ("failed", "status 502"):
        with (
            pytest.raises(SourceFailed, match=reason) as failed,
            origin.read(file, 0, None) as chunks,
        ):
            list(chunks)
        assert failed.value.is_temporary


def test_silence_is_a_failure_that_may_pass(web: FaultServer, web_config: SourceConfig) -> None:
    web.faults = [Fault(method="HEAD", is_silent=True)]
    with (
        origin_of(f"{web.url}/pirate", web_config, IMPATIENT) as origin,
        pytest.raises(SourceFailed, match="in time") as failed,
    ):
        origin.find(WEIGHTS_NAME)
    assert failed.value.is_temporary


def test_names_are_escaped_in_the_url(web: FaultServer, web_config: SourceConfig) -> None:
    web.files = {"prénom/a b #1.safetensors": WEIGHTS}
    with origin_of(f"{web.url}/prénom/a%20b%20%231.safetensors", web_config) as origin:
        assert origin.find("a b #1.safetensors") is not None
