"""Downloads files of a repository on several threads, and resumes those that broke off."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from huggingface_hub import constants, errors, hf_hub_download, hf_hub_url
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # not in its __all__
    WeakFileLock,
    build_hf_headers,
)

from loramux.base.progress import ByteSink
from loramux.errors import ModelNotFetched
from loramux.models.digests import remember_digest
from loramux.models.hub.cache import RepositoryCache
from loramux.models.hub.files import RemoteFile

NUM_THREADS = 8
REPORT_EVERY_S = 0.1
# Time for the threads to notice that they should stop.
STOP_S = 1.0
RESUMED_SUFFIXES = (".safetensors", ".gguf")
SHA256_CHARS = 64


class Stopped(Exception):
    """The download is being ended: another thread failed, or the user interrupted it."""


class Download:
    """Files of one commit on their way to the cache.

    Finished files and the received part of the others stay if the download is interrupted, and the
    next one goes on from there. huggingface_hub itself starts an unfinished file again.
    """

    def __init__(self, cache: RepositoryCache, commit: str, files: Sequence[RemoteFile]) -> None:
        self._cache = cache
        self._commit = commit
        self._total_bytes = sum(file.size_bytes for file in files)
        self._num_threads = min(NUM_THREADS, len(files))
        # The largest first, so that no single file is left for the end.
        self._waiting = deque(sorted(files, key=lambda file: -file.size_bytes))
        self._done_bytes = {file.path: cache.partial_bytes(file) for file in files}
        self._errors: list[BaseException] = []
        self._lock = threading.Lock()
        self._num_running = 0
        self._stop = threading.Event()
        self._ended = threading.Event()

    def run(self, sink: ByteSink) -> None:
        """Download all files; `sink` is called on this thread only."""
        sink.begin(f"Downloading {self._cache.hub_id}", self._total_bytes)
        shown_bytes = 0
        self._num_running = self._num_threads
        # Daemons: an interrupted program does not wait for a server that is silent.
        threads = [
            threading.Thread(target=self._work, name=f"hub-{index}", daemon=True)
            for index in range(self._num_threads)
        ]
        try:
            for thread in threads:
                thread.start()
            is_ended = False
            while not is_ended:
                is_ended = self._ended.wait(REPORT_EVERY_S)
                done_bytes = sum(list(self._done_bytes.values()))
                # A file that a server sends again from its start does not move the bar back.
                if done_bytes > shown_bytes:
                    sink.add(done_bytes - shown_bytes)
                    shown_bytes = done_bytes
        finally:
            self._stop.set()
            deadline_s = time.monotonic() + STOP_S
            for thread in threads:
                if thread.ident is not None:
                    thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._errors:
            raise self._errors[0]

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    file = self._waiting.popleft()
                except IndexError:
                    return
                self._fetch(file)
        except Stopped:
            pass
        except BaseException as error:
            self._errors.append(error)
            self._ended.set()
        finally:
            with self._lock:
                self._num_running -= 1
                if self._num_running == 0:
                    self._ended.set()

    def _fetch(self, file: RemoteFile) -> None:
        """Bring a file into the snapshot."""
        is_resumed = file.blob is not None and file.path.endswith(RESUMED_SUFFIXES)
        # Larger files can only be fetched with the hub's own protocol.
        if is_resumed and file.size_bytes <= constants.MAX_HTTP_DOWNLOAD_SIZE:
            self._fetch_blob(file)
        hf_hub_download(
            self._cache.hub_id.repository,
            file.path,
            revision=self._commit,
            cache_dir=self._cache.root,
            library_name="loramux",
            tqdm_class=self._bar(file),
        )
        self._done_bytes[file.path] = file.size_bytes

    def _fetch_blob(self, file: RemoteFile) -> None:
        """Bring the content of a large file into the cache, where hf_hub_download finds it."""
        blob, lock = self._cache.blob(file), self._cache.lock(file)
        for folder in (blob.parent, lock.parent):
            folder.mkdir(parents=True, exist_ok=True)
        # The same lock as that of huggingface_hub: another process may fetch the file, too.
        with WeakFileLock(lock):
            if blob.exists():
                return
            partial = self._cache.partial(file)
            self._receive(file, partial)
            self._check(file, partial)
            os.replace(partial, blob)
        if is_sha256(file):
            remember_digest(blob, str(file.blob))

    def _receive(self, file: RemoteFile, partial: Path) -> None:
        hub_id = self._cache.hub_id
        with partial.open("ab") as target:
            if target.tell() > file.size_bytes:
                target.truncate(0)
                target.seek(0)
            try:
                http_get(
                    hf_hub_url(hub_id.repository, file.path, revision=self._commit),
                    target,
                    resume_size=target.tell(),
                    headers=cast(dict[str, Any], build_hf_headers(library_name="loramux")),
                    expected_size=file.size_bytes,
                    displayed_filename=file.path,
                    tqdm_class=self._bar(file),
                )
            except OSError as error:
                # What has the wrong size is not a part of the file, but for example an error page.
                if error.errno is None and not isinstance(error, errors.HfHubHTTPError):
                    target.truncate(0)
                raise

    def _check(self, file: RemoteFile, partial: Path) -> None:
        """Raise ModelNotFetched and delete the content if it is not what the hub announced."""
        if not is_sha256(file):
            return
        with partial.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        if digest != file.blob:
            partial.unlink()
            raise ModelNotFetched(
                f"{file.path} of {self._cache.hub_id} does not match the SHA-256 that the hub "
                "reports, and was deleted. Start again; if it happens again, check the proxy."
            )

    def _bar(self, file: RemoteFile) -> Any:
        """Return a class in place of tqdm, which counts the bytes of a file."""

        def count(num_bytes: int) -> None:
            if self._stop.is_set():
                raise Stopped
            done_bytes = self._done_bytes[file.path] + num_bytes
            self._done_bytes[file.path] = max(0, min(done_bytes, file.size_bytes))

        return type("CountingBar", (Bar,), {"count": staticmethod(count)})


class Bar:
    """The part of tqdm's interface that huggingface_hub uses."""

    count: Callable[[int], None]

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, num_bytes: float | None = 1) -> None:
        self.count(int(num_bytes or 0))

    def close(self) -> None:
        pass

    def set_postfix_str(self, *_: object, **__: object) -> None:
        pass


def is_sha256(file: RemoteFile) -> bool:
    return file.blob is not None and len(file.blob) == SHA256_CHARS
