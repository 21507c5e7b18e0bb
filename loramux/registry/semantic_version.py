"""Versions such as 1.4.2 and 2.0.0-rc.1, in the order of semver.org without build metadata."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import total_ordering

from loramux.errors import InvalidRequest

NUMBER = r"(?:0|[1-9][0-9]{0,8})"
WORD = r"(?:0|[1-9][0-9]{0,8}|[0-9]*[A-Za-z-][0-9A-Za-z-]*)"
VERSION = re.compile(
    rf"(?P<major>{NUMBER})\.(?P<minor>{NUMBER})\.(?P<patch>{NUMBER})"
    rf"(?:-(?P<prerelease>{WORD}(?:\.{WORD})*))?",
    re.ASCII,
)
MAX_CHARACTERS = 64


@total_ordering
@dataclass(frozen=True, slots=True)
class SemanticVersion:
    major: int
    minor: int
    patch: int
    prerelease: tuple[str, ...] = ()

    def __str__(self) -> str:
        release = f"{self.major}.{self.minor}.{self.patch}"
        return f"{release}-{'.'.join(self.prerelease)}" if self.prerelease else release

    def __lt__(self, other: SemanticVersion) -> bool:
        return self._precedence() < other._precedence()

    def next_patch(self) -> SemanticVersion:
        """The smallest release that is higher."""
        patch = self.patch if self.prerelease else self.patch + 1
        return SemanticVersion(self.major, self.minor, patch)

    def _precedence(self) -> tuple[object, ...]:
        # Numbers stand before words, and a release after all that lead to it.
        words = tuple((0, int(w), "") if w.isdigit() else (1, 0, w) for w in self.prerelease)
        return (self.major, self.minor, self.patch, not self.prerelease, words)


FIRST_VERSION = SemanticVersion(1, 0, 0)


def is_version(text: str) -> bool:
    return len(text) <= MAX_CHARACTERS and VERSION.fullmatch(text) is not None


def parse_version(text: str) -> SemanticVersion:
    match = VERSION.fullmatch(text) if len(text) <= MAX_CHARACTERS else None
    if match is None:
        raise InvalidRequest(
            f"{text[:100]!r} is not a version. Write three numbers such as 1.4.2, or 2.0.0-rc.1."
        )
    words = tuple(match["prerelease"].split(".")) if match["prerelease"] else ()
    return SemanticVersion(int(match["major"]), int(match["minor"]), int(match["patch"]), words)


def highest(versions: list[SemanticVersion]) -> SemanticVersion | None:
    """A release if there is one; what leads to a release is never chosen before it."""
    releases = [version for version in versions if not version.prerelease]
    return max(releases or versions, default=None)
