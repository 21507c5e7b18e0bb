"""Reads files of repositories on the Hugging Face hub with its own client."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx2

from loramux.errors import LoramuxError, SourceFailed, SourceForbidden, SourceNotFound
from loramux.sources.config import FetchLimits, HubConfig, Secret
from loramux.sources.origins.base import Checksum, RemoteFile
from loramux.sources.origins.http import (
    TEMPORARY_STATUSES,
    check_body,
    hidden_request,
    range_headers,
    transport_errors,
)
from loramux.sources.refusals import SourceCode
from loramux.sources.retry import parse_retry_after
from loramux.sources.source_id import SourceId

MAX_REDIRECTS = 5
DEFAULT_REVISION = "main"
SHA256 = re.compile(r"[0-9a-f]{64}")
GIT_SHA1 = re.compile(r"[0-9a-f]{40}")


class HubOrigin:
    """The origin of adapters on the Hugging Face hub."""

    def __init__(self, source: SourceId, config: HubConfig, limits: FetchLimits) -> None:
        import huggingface_hub

        self._source = source
        self._endpoint = config.endpoint
        self._timeout = httpx2.Timeout(limits.read_timeout_s, connect=limits.connect_timeout_s)
        self._token = config.token or stored_token()
        self._api = huggingface_hub.HfApi(
            endpoint=config.endpoint,
            # False sends no token at all, instead of the stored one.
            token=self._token.reveal() if self._token else False,
            library_name="loramux",
        )
        self._commit: str | None = None

    @property
    def revision(self) -> str | None:
        return self._commit

    def find(self, name: str) -> RemoteFile | None:
        from huggingface_hub.errors import EntryNotFoundError

        path = self._source.path_of(name)
        with self._hub_errors():
            try:
                found = self._api.get_hf_file_metadata(
                    url=self._url(path), timeout=self._timeout.read
                )
            except EntryNotFoundError:
                return None
        # All files after the first are read at the same commit.
        if self._commit is None and GIT_SHA1.fullmatch(found.commit_hash or ""):
            self._commit = found.commit_hash
        etag = found.etag or ""
        is_known = self._commit is not None and etag != "" and found.size is not None
        return RemoteFile(
            path=path,
            size_bytes=found.size,
            validator=f"{self._commit}/{etag}" if is_known else None,
            can_seek=is_known,
            checksum=read_etag(etag),
        )

    def file_names(self) -> Sequence[str]:
        revision = self._commit or self._source.revision or DEFAULT_REVISION
        try:
            with self._hub_errors():
                paths = self._api.list_repo_files(self._source.place, revision=revision)
        except SourceNotFound:
            return ()
        start = self._source.path_of("")
        inside = [path.removeprefix(start) for path in paths if path.startswith(start)]
        return [name for name in inside if "/" not in name]

    @contextmanager
    def read(self, file: RemoteFile, start: int, end: int | None) -> Iterator[Iterator[bytes]]:
        headers = range_headers(file, start, end)
        what = f"{self._source}, {file.path},"
        with transport_errors(what), self._send(self._url(file.path), headers) as response:
            if response.status_code not in (200, 206, 416):
                raise self._status_error(response)
            check_body(response, file, what, start=start, is_range="Range" in headers)
            yield response.iter_raw()

    def close(self) -> None:
        """Do nothing: huggingface_hub owns the session."""

    def _url(self, path: str) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(
            self._source.place,
            path,
            revision=self._commit or self._source.revision or DEFAULT_REVISION,
            endpoint=self._endpoint,
        )

    @contextmanager
    def _send(self, text: str, headers: dict[str, str]) -> Iterator[httpx2.Response]:
        """Follows redirects of the hub to its storage, which does not get the token."""
        from huggingface_hub import get_session

        session, url = get_session(), httpx2.URL(text)
        token = {"Authorization": f"Bearer {self._token.reveal()}"} if self._token else {}
        own = {**headers, **token}
        for _ in range(MAX_REDIRECTS + 1):
            request = hidden_request(session, "GET", url, own)
            request.extensions["timeout"] = self._timeout.as_dict()
            response = session.send(request, stream=True, follow_redirects=False)
            try:
                if not response.has_redirect_location:
                    yield response
                    return
                target = url.join(response.headers["Location"])
            finally:
                response.close()
            if (target.scheme, target.host, target.port) != (url.scheme, url.host, url.port):
                own = headers
            url = target
        raise SourceFailed(f"{self._source} was redirected too often.", is_temporary=False)

    @contextmanager
    def _hub_errors(self) -> Iterator[None]:
        """Translate errors of the client without their texts, which hold URLs and responses."""
        from huggingface_hub import errors

        try:
            with transport_errors(str(self._source)):
                yield
        except errors.RevisionNotFoundError:
            raise SourceNotFound(
                f"{self._source}: the repository has no such revision. Check the branch, tag or "
                "commit after the @."
            ) from None
        except errors.GatedRepoError as error:
            raise self._status_error(error.response, "is gated") from None
        except errors.RepositoryNotFoundError:
            raise SourceNotFound(
                f"{self._source}: there is no such repository, or it is private. Check owner and "
                "name; for a private one set HF_TOKEN to a token that may read it."
            ) from None
        except errors.OfflineModeIsEnabled:
            raise SourceFailed(
                f"{self._source} cannot be fetched: the hub's client is offline. Unset "
                "HF_HUB_OFFLINE, or push the adapter here from a folder.",
                is_temporary=False,
            ) from None
        except errors.HfHubHTTPError as error:
            raise self._status_error(error.response) from None

    def _status_error(
        self, response: httpx2.Response, described: str = "may not be read"
    ) -> LoramuxError:
        status = response.status_code
        if status in (401, 403):
            had = "the configured token has no access" if self._token else "no token is configured"
            return SourceForbidden(
                SourceCode.NO_ACCESS,
                f"{self._source} {described}, and {had} ({status}).",
                fix="Accept the repository's terms on the hub, and set HF_TOKEN to a token of "
                "that account.",
            )
        if status == 404:
            return SourceNotFound(f"{self._source} is not on the hub. Check owner and name.")
        return SourceFailed(
            f"The hub answered {self._source} with status {status}. Try again later.",
            is_temporary=status in TEMPORARY_STATUSES,
            retry_after_s=parse_retry_after(response.headers.get("Retry-After")),
        )


def read_etag(etag: str) -> Checksum | None:
    """Return the checksum in an ETag: SHA-256 of large files, else the SHA-1 of the git blob."""
    if SHA256.fullmatch(etag):
        return Checksum("sha256", etag)
    return Checksum("git", etag) if GIT_SHA1.fullmatch(etag) else None


def stored_token() -> Secret | None:
    from huggingface_hub import get_token

    token = get_token()
    return Secret(token) if token else None
