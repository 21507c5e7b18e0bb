from __future__ import annotations

import httpx2
import pytest

from loramux.errors import SourceFailed, SourceForbidden, SourceNotFound, SourceRefused
from loramux.sources.origins.base import Checksum, RemoteFile, SourceChanged
from loramux.sources.origins.http import (
    check_body,
    hidden_request,
    range_headers,
    read_checksum,
    read_size,
    read_validator,
    status_error,
    transport_errors,
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
def test_failures_of_the_client_come_in_our_words_only(
    error: httpx2.RequestError, is_temporary: bool
) -> None:
    with pytest.raises(SourceFailed) as failed, transport_errors("https://host"):
        raise error
    assert failed.value.is_temporary is is_temporary
    assert "secret" not in str(failed.value)
    assert failed.value.__suppress_context__
