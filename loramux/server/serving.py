"""The receipt of one answer: what its deltas tell, gathered as they pass."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from msgspec import UNSET

from loramux.backend import Delta
from loramux.receipts import receipt as receipts
from loramux.receipts.receipt import Receipt, ServedAdapter, ServingStatus, base_label
from loramux.registry.names import DEFAULT_TENANT
from loramux.server.errors import error_info
from loramux.server.names import Selected
from loramux.server.usage import UsageCount
from loramux.types.request import Request, RequestFacts

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

ON_DEVICE = "device"
ID_PREFIX = "rcpt_"
MS_PER_S = 1000.0
MAX_REASON_CHARACTERS = 300
NO_FACTS = RequestFacts(None, 0.0, 0, 0.0, 0)


class ReceiptQueue(Protocol):
    """The part of a ReceiptWriter that the server uses."""

    @property
    def num_dropped(self) -> int: ...

    def add(self, receipt: Receipt) -> None: ...

    def find(self, receipt_id: str) -> Receipt | None: ...


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float = field(default_factory=time.time)
    """Seconds since 1970."""
    clock_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptDesk:
    """How this server writes receipts."""

    is_on: bool = True
    in_streams: bool = False
    """As one more event before the end, without choices."""
    pool_id: str = "local"
    home_tenant: str = DEFAULT_TENANT
    """Of requests that name no tenant."""
    key: Ed25519PrivateKey | None = None
    writer: ReceiptQueue | None = None
    """None: they are given to the client, and not kept."""

    @property
    def num_dropped(self) -> int:
        """Receipts that could not be stored."""
        return 0 if self.writer is None else self.writer.num_dropped

    @property
    def keeps_refusals(self) -> bool:
        """They are not in the answer, so that nobody could read what is not kept."""
        return self.is_on and self.writer is not None

    def issue(self, receipt: Receipt) -> Receipt:
        issued = receipt if self.key is None else receipts.signed(receipt, self.key)
        if self.writer is not None:
            self.writer.add(issued)
        return issued


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What stays the same through all of an answer."""

    base_name: str
    base_digest: str
    tenant: str
    selected: Selected | None
    """None: the request was refused before its adapter was resolved."""
    arrival: Arrival
    asked: str | None = None
    """What the request named; kept of one that is refused."""


class ServingRecord:
    def __init__(self, desk: ReceiptDesk, served: Served, jobs: Sequence[Request]) -> None:
        self.id = ID_PREFIX + secrets.token_hex(16)
        self.receipt: Receipt | None = None
        """Once the answer has ended, where receipts are written."""
        self._desk = desk
        self._served = served
        self._usage = UsageCount(jobs)
        self._cids: dict[str, None] = {}
        self._facts = NO_FACTS
        self._ttft_ms: float | None = None
        self._has_ended = False

    @property
    def is_streamed(self) -> bool:
        return self._desk.in_streams and self.receipt is not None

    def begin(self, cid: str) -> None:
        """A job goes to the engine on this adapter."""
        self._cids[cid] = None

    def saw(self, job_index: int, delta: Delta) -> None:
        if self._ttft_ms is None:
            self._ttft_ms = self._elapsed_ms()
        if delta.facts is not None:
            self._facts = slower(self._facts, delta.facts)
        self._usage.add(job_index, delta)

    def end(self, status: ServingStatus, error: Exception | None = None) -> None:
        """Only the first end counts."""
        if not self._has_ended:
            self._has_ended = True
            if self._desk.is_on:
                self.receipt = self._desk.issue(self._write(status, error))

    def _elapsed_ms(self) -> float:
        return round((time.monotonic() - self._served.arrival.clock_s) * MS_PER_S, 3)

    def _write(self, status: ServingStatus, error: Exception | None) -> Receipt:
        served, facts, usage = self._served, self._facts, self._usage.usage()
        adapters = tuple(self._served_adapter(cid) for cid in self._cids)
        info = None if error is None else error_info(error)
        is_refused = status is ServingStatus.REFUSED
        return Receipt(
            id=self.id,
            time=served.arrival.at,
            tenant=served.tenant or self._desk.home_tenant,
            base_model=base_label(served.base_name, served.base_digest),
            base_digest=served.base_digest,
            adapter_cid=adapters[0].cid if adapters else None,
            adapters=adapters,
            pool_id=self._desk.pool_id,
            tier_found=facts.tier_found,
            cold_miss=facts.tier_found not in (None, ON_DEVICE),
            load_ms=round(facts.load_s * MS_PER_S, 3),
            queue_depth=facts.queue_depth,
            queue_ms=round(facts.queue_s * MS_PER_S, 3),
            ttft_ms=self._ttft_ms,
            latency_ms=self._elapsed_ms(),
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            reused_tokens=usage.prompt_tokens_details.cached_tokens,
            distinct_adapters=facts.num_distinct,
            status=status,
            asked=served.asked if is_refused and served.asked is not None else UNSET,
            http_status=UNSET if info is None else info.code,
            reason=UNSET if info is None else info.message[:MAX_REASON_CHARACTERS],
        )

    def _served_adapter(self, cid: str) -> ServedAdapter:
        selected = self._served.selected
        assert selected is not None, "an adapter is served only after it was selected"
        resolved = selected.resolved
        if resolved is None:
            return ServedAdapter(cid=cid, weight=selected.weight, name=selected.name)
        return ServedAdapter(
            cid=cid,
            weight=selected.weight,
            tenant=resolved.tenant,
            name=resolved.name,
            version=resolved.version,
            alias=resolved.alias,
        )


def slower(first: RequestFacts, second: RequestFacts) -> RequestFacts:
    """Of several prompts in one request, what the slowest went through."""
    if first is NO_FACTS:
        return second
    later = second if second.load_s > first.load_s else first
    return RequestFacts(
        tier_found=later.tier_found,
        load_s=later.load_s,
        queue_depth=max(first.queue_depth, second.queue_depth),
        queue_s=max(first.queue_s, second.queue_s),
        num_distinct=max(first.num_distinct, second.num_distinct),
    )
