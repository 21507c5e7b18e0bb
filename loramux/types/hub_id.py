"""Names of models on the Hugging Face hub: org/name[@revision][:file.gguf]."""

from __future__ import annotations

import re
from dataclasses import dataclass

HUB_PREFIX = "hf:"
MODEL_FORMS = (
    "a Hugging Face model folder, a .gguf file, or a model of the Hugging Face hub as "
    "org/name[@revision] or org/name:file.gguf"
)
DEFAULT_REVISION = "main"
MAX_REPOSITORY_CHARS = 96
MAX_REVISION_CHARS = 200
REPOSITORY_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubId:
    """A repository of the hub at a revision, and for a GGUF repository one of its files."""

    repository: str
    revision: str = DEFAULT_REVISION
    """A branch, a tag or a commit."""
    file: str | None = None

    def __str__(self) -> str:
        revision = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        return f"{self.repository}{revision}{f':{self.file}' if self.file else ''}"

    @property
    def is_commit(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return COMMIT.fullmatch(self.revision) is not None


def parse_hub_id(text: str) -> HubId | None:
    """Parse org/name, with `hf:` before it or not; None if the text has another form.

    A revision may stand before or after the file: `org/name@v1:a.gguf`, `org/name:a.gguf@v1`.
    """
    place, colon, file = text.removeprefix(HUB_PREFIX).partition(":")
    repository, *revisions = place.split("@")
    file, *after = file.split("@")
    revisions += after
    parts = repository.split("/")
    if len(parts) != 2 or not all(map(is_repository_part, parts)) or len(revisions) > 1:
        return None
    if len(repository) > MAX_REPOSITORY_CHARS:
        return None
    # A file of a folder that does not exist is a more likely meaning than a repository.
    if parts[1].endswith((".gguf", ".json")) or not all(map(is_revision, revisions)):
        return None
    if colon and not is_gguf_path(file):
        return None
    return HubId(repository, revisions[0] if revisions else DEFAULT_REVISION, file or None)


def is_repository_part(part: str) -> bool:
    is_odd = "--" in part or ".." in part or part.endswith(".git")
    return (
        not is_odd and len(part) <= MAX_REPOSITORY_CHARS and bool(REPOSITORY_PART.fullmatch(part))
    )


def is_revision(revision: str) -> bool:
    is_odd = ".." in revision or revision.endswith((".", ".lock"))
    return not is_odd and len(revision) <= MAX_REVISION_CHARS and bool(REVISION.fullmatch(revision))


def is_gguf_path(path: str) -> bool:
    """Whether this is the path of a GGUF file inside a repository."""
    parts = path.split("/")
    return path.endswith(".gguf") and path.isprintable() and not {"", ".", ".."} & set(parts)
