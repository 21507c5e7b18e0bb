"""Files of a web server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

import httpx2

from loramux.errors import SourceNotFound
from loramux.sources.config import FetchLimits, HttpConfig
from loramux.sources.origins.addresses import Resolver, resolve
from loramux.sources.origins.base import RemoteFile, changed
from loramux.sources.origins.http_bodies import (
    PLAIN_HEADERS,
    check_body,
    range_headers,
    read_checksum,
    read_size,
    read_validator,
    status_error,
    transport_errors,
)
from loramux.sources.origins.http_exchange import GuardedClient
from loramux.sources.source_id import SourceId

# Servers that answer so to HEAD may still answer GET.
NO_HEAD = frozenset({400, 403, 405, 501})


class HttpOrigin:
    def __init__(
        self,
        source: SourceId,
        config: HttpConfig,
        limits: FetchLimits,
        *,
        resolver: Resolver = resolve,
    ) -> None:
        self._source = source
        self._client = GuardedClient(config, limits, resolver=resolver)
        self._revision: str | None = None

    @property
    def revision(self) -> str | None:
        return self._revision

    def find(self, name: str) -> RemoteFile | None:
        path = self._source.path_of(name)
        try:
            headers = self._read_headers(self._url(path))
        except SourceNotFound:
            return None
        if self._revision is None:
            self._revision = headers.get("ETag")
        size_bytes, validator = read_size(headers), read_validator(headers)
        has_ranges = headers.get("Accept-Ranges", "").lower() == "bytes"
        can_seek = has_ranges and validator is not None and size_bytes is not None
        return RemoteFile(
            path=path,
            size_bytes=size_bytes,
            validator=validator if can_seek else None,
            can_seek=can_seek,
            checksum=read_checksum(headers),
        )

    @contextmanager
    def read(self, file: RemoteFile, start: int, end: int | None) -> Iterator[Iterator[bytes]]:
        url = self._url(file.path)
        headers = range_headers(file, start, end)
        is_range = "Range" in headers
        if file.validator is not None:
            headers["If-Range" if is_range else "If-Match"] = file.validator
        with transport_errors(url), self._client.send("GET", url, headers) as response:
            check_body(response, file, url, start=start, is_range=is_range)
            if file.validator not in (None, response.headers.get("ETag", file.validator)):
                raise changed(url)
            yield response.iter_raw()

    def close(self) -> None:
        self._client.close()

    def _read_headers(self, url: str) -> httpx2.Headers:
        headers = {**PLAIN_HEADERS, "x-amz-checksum-mode": "ENABLED"}
        with transport_errors(url), self._client.send("HEAD", url, headers) as response:
            if response.status_code == 200:
                return response.headers
            if response.status_code not in NO_HEAD:
                raise status_error(response, url)
        with transport_errors(url), self._client.send("GET", url, headers) as response:
            if response.status_code != 200:
                raise status_error(response, url)
            return response.headers

    def _url(self, path: str) -> str:
        return f"{self._source.place}/{quote(path)}"
