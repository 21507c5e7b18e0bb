"""A fake Hugging Face hub, complete enough for the real client."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.fault_server import Answer, Fault, FaultServer, Seen

INFO = re.compile(r"/api/models/(?P<repository>[^/]+/[^/]+)/revision/(?P<revision>.+)")
RESOLVE = re.compile(r"/(?P<repository>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
SIGNATURE = "signature-of-the-storage"
# The client asks for this once a day, before its first request.
CLIENT_STATISTICS = "/api/agent-harnesses"
LFS_SUFFIXES = (".safetensors", ".gguf", ".bin")


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0%s" % (len(content), content)).hexdigest()


@dataclass(slots=True)
class HubRepository:
    revisions: dict[str, dict[str, bytes]]
    """The files by branch, tag or commit."""
    readers: frozenset[str] | None = None
    """The tokens that have accepted the terms; None if the repository is not gated."""
    gguf: dict[str, object] | None = None
    """What the hub has read from the GGUF files."""

    def commit_of(self, revision: str) -> str:
        return hashlib.sha1(repr(sorted(self.revisions[revision].items())).encode()).hexdigest()

    def find(self, revision: str) -> str | None:
        """Return a revision by its name or its commit."""
        names = (name for name in self.revisions if revision in (name, self.commit_of(name)))
        return next(names, None)


class HubServer(FaultServer):
    """A hub whose large files are on another server, behind signed URLs."""

    def __init__(self) -> None:
        super().__init__()
        self.repositories: dict[str, HubRepository] = {}
        self.missing_status = 404
        self.expired_tokens: set[str] = set()
        self.storage = FaultServer()

    def close(self) -> None:
        self.storage.close()
        super().close()

    def respond(self, seen: Seen, body: bytes) -> tuple[Answer, Fault]:
        if seen.path == CLIENT_STATISTICS:
            return Answer(status=404), Fault()
        return super().respond(seen, body)

    def answer(self, seen: Seen) -> Answer:
        path = unquote(urlsplit(seen.path).path)
        info = INFO.fullmatch(path)
        wanted = info or RESOLVE.fullmatch(path)
        token = seen.headers.get("authorization", "").removeprefix("Bearer ")
        if token in self.expired_tokens:
            return failure(401, "", "Invalid credentials in Authorization header")
        if wanted is None or wanted["repository"] not in self.repositories:
            return failure(self.missing_status, "RepoNotFound", "Repository not found")
        repository = self.repositories[wanted["repository"]]
        if info is not None:
            return self.describe(info["repository"], info["revision"])
        if repository.readers is not None and token not in repository.readers:
            return failure(403 if token else 401, "GatedRepo", "Access to model is restricted")
        name = repository.find(wanted["revision"])
        if name is None:
            return failure(404, "RevisionNotFound", "Invalid rev id")
        commit = repository.commit_of(name)
        content = repository.revisions[name].get(wanted["path"])
        if content is None:
            entry = failure(404, "EntryNotFound", "Entry not found")
            return Answer(status=404, headers={**entry.headers, "X-Repo-Commit": commit})
        return self.give(content, wanted["path"], commit, seen)

    def describe(self, repository_id: str, revision: str) -> Answer:
        """List the files; the hub does so for gated repositories, too."""
        repository = self.repositories[repository_id]
        name = repository.find(revision)
        if name is None:
            return failure(404, "RevisionNotFound", "Invalid rev id")
        siblings: list[dict[str, object]] = []
        for path, content in repository.revisions[name].items():
            size = len(content)
            lfs = {"size": size, "sha256": hashlib.sha256(content).hexdigest(), "pointerSize": 130}
            found = {"rfilename": path, "size": size, "blobId": git_hash(content)}
            siblings.append(found | ({"lfs": lfs} if path.endswith(LFS_SUFFIXES) else {}))
        body = {"id": repository_id, "sha": repository.commit_of(name), "siblings": siblings}
        body |= {"gguf": repository.gguf} if repository.gguf else {}
        headers = {"Content-Type": "application/json"}
        return Answer(headers=headers, body=json.dumps(body).encode())

    def give(self, content: bytes, path: str, commit: str, seen: Seen) -> Answer:
        if not path.endswith(LFS_SUFFIXES):
            served = self.serve(content, seen)
            headers = {"X-Repo-Commit": commit, "ETag": f'"{git_hash(content)}"'}
            return Answer(
                status=served.status, headers={**served.headers, **headers}, body=served.body
            )
        digest = hashlib.sha256(content).hexdigest()
        self.storage.files[digest] = content
        headers = {
            "X-Repo-Commit": commit,
            "X-Linked-Size": str(len(content)),
            "X-Linked-Etag": f'"{digest}"',
            "Location": f"{self.storage.url}/{digest}?Signature={SIGNATURE}",
        }
        return Answer(status=302, headers=headers)


def failure(status: int, code: str, message: str) -> Answer:
    return Answer(status=status, headers={"X-Error-Code": code, "X-Error-Message": message})


@contextmanager
def hub_for_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """Make a hub the endpoint of the client, which may go online and has no stored token."""
    import huggingface_hub
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with HubServer() as server:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        yield server
    huggingface_hub.close_session()
