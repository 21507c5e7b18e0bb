"""The errors that loramux raises on purpose; the server and the CLI map them to replies."""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Sequence


class LoramuxError(Exception):
    """Base of all errors that a user can cause or must see."""

    is_audited = False
    """Whether the audit log has an entry of this refusal."""


class InvalidRequest(LoramuxError):
    """A field of a request or a setting has an invalid value."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or prompt and answer together, are longer than the model's context."""

    code = "context_length_exceeded"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        # Some clients know the error by this word alone, and see nothing but the message.
        super().__init__(f"{message} ({self.code})", param=param)


class UnsupportedModel(LoramuxError):
    """The base model cannot be served: unknown architecture, invalid config or missing files."""


class ModelNotFetched(LoramuxError):
    """The base model is neither on this machine nor could it be fetched from the hub."""


class AdapterNotFound(LoramuxError):
    """The named adapter does not exist."""


class RecordNotFound(LoramuxError):
    """The registry has no such tenant or key."""


class Refusal(LoramuxError):
    """An input that must not be used, with the fix.

    `code` is a stable short word for programs ("wrong_shape"), the message says what is wrong, and
    `fix` what to do about it.
    """

    def __init__(self, code: str, message: str, *, fix: str = "") -> None:
        super().__init__(f"{message} {fix}".strip())
        self.code = code
        self.reason = message
        self.fix = fix


class AdapterRefused(Refusal):
    """The adapter must not be served."""


class DoesNotFit(LoramuxError):
    """A request or an adapter does not fit into the page pool, even if the pool is empty."""


class EngineBusy(LoramuxError):
    """The queue is full; the request may be retried after retry_after_s."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(LoramuxError):
    """A request is over a limit of its tenant or key; `limit` is the name of the limit.

    It may be retried after retry_after_s; None: never, because it is larger than the limit.
    """

    def __init__(self, message: str, *, limit: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.code = limit
        self.retry_after_s = retry_after_s


class QuotaExceeded(LoramuxError):
    """A change would exceed a limit of its tenant or key; `limit` is the name of the limit."""

    def __init__(self, message: str, *, limit: str) -> None:
        super().__init__(message)
        self.code = limit


class RequestTimeout(LoramuxError):
    """The time limit of the request expired before its last token."""


class EngineStopped(LoramuxError):
    """The engine died, hung or is shutting down; the output so far is incomplete."""


class EngineDied(EngineStopped):
    """The engine process ended, or was killed, before it was ready, and gave no reason."""

    def __init__(self, message: str, *, kill_cause: str | None = None) -> None:
        """`kill_cause`: why the server killed it; None: it ended by itself."""
        super().__init__(message)
        self.kill_cause = kill_cause


class RegistryConflict(LoramuxError):
    """The name is already in use, or another writer was first; nothing was changed."""


class RegistryUnavailable(LoramuxError):
    """The registry's database cannot be reached, or was busy for too long."""

    def __init__(self, message: str, *, client_message: str | None = None) -> None:
        """`client_message` is what clients of a server see, without the database's address."""
        super().__init__(message)
        self.client_message = client_message or message


class StoreFull(LoramuxError):
    """The adapter store has reached its own limit or that of the disk."""


class StoreDamaged(LoramuxError):
    """Bytes in the adapter store do not match their digest."""


class FilesUnavailable(LoramuxError):
    """This machine has no descriptors, memory or permission for files of the server."""


def machine_error(error: OSError) -> LoramuxError | None:
    """Return the error of a machine that lacks something, without paths; None: it is another."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull("The disk of this server is full.")
    if error.errno in (errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return FilesUnavailable(
            f"The server cannot use its files now: {os.strerror(error.errno)}. Its log has more."
        )
    return None


class SourceRefused(Refusal):
    """The source id or its bytes must not be fetched."""


class SourceForbidden(SourceRefused):
    """This server or its credentials may not read a valid source id."""


class SourceNotFound(LoramuxError):
    """The source has no such repository, revision or file."""


class SourceFailed(LoramuxError):
    """The source could not be reached, broke off, or sent other bytes than announced."""

    def __init__(
        self, message: str, *, is_temporary: bool = True, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.is_temporary = is_temporary
        self.retry_after_s = retry_after_s


class SourceChanged(SourceFailed):
    """The file changed since it was found, so its partial data is useless."""


def suggest(word: str, known: Sequence[str]) -> str:
    """Return a sentence for an error message that names the valid values nearest to a
    misspelt one.
    """
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    if close:
        return f"Did you mean {' or '.join(close)}?"
    return f"Valid values: {', '.join(known)}."
