"""A fake Hugging Face hub, complete enough for the real client."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from tests.fault_server import Answer, FaultServer, Seen

RESOLVE = re.compile(r"/(?P<repository>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
SIGNATURE = "signature-of-the-storage"


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0%s" % (len(content), content)).hexdigest()


@dataclass(slots=True)
class HubRepository:
    revisions: dict[str, dict[str, bytes]]
    """The files by branch, tag or commit."""
    readers: frozenset[str] | None = None
    """The tokens that have accepted the terms; None if the repository is not gated."""

    def commit_of(self, revision: str) -> str:
        return hashlib.sha1(repr(sorted(self.revisions[revision].items())).encode()).hexdigest()

    def find(self, revision: str) -> str | None:
        """Returns a revision by its name or its commit."""
        names = (name for name in self.revisions if revision in (name, self.commit_of(name)))
        return next(names, None)


class HubServer(FaultServer):
    """A hub whose large files are on another server, behind signed URLs."""

    def __init__(self) -> None:
        super().__init__()
        self.repositories: dict[str, HubRepository] = {}
        self.missing_status = 404
        self.storage = FaultServer()

    def close(self) -> None:
        self.storage.close()
        super().close()

    def answer(self, seen: Seen) -> Answer:
        wanted = RESOLVE.fullmatch(unquote(urlsplit(seen.path).path))
        if wanted is None or wanted["repository"] not in self.repositories:
            return failure(self.missing_status, "RepoNotFound", "Repository not found")
        repository = self.repositories[wanted["repository"]]
        token = seen.headers.get("authorization", "").removeprefix("Bearer ")
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

    def give(self, content: bytes, path: str, commit: str, seen: Seen) -> Answer:
        if not path.endswith(".safetensors"):
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
