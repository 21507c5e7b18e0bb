"""Statuses, ranges and checksums of HTTP answers."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2

from loramux.errors import (
    LoramuxError,
    SourceFailed,
    SourceForbidden,
    SourceNotFound,
    SourceRefused,
)
from loramux.sources.origins.base import MD5_ETAG, Checksum, RemoteFile, changed
from loramux.sources.refusals import SourceCode
from loramux.sources.retry import parse_retry_after

TEMPORARY_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 509, 520, 522, 524})
REPR_SHA256 = re.compile(r"(?:^|[,\s])sha-256=:([A-Za-z0-9+/=]+):")
CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
# A body is what the file holds, so that ranges and sizes are the file's.
PLAIN_HEADERS = {"Accept-Encoding": "identity"}


@contextmanager
def transport_errors(what: str) -> Iterator[None]:
    """Nothing of the client's own texts is passed on: they may hold signed URLs."""
    try:
        yield
    except httpx2.TimeoutException:
        raise SourceFailed(f"{what} did not answer in time. Try again later.") from None
    except httpx2.TransportError as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise SourceFailed(
                f"The certificate of {what} is not valid. Check the host and the trusted roots.",
                is_temporary=False,
            ) from None
        raise SourceFailed(
            f"The connection to {what} failed ({type(error).__name__}). Try again later."
        ) from None
    except httpx2.RequestError as error:
        raise SourceFailed(
            f"{what} could not be read ({type(error).__name__}).", is_temporary=False
        ) from None


def status_error(response: httpx2.Response, what: str) -> LoramuxError:
    status = response.status_code
    if status in (404, 410):
        return SourceNotFound(f"{what} is not there. Check its spelling.")
    if status in (401, 403, 407):
        return SourceForbidden(
            SourceCode.NO_ACCESS,
            f"{what} may not be read with this server's credentials ({status}).",
            fix="Configure a token for that host which may read it.",
        )
    return SourceFailed(
        f"{what} was answered with status {status}. Try again later, or check the source.",
        is_temporary=status in TEMPORARY_STATUSES,
        retry_after_s=parse_retry_after(response.headers.get("Retry-After")),
    )


def hidden_request(
    client: httpx2.Client, method: str, url: httpx2.URL, headers: dict[str, str]
) -> httpx2.Request:
    """The client logs URLs; this one is logged without its path and query, which may be signed."""
    return client.build_request(
        method,
        url.copy_with(raw_path=b"/"),
        headers=headers,
        extensions={"target": url.raw_path},
    )


def range_headers(file: RemoteFile, start: int, end: int | None) -> dict[str, str]:
    if start == 0 and end in (None, file.size_bytes):
        return dict(PLAIN_HEADERS)
    last = "" if end is None else str(end - 1)
    return {**PLAIN_HEADERS, "Range": f"bytes={start}-{last}"}


def check_body(
    response: httpx2.Response, file: RemoteFile, what: str, *, start: int, is_range: bool
) -> None:
    """That the body is the wanted range of the file that was found."""
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise SourceRefused(
            SourceCode.ENCODED_BODY,
            f"{what} is sent compressed though plain bytes were asked for.",
            fix="Serve the file as it is.",
        )
    if response.status_code == 200:
        length = response.headers.get("Content-Length")
        is_same = None in (length, file.size_bytes) or length == str(file.size_bytes)
        if is_range or not is_same:
            raise changed(what)
        return
    if response.status_code in (412, 416):
        raise changed(what)
    if response.status_code != 206:
        raise status_error(response, what)
    found = CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    total = None if found is None or found[3] == "*" else int(found[3])
    if found is None or int(found[1]) != start or total not in (None, file.size_bytes):
        raise changed(what)


def read_size(headers: httpx2.Headers) -> int | None:
    text = headers.get("Content-Length", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def read_validator(headers: httpx2.Headers) -> str | None:
    etag: str | None = headers.get("ETag")
    return None if etag is None or etag.startswith("W/") else etag


def read_checksum(headers: httpx2.Headers) -> Checksum | None:
    """What the server itself says of the bytes; an ETag is an MD5 on plain S3 alone."""
    # A dash marks the checksum of the parts' checksums.
    sha256 = headers.get("x-amz-checksum-sha256")
    declared = REPR_SHA256.search(headers.get("Repr-Digest", ""))
    if sha256 is not None and "-" not in sha256:
        return from_base64("sha256", sha256)
    if declared is not None:
        return from_base64("sha256", declared[1])
    if "Content-MD5" in headers:
        return from_base64("md5", headers["Content-MD5"])
    is_plain_s3 = "x-amz-request-id" in headers and not (
        "kms" in headers.get("x-amz-server-side-encryption", "")
        or "x-amz-server-side-encryption-customer-algorithm" in headers
    )
    md5 = MD5_ETAG.fullmatch(headers.get("ETag", ""))
    return Checksum("md5", md5[1]) if md5 is not None and is_plain_s3 else None


def from_base64(algorithm: str, text: str) -> Checksum | None:
    try:
        return Checksum(algorithm, base64.b64decode(text, validate=True).hex())
    except (binascii.Error, ValueError):
        return None
