"""Stores receipts in batches from a background thread, so that no request waits for a database."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol

from loramux.errors import LoramuxError
from loramux.receipts.receipt import Receipt, ServingStatus
from loramux.registry.records import StoredReceipt, Use

BATCH_RECEIPTS = 256
INTERVAL_S = 0.25
MAX_PENDING = 16_384
PRUNE_INTERVAL_S = 60.0
RETRY_S = 1.0

_log = logging.getLogger(__name__)


class ReceiptSink(Protocol):
    """The part of a registry that stores receipts and counts the uses of adapters.

    A method raises LoramuxError while its database cannot be reached; the writer then tries again.
    """

    def add_receipts(self, receipts: Iterable[StoredReceipt]) -> None: ...

    def add_uses(self, uses: Iterable[Use]) -> None: ...

    def prune_receipts(
        self, *, max_age_s: float | None = None, max_count: int | None = None
    ) -> int: ...


class ReceiptWriter:
    """Queues receipts and stores them in batches; close() stores all pending ones.

    All methods may be called from any thread.
    """

    def __init__(
        self,
        sink: ReceiptSink,
        *,
        max_age_s: float | None = None,
        max_count: int | None = None,
        max_pending: int = MAX_PENDING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Remove receipts older than max_age_s, or over max_count, once a minute."""
        self._sink = sink
        self._max_age_s = max_age_s
        self._max_count = max_count
        self._max_pending = max_pending
        self._clock = clock
        self._condition = threading.Condition()
        self._pending: dict[str, Receipt] = {}
        self._sending: dict[str, Receipt] = {}
        self._wants_flush = False
        self._is_closing = False
        self._num_dropped = 0
        self._num_stored = 0
        self._prune_at = clock()
        self._thread = threading.Thread(target=self._run, name="receipt-writer", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Receipts that were lost: the queue was full, or the registry could not store them."""
        return self._num_dropped

    @property
    def num_stored(self) -> int:
        return self._num_stored

    def add(self, receipt: Receipt) -> None:
        """Queues a receipt without blocking; a full queue drops its oldest receipt."""
        with self._condition:
            if self._is_closing:
                self._num_dropped += 1
                return
            self._pending[receipt.id] = receipt
            self._drop_excess()
            if len(self._pending) in (1, BATCH_RECEIPTS):
                self._condition.notify_all()

    def find(self, receipt_id: str) -> Receipt | None:
        """Return a receipt that is queued and not yet stored, or None."""
        with self._condition:
            return self._pending.get(receipt_id) or self._sending.get(receipt_id)

    def flush(self, *, timeout_s: float = 10.0) -> bool:
        """Blocks until the queue is empty; returns False on a timeout."""
        with self._condition:
            self._wants_flush = not self._is_idle()
            self._condition.notify_all()
            return self._condition.wait_for(self._is_idle, timeout_s)

    def close(self) -> None:
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        self._thread.join()

    def __enter__(self) -> ReceiptWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_idle(self) -> bool:
        return not self._pending and not self._sending

    def _drop_excess(self) -> None:
        while len(self._pending) > self._max_pending:
            del self._pending[next(iter(self._pending))]
            self._num_dropped += 1

    def _run(self) -> None:
        while True:
            self._prune_if_due()
            batch = self._next_batch()
            if batch is None:
                return
            if batch and not self._store(batch):
                self._put_back()

    def _next_batch(self) -> list[Receipt] | None:
        """Return the receipts to store: none when a prune is due, None when closed and drained."""
        with self._condition:
            if not self._condition.wait_for(self._has_work, self._prune_at - self._clock()):
                return []
            # Wait for more receipts, so that a transaction stores a batch.
            self._condition.wait_for(self._is_urgent, INTERVAL_S)
            if not self._pending:
                self._wants_flush = False
                return None if self._is_closing else []
            names = list(islice(self._pending, BATCH_RECEIPTS))
            self._sending = {name: self._pending.pop(name) for name in names}
            return list(self._sending.values())

    def _has_work(self) -> bool:
        return bool(self._pending) or self._is_closing

    def _is_urgent(self) -> bool:
        return self._is_closing or self._wants_flush or len(self._pending) >= BATCH_RECEIPTS

    def _store(self, batch: Sequence[Receipt]) -> bool:
        """Return False if the registry cannot be reached now; the batch may be stored later."""
        try:
            num_stored = self._add(batch)
        except LoramuxError as error:
            _log.warning("Receipts wait for the registry: %s", error)
            return False
        with self._condition:
            self._sending = {}
            self._num_stored += num_stored
            self._num_dropped += len(batch) - num_stored
            if not self._pending:
                self._wants_flush = False
            self._condition.notify_all()
        return True

    def _add(self, batch: Sequence[Receipt]) -> int:
        """Return the number of receipts that were stored."""
        try:
            self._sink.add_receipts(map(to_record, batch))
        except LoramuxError:
            raise
        # One row that the database rejects must not lose the rest of the batch.
        except Exception:
            if len(batch) > 1:
                return sum(self._add([receipt]) for receipt in batch)
            _log.exception("The receipt %s cannot be stored", batch[0].id)
            return 0
        self._count(batch)
        return len(batch)

    def _count(self, batch: Sequence[Receipt]) -> None:
        try:
            self._sink.add_uses(use for receipt in batch for use in uses_of(receipt))
        # Not retried: a second attempt could count the same uses twice.
        except Exception as error:
            _log.warning("The uses of %d receipts were not counted: %s", len(batch), error)

    def _put_back(self) -> None:
        with self._condition:
            self._pending = {**self._sending, **self._pending}
            self._sending = {}
            self._drop_excess()
            if self._is_closing:
                self._num_dropped += len(self._pending)
                self._pending.clear()
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._is_closing, RETRY_S)

    def _prune_if_due(self) -> None:
        now = self._clock()
        if now < self._prune_at:
            return
        self._prune_at = now + PRUNE_INTERVAL_S
        if self._max_age_s is None and self._max_count is None:
            return
        try:
            self._sink.prune_receipts(max_age_s=self._max_age_s, max_count=self._max_count)
        # The thread must survive, or all later receipts would be lost.
        except Exception as error:
            _log.warning("Old receipts could not be removed: %s", error)


def to_record(receipt: Receipt) -> StoredReceipt:
    """Return the row that the registry stores for a receipt."""
    return StoredReceipt(
        id=receipt.id,
        created_at=receipt.time,
        tenant=receipt.tenant,
        cid=receipt.adapter_cid,
        latency_ms=receipt.latency_ms,
        is_cold=receipt.cold_miss,
        body=receipt.body(),
    )


def uses_of(receipt: Receipt) -> Iterator[Use]:
    """Yield one use for each adapter and recipe of a request that ran; weight 0 is no use."""
    if receipt.status is ServingStatus.REFUSED:
        return
    used = [adapter for adapter in receipt.adapters if adapter.weight != 0]
    recipes = {one.recipe_cid for one in used if isinstance(one.recipe_cid, str)}
    for cid in [*(adapter.cid for adapter in used), *sorted(recipes)]:
        yield Use(
            cid=cid,
            num_prompt_tokens=receipt.prompt_tokens,
            num_output_tokens=receipt.completion_tokens,
            at=receipt.time,
        )
