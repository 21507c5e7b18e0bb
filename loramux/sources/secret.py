"""Credentials that cannot be shown by accident."""

from __future__ import annotations

import base64
import hmac
from collections.abc import Iterable
from urllib.parse import quote, quote_plus

from loramux.errors import InvalidRequest, LoramuxError, SourceRefused

HIDDEN = "***"


class Secret:
    """Only `reveal` shows it; its text and repr are stars."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        if not value:
            raise InvalidRequest("A credential is empty. Leave it out, or give its value.")
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return f"Secret({HIDDEN})"

    def __str__(self) -> str:
        return HIDDEN

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self._value.encode(), other._value.encode())

    def __hash__(self) -> int:
        return hash((Secret, self._value))


def scrub(text: str, secrets: Iterable[Secret]) -> str:
    """The text without the secrets, as they are or as URLs and headers write them."""
    forms = {form for secret in secrets for form in written_forms(secret.reveal())}
    # Longest first: one secret may be a part of another.
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, HIDDEN)
    return text


def written_forms(value: str) -> set[str]:
    encoded = base64.b64encode(value.encode()).decode()
    return {value, quote(value), quote(value, safe=""), quote_plus(value), encoded}


def scrub_error(error: LoramuxError, secrets: Iterable[Secret]) -> None:
    hidden = tuple(secrets)
    error.args = tuple(
        scrub(part, hidden) if isinstance(part, str) else part for part in error.args
    )
    if isinstance(error, SourceRefused):
        error.reason, error.fix = scrub(error.reason, hidden), scrub(error.fix, hidden)
