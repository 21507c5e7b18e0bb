"""The checked id of an adapter's source."""

from __future__ import annotations

import hashlib
import unicodedata
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import quote

from loramux.sources.refusals import archive_refused, bad_form, pickle_refused

WEIGHTS_SUFFIX = ".safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
ARCHIVE_SUFFIXES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z")
MAX_SEGMENT_BYTES = 255
# Control and format characters, surrogates, private and unassigned ones, line separators.
ODD_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


class SourceKind(StrEnum):
    LOCAL = "local"
    HUB = "hf"
    S3 = "s3"
    GCS = "gs"
    AZURE = "az"
    HTTP = "http"


BUCKET_KINDS = (SourceKind.S3, SourceKind.GCS, SourceKind.AZURE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceId:
    """A source that parse_source has checked; its string form holds no credentials."""

    kind: SourceKind
    place: str
    """The real path of the root, `owner/name`, the bucket, or `https://host[:port]`."""
    folder: tuple[str, ...] = ()
    """The path inside the place; empty means its top."""
    weights_name: str | None = None
    """The name of a single weights file, or None for a folder that PEFT wrote."""
    revision: str | None = None

    @property
    def segments(self) -> tuple[str, ...]:
        return self.folder if self.weights_name is None else (*self.folder, self.weights_name)

    def path_of(self, name: str) -> str:
        return "/".join((*self.folder, name))

    @property
    def slug(self) -> str:
        """Returns a unique folder name, by which an interrupted fetch is resumed."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:32]

    def __str__(self) -> str:
        path = "/".join(self.segments)
        if self.kind is SourceKind.LOCAL:
            return f"{self.place.rstrip('/')}/{path}"
        if self.kind is SourceKind.HUB:
            revision = f"@{self.revision}" if self.revision else ""
            return f"hf:{self.place}{revision}" + (f":{path}" if path else "")
        if self.kind is SourceKind.HTTP:
            return f"{self.place}/{quote(path)}".rstrip("/")
        return f"{self.kind}://{self.place}/{path}".rstrip("/")


def split_path(path: str, *, what: str) -> tuple[str, ...]:
    """Split a path into its names; one slash at the end is ignored."""
    if not path:
        return ()
    segments = tuple(path.removesuffix("/").split("/"))
    for segment in segments:
        check_segment(segment, what=what)
    return segments


def check_segment(segment: str, *, what: str) -> None:
    fix = "Use plain names, separated by single slashes."
    if segment in ("", ".", ".."):
        raise bad_form(f"{what} has {segment!r} for a folder, which could lead outside.", fix=fix)
    if "\\" in segment or "/" in segment or has_invalid_characters(segment):
        raise bad_form(f"{what} has invalid characters in {segment[:80]!r}.", fix=fix)
    if len(segment.encode()) > MAX_SEGMENT_BYTES:
        raise bad_form(f"{what} has a name of over {MAX_SEGMENT_BYTES} bytes.", fix=fix)


def has_invalid_characters(text: str) -> bool:
    return any(unicodedata.category(character) in ODD_CATEGORIES for character in text)


def split_weights(segments: tuple[str, ...]) -> tuple[tuple[str, ...], str | None]:
    """Split the segments into the folder and the name of a single weights file, if any."""
    last = segments[-1] if segments else ""
    lowered = last.lower()
    if lowered.endswith(WEIGHTS_SUFFIX) and lowered != WEIGHTS_SUFFIX:
        return segments[:-1], last
    if lowered.endswith(PICKLE_SUFFIXES):
        raise pickle_refused(last)
    if lowered.endswith(ARCHIVE_SUFFIXES):
        raise archive_refused(last)
    return segments, None
