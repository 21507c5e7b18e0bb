"""The caller of a request: made once by middleware, and carried to the engine and the receipt."""

from __future__ import annotations

from dataclasses import dataclass

from loramux.types.access import ALL_SCOPES, KeyScope
from loramux.types.expected import Expected


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant and user of a request, and what they may do."""

    tenant: str = ""
    """Requests without a tenant share the empty one, which means the home tenant."""
    user: str | None = None
    """The `user` field of the body."""
    scopes: frozenset[KeyScope] = ALL_SCOPES
    key_id: str | None = None
    """The public part of the key; None: the request came without a key."""
    adapters: tuple[str, ...] | None = None
    """Patterns of the adapters that the key may use; None: all that its tenant may use."""
    may_use_base: bool = True
    """Whether the base may answer without an adapter."""
    ends_at: float | None = None
    """When the key or token ends; None: never."""
    is_operator: bool = True
    """Not bound to a tenant: sees the adapters, receipts and metrics of all."""
    expected: Expected | None = None
    """The contents of given names that may answer this request; None: any."""

    @property
    def confined_to(self) -> str | None:
        """The tenant that the caller is bound to; None: an operator."""
        return None if self.is_operator else self.tenant

    @property
    def sticky_key(self) -> str | None:
        """The key that assigns the caller to a version of a split alias."""
        return self.user or self.tenant or None


ANONYMOUS = Caller()
UNKNOWN = Caller(scopes=frozenset(), may_use_base=False, is_operator=False)
"""The caller of an open route whose key or tenant is invalid."""
