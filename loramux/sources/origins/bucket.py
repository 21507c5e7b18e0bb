"""Files of a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from loramux.errors import SourceNotFound
from loramux.sources.config import FetchLimits, SourceConfig
from loramux.sources.origins.base import CHUNK_BYTES, MD5_ETAG, Checksum, RemoteFile, changed
from loramux.sources.origins.object_store import open_store, store_errors, translated
from loramux.sources.source_id import SourceId, SourceKind

SHA256_ATTRIBUTE = "sha256"


class ObjectOrigin:
    def __init__(self, source: SourceId, config: SourceConfig, limits: FetchLimits) -> None:
        self._bucket = f"{source.kind}://{source.place}"
        self._source = source
        self._etag_is_md5 = source.kind is SourceKind.S3 and config.s3.etag_is_md5
        self._store = open_store(source.kind, source.place, config, limits)
        self._revision: str | None = None

    @property
    def revision(self) -> str | None:
        return self._revision

    def find(self, name: str) -> RemoteFile | None:
        import obstore

        path = self._source.path_of(name)
        try:
            with store_errors(self._show(path)):
                found = obstore.get(self._store, path, options={"head": True})
        except SourceNotFound:
            return None
        etag = found.meta["e_tag"]
        if self._revision is None:
            self._revision = etag
        return RemoteFile(
            path=path,
            size_bytes=found.meta["size"],
            validator=etag,
            checksum=self._checksum(found.attributes.get(SHA256_ATTRIBUTE), etag),
        )

    @contextmanager
    def read(self, file: RemoteFile, start: int, end: int | None) -> Iterator[Iterator[bytes]]:
        import obstore

        stop = file.size_bytes if end is None else end
        what = self._show(file.path)
        if stop is None or stop <= start:
            yield iter(())
            return
        with store_errors(what):
            found = obstore.get(
                self._store,
                file.path,
                options={"if_match": file.validator, "range": (start, stop)},
            )
        if found.meta["size"] != file.size_bytes:
            raise changed(what)
        yield translated(found.stream(min_chunk_size=CHUNK_BYTES), what)

    def close(self) -> None:
        pass

    def _checksum(self, sha256: str | None, etag: str | None) -> Checksum | None:
        if sha256 is not None:
            return Checksum("sha256", sha256.lower())
        md5 = MD5_ETAG.fullmatch(etag or "") if self._etag_is_md5 else None
        return None if md5 is None else Checksum("md5", md5[1])

    def _show(self, path: str) -> str:
        return f"{self._bucket}/{path}"
