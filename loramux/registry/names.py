"""Parses the names of adapters: references, versions, aliases and tenants."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import total_ordering

from loramux.adapters.identity import CID_PREFIX, is_digest_start, parse_digest_start
from loramux.errors import InvalidRequest

NUMBER = r"(?:0|[1-9][0-9]{0,8})"
WORD = r"(?:0|[1-9][0-9]{0,8}|[0-9]*[A-Za-z-][0-9A-Za-z-]*)"
VERSION = re.compile(
    rf"(?P<major>{NUMBER})\.(?P<minor>{NUMBER})\.(?P<patch>{NUMBER})"
    rf"(?:-(?P<prerelease>{WORD}(?:\.{WORD})*))?",
    re.ASCII,
)
MAX_VERSION_CHARACTERS = 64
DEFAULT_TENANT = "default"
LATEST = "latest"
PROD = "prod"
MAX_REFERENCE_CHARACTERS = 512
NAME = re.compile(r"[A-Za-z0-9](?:[._-]?[A-Za-z0-9]){0,127}", re.ASCII)
ALIAS = re.compile(r"[a-z](?:-?[a-z0-9]){0,62}", re.ASCII)
MAX_NAME_CHARACTERS = 128
MAX_ALIAS_CHARACTERS = 63


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
        """Return the next higher release."""
        patch = self.patch if self.prerelease else self.patch + 1
        return SemanticVersion(self.major, self.minor, patch)

    def _precedence(self) -> tuple[object, ...]:
        # Numbers sort before words, and a release after its prereleases.
        words = tuple((0, int(w), "") if w.isdigit() else (1, 0, w) for w in self.prerelease)
        return (self.major, self.minor, self.patch, not self.prerelease, words)


FIRST_VERSION = SemanticVersion(1, 0, 0)


def is_version(text: str) -> bool:
    return len(text) <= MAX_VERSION_CHARACTERS and VERSION.fullmatch(text) is not None


def parse_version(text: str) -> SemanticVersion:
    match = VERSION.fullmatch(text) if len(text) <= MAX_VERSION_CHARACTERS else None
    if match is None:
        raise InvalidRequest(
            f"{text[:100]!r} is not a version. Write three numbers such as 1.4.2, or 2.0.0-rc.1."
        )
    words = tuple(match["prerelease"].split(".")) if match["prerelease"] else ()
    return SemanticVersion(int(match["major"]), int(match["minor"]), int(match["patch"]), words)


def highest(versions: list[SemanticVersion]) -> SemanticVersion | None:
    """Return the highest release, or the highest prerelease if there is no release."""
    releases = [version for version in versions if not version.prerelease]
    return max(releases or versions, default=None)


@dataclass(frozen=True, slots=True, order=True)
class AdapterName:
    tenant: str
    name: str

    def __str__(self) -> str:
        return f"{self.tenant}/{self.name}"


@dataclass(frozen=True, slots=True)
class NameReference:
    """`tenant/name`, with at most one of version and alias."""

    adapter: AdapterName
    version: SemanticVersion | None = None
    alias: str | None = None

    def __str__(self) -> str:
        selector = self.alias if self.version is None else str(self.version)
        return f"{self.adapter}@{selector}" if selector else str(self.adapter)


@dataclass(frozen=True, slots=True)
class CidReference:
    """A CID, or the start of one."""

    digest_start: str

    def __str__(self) -> str:
        return CID_PREFIX + self.digest_start


Reference = NameReference | CidReference


def parse_reference(text: str, *, home_tenant: str = DEFAULT_TENANT) -> Reference:
    """Parse a name, of the home tenant by default, or a CID, with or without its prefix."""
    if len(text) > MAX_REFERENCE_CHARACTERS:
        raise InvalidRequest(
            f"The adapter's name has {len(text)} characters; at most {MAX_REFERENCE_CHARACTERS} "
            "are allowed."
        )
    if text.startswith(CID_PREFIX):
        return CidReference(parse_digest_start(text))
    if is_digest_start(text):
        return CidReference(text)
    return parse_name_reference(text, home_tenant=home_tenant)


def parse_name_reference(text: str, *, home_tenant: str = DEFAULT_TENANT) -> NameReference:
    path, at, selector = text.partition("@")
    adapter = parse_adapter_name(path, home_tenant=home_tenant)
    if not at:
        return NameReference(adapter)
    if is_version(selector):
        return NameReference(adapter, version=parse_version(selector))
    if ALIAS.fullmatch(selector):
        return NameReference(adapter, alias=selector)
    raise InvalidRequest(
        f"{selector[:100]!r} after the @ is neither a version such as 1.4.2 nor an alias such as "
        f"{PROD} (lower-case letters, digits and single hyphens)."
    )


def parse_push_reference(text: str, *, home_tenant: str = DEFAULT_TENANT) -> NameReference:
    """Parse the reference of a push, which has a version or none, but no alias."""
    parsed = parse_name_reference(text, home_tenant=home_tenant)
    if parsed.alias is not None:
        raise InvalidRequest(
            f"{text!r} ends with an alias. Push under a version such as 1.4.2, or without one."
        )
    return parsed


def parse_adapter_name(path: str, *, home_tenant: str = DEFAULT_TENANT) -> AdapterName:
    first, slash, rest = path.partition("/")
    if not slash:
        return AdapterName(check_name(home_tenant, "tenant"), check_name(first, "adapter"))
    return AdapterName(check_name(first, "tenant"), check_name(rest, "adapter"))


def check_name(text: str, kind: str) -> str:
    if len(text) > MAX_NAME_CHARACTERS or not NAME.fullmatch(text):
        raise InvalidRequest(
            f"{text[:100]!r} cannot be the name of a {kind}: letters, digits, and single . _ - "
            f"between them, at most {MAX_NAME_CHARACTERS}."
        )
    if is_digest_start(text):
        raise InvalidRequest(
            f"{text!r} cannot be the name of a {kind}: it looks like a content id. "
            "Add a letter after f."
        )
    return text


def check_alias(text: str) -> str:
    """Return a valid alias; refuse `latest`, which cannot be moved."""
    if text == LATEST:
        raise InvalidRequest(
            f"{LATEST} always names the highest version and cannot be moved. Use an alias such "
            f"as {PROD}."
        )
    if len(text) > MAX_ALIAS_CHARACTERS or not ALIAS.fullmatch(text):
        raise InvalidRequest(
            f"{text[:100]!r} cannot be an alias: it starts with a letter and has lower-case "
            f"letters, digits and single hyphens, at most {MAX_ALIAS_CHARACTERS}."
        )
    return text
