"""Signs and stores the receipts of a server."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from loramux.base.token_bucket import TokenBucket
from loramux.receipts.receipt import Receipt, signed
from loramux.registry.names import DEFAULT_TENANT

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


class ReceiptQueue(Protocol):
    """The part of a ReceiptWriter that the server uses."""

    @property
    def num_dropped(self) -> int: ...

    def add(self, receipt: Receipt) -> None: ...

    def find(self, receipt_id: str) -> Receipt | None: ...


class RefusalBudget:
    """Limits the receipts of refused requests, which cost a client nothing to send.

    At most `burst` at once, and `per_second` in the long run: 20 MB a day.
    """

    def __init__(
        self,
        *,
        burst: int = 256,
        per_second: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bucket = TokenBucket(burst, per_second, clock)
        self.num_dropped = 0

    def take(self) -> bool:
        """Return whether one more may be written."""
        if self._bucket.try_take():
            return True
        self.num_dropped += 1
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptIssuer:
    """Signs receipts and stores them, as the settings of the server say."""

    is_on: bool = True
    in_streams: bool = False
    """Streams end with an event that contains the receipt."""
    has_digests: bool = True
    """Receipts have digests of the token ids of prompts and answers."""
    pool_id: str = "local"
    home_tenant: str = DEFAULT_TENANT
    """Tenant of requests without one."""
    key: Ed25519PrivateKey | None = None
    writer: ReceiptQueue | None = None
    """None: receipts are sent to the client and not stored."""
    refusals: RefusalBudget = field(default_factory=RefusalBudget)

    @property
    def num_dropped(self) -> int:
        """Receipts that could not be stored, and those of too many refused requests."""
        num_stored_late = 0 if self.writer is None else self.writer.num_dropped
        return num_stored_late + self.refusals.num_dropped

    @property
    def stores_refusals(self) -> bool:
        """Receipts of refused requests are not part of the reply, so they exist only if stored."""
        return self.is_on and self.writer is not None

    def issue(self, receipt: Receipt) -> Receipt:
        issued = receipt if self.key is None else signed(receipt, self.key)
        if self.writer is not None:
            self.writer.add(issued)
        return issued
