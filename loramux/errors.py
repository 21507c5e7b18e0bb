"""The errors that loramux raises on purpose; the server and the CLI map them to replies."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class LoramuxError(Exception):
    """Base of all errors that a user can cause or must see."""


class InvalidRequest(LoramuxError):
    """A request field has a value that cannot be honoured."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnsupportedModel(LoramuxError):
    """The base model cannot be served: unknown architecture, odd config, missing files."""


class AdapterNotFound(LoramuxError):
    """No adapter where the request said it would be."""


class Refusal(LoramuxError):
    """Something that must not be used, with the fix.

    `code` is a stable short word for programs ("wrong_shape"), the message says what is wrong, and
    `fix` what to do about it.
    """

    def __init__(self, code: str, message: str, *, fix: str = "") -> None:
        super().__init__(f"{message} {fix}".strip())
        self.code = code
        self.reason = message
        self.fix = fix


class AdapterRefused(Refusal):
    """An adapter that must not be served."""


class DoesNotFit(LoramuxError):
    """A request or an adapter that could never fit into the page pool, even if it were empty."""


class EngineBusy(LoramuxError):
    """The queue is full; the same request may be sent again after retry_after_s."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestTimeout(LoramuxError):
    """The time that the request allowed was over before its last token."""


class EngineStopped(LoramuxError):
    """The engine died, hung or is shutting down; what had been answered so far is not complete."""


class RegistryConflict(LoramuxError):
    """A name already means something else, or another writer was first; nothing was changed."""


class RegistryUnavailable(LoramuxError):
    """The registry's database cannot be reached, or was busy for too long."""


class StoreFull(LoramuxError):
    """The adapter store has no room for more: its own limit, or the disk's."""


class StoreDamaged(LoramuxError):
    """Bytes in the adapter store are not those that their digest names."""


class SourceRefused(Refusal):
    """An id or its bytes that must not be fetched."""


class SourceForbidden(SourceRefused):
    """A sound id of a place that this server, or its credentials, may not read."""


class SourceNotFound(LoramuxError):
    """The source has no such repository, revision or file."""


class SourceFailed(LoramuxError):
    """The source could not be reached, broke off, or gave other bytes than it had promised."""

    def __init__(
        self, message: str, *, is_temporary: bool = True, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.is_temporary = is_temporary
        self.retry_after_s = retry_after_s


def suggest(word: str, known: Sequence[str]) -> str:
    """A sentence for an error message that names the valid values nearest to a misspelt one."""
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    if close:
        return f"Did you mean {' or '.join(close)}?"
    return f"Valid values: {', '.join(known)}."
