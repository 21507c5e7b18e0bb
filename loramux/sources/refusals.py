"""The stable codes of the reasons for which a source is refused."""

from __future__ import annotations

from enum import StrEnum

from loramux.errors import SourceRefused


class SourceCode(StrEnum):
    BAD_FORM = "bad_form"
    """The id does not have the form of its source."""
    UNKNOWN_SOURCE = "unknown_source"
    NOT_ENABLED = "not_enabled"
    NOT_ALLOWED = "not_allowed"
    """The id is valid, but outside the allowed roots, hosts, buckets or owners."""
    LINK_OUTSIDE = "link_outside"
    PRIVATE_ADDRESS = "private_address"
    BAD_REDIRECT = "bad_redirect"
    NO_ACCESS = "no_access"
    """The source does not accept the server's credentials."""
    TOO_LARGE = "too_large"
    PICKLE = "pickle"
    ARCHIVE = "archive"
    LFS_POINTER = "lfs_pointer"
    NOT_AN_ADAPTER = "not_an_adapter"
    OVERSIZED_HEADER = "oversized_header"
    ENCODED_BODY = "encoded_body"


def bad_form(message: str, *, fix: str) -> SourceRefused:
    return SourceRefused(SourceCode.BAD_FORM, message, fix=fix)


def pickle_refused(what: str) -> SourceRefused:
    return SourceRefused(
        SourceCode.PICKLE,
        f"{what} is a pickle, which can run code when it is opened.",
        fix="Download it and run `loramux convert`, or save it with safe_serialization=True.",
    )


def archive_refused(what: str) -> SourceRefused:
    return SourceRefused(
        SourceCode.ARCHIVE,
        f"{what} is an archive; adapters are fetched as plain files only.",
        fix="Unpack it and give the folder that holds adapter_config.json.",
    )


def too_large(what: str, size_bytes: int, max_bytes: int) -> SourceRefused:
    return SourceRefused(
        SourceCode.TOO_LARGE,
        f"{what} has {size_bytes} bytes or more; at most {max_bytes} are allowed.",
        fix="Save the adapter in a smaller dtype or rank, or raise the sources' limits.",
    )
