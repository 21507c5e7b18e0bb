"""Receipts of the server: a draft that is filled in while a request is read and served."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from msgspec import UNSET
from starlette.requests import ClientDisconnect

from loramux.backend.text import Delta
from loramux.receipts.digests import TokenDigest, token_digests
from loramux.receipts.issuer import ReceiptIssuer
from loramux.receipts.receipt import Receipt, ServedAdapter, ServingStatus, base_label
from loramux.server.errors import error_info
from loramux.server.http.call import Call
from loramux.server.naming.names import NamedAdapter, Selected, full_name
from loramux.types.caller import ANONYMOUS, Caller
from loramux.types.request import Request, RequestFacts
from loramux.wire.text import PromptTokensDetails, Usage


class UsageCount:
    """The usage of a generation, from the deltas so far."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._num_prompt_tokens = sum(len(one.prompt_token_ids) for one in requests)
        self._num_completion_tokens = 0
        self._num_reused: dict[int, int] = {}

    def add(self, request_index: int, delta: Delta) -> None:
        self._num_completion_tokens += len(delta.token_ids)
        if delta.num_reused is not None:
            # A prompt counts once for all its choices: others reuse what the first computed.
            before = self._num_reused.get(request_index, delta.num_reused)
            self._num_reused[request_index] = min(before, delta.num_reused)

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            total_tokens=self._num_prompt_tokens + self._num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._num_reused.values())),
        )


ON_DEVICE = "device"
ID_PREFIX = "rcpt_"
MS_PER_S = 1000.0
MAX_REASON_CHARACTERS = 300
MAX_ASKED_CHARACTERS = 200
NO_FACTS = RequestFacts(None, 0.0, 0, 0.0, 0)
BaseIdentity = Callable[[], tuple[str, str]]
"""Returns name and digest of the base model; both are empty until the engine has started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Milliseconds from the arrival of a request."""

    checked_ms: float
    """To its engine requests."""
    queue_ms: float
    """How long these waited for their first step."""
    first_ms: float | None
    """To the first token; None: there is none yet."""
    total_ms: float
    """To now."""


class TokenDigests:
    """Digests of the prompts of engine requests, and of their answers so far."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.prompts = token_digests(one.prompt_token_ids for one in requests)
        # A request for a vector has no answer in tokens.
        self._answers = [
            [] if one.pooling is not None else [TokenDigest() for _ in range(one.params.n)]
            for one in requests
        ]

    def add(self, request_index: int, delta: Delta) -> None:
        if delta.token_ids:
            self._answers[request_index][delta.index].add(delta.token_ids)

    @property
    def answers(self) -> tuple[str, ...]:
        return tuple(choice.text for choices in self._answers for choice in choices)


class ReceiptDraft:
    """The receipt of one request; it is issued when the request is refused or has ended."""

    def __init__(
        self, issuer: ReceiptIssuer, base: BaseIdentity, caller: Caller = ANONYMOUS
    ) -> None:
        self.id = ID_PREFIX + secrets.token_hex(16)
        self.asked: str | None = None
        """The model, adapter or artifact that the request names."""
        self.selected: Selected | None = None
        """None: the request was refused before its adapters were resolved."""
        self.receipt: Receipt | None = None
        """Set when the request has ended, if receipts are on."""
        self.on_drop: Callable[[], None] = lambda: None
        """Called if the request was refused and its receipt is one too many."""
        self._issuer = issuer
        self._base = base
        self._caller = caller
        self._arrived_at = time.time()
        self._arrived_s = time.monotonic()
        self._usage = UsageCount(())
        self._digests: TokenDigests | None = None
        self._adapters: dict[str, NamedAdapter] = {}
        self._facts = NO_FACTS
        self._checked_ms = 0.0
        self._ttft_ms: float | None = None
        self._has_ended = False
        self._is_refused = False

    @property
    def num_tokens(self) -> int | None:
        """Prompt and output tokens so far; None: the request was refused."""
        return None if self._is_refused else self._usage.usage().total_tokens

    @property
    def timing(self) -> Timing:
        return Timing(
            checked_ms=self._checked_ms,
            queue_ms=self._facts.queue_s * MS_PER_S,
            first_ms=self._ttft_ms,
            total_ms=self._elapsed_ms(),
        )

    @property
    def is_streamed(self) -> bool:
        return self._issuer.in_streams and self.receipt is not None

    def serve(self, requests: Sequence[Request]) -> None:
        """Begin to count the tokens of these requests to the engine."""
        self._usage = UsageCount(requests)
        if self._issuer.is_on and self._issuer.has_digests:
            self._digests = TokenDigests(requests)
        self._checked_ms = self._elapsed_ms()

    def add_adapters(self, selected: Selected) -> None:
        """Record the adapters with which a request goes to the engine."""
        self._adapters |= {adapter.cid: adapter for adapter in selected.adapters}

    def add_delta(self, request_index: int, delta: Delta) -> None:
        if self._ttft_ms is None:
            self._ttft_ms = self._elapsed_ms()
        if delta.facts is not None:
            self._facts = slowest(self._facts, delta.facts)
        self._usage.add(request_index, delta)
        if self._digests is not None:
            self._digests.add(request_index, delta)

    def refuse(self, error: Exception) -> None:
        """End a request that the engine has not seen."""
        if self.selected is not None:
            self.add_adapters(self.selected)
        self.end(ServingStatus.REFUSED, error)

    def end(self, status: ServingStatus, error: Exception | None = None) -> None:
        """Issue the receipt; only the first call counts."""
        if not self._has_ended:
            self._has_ended = True
            self._is_refused = status is ServingStatus.REFUSED
            if not self._issuer.is_on:
                return
            if self._is_refused and not self._issuer.refusals.take():
                self.on_drop()
            else:
                self.receipt = self._issuer.issue(self._write(status, error))

    def _elapsed_ms(self) -> float:
        return round((time.monotonic() - self._arrived_s) * MS_PER_S, 3)

    def _write(self, status: ServingStatus, error: Exception | None) -> Receipt:
        facts, usage = self._facts, self._usage.usage()
        base_name, base_digest = self._base()
        named = list(self._adapters.values())
        adapters = tuple(served_adapter(part) for one in named for part in one.parts or (one,))
        # A version that is a recipe stands among the adapters, with its recipe.
        recipe = next((one.recipe for one in named if one.parts), None)
        info = None if error is None else error_info(error)
        is_refused = status is ServingStatus.REFUSED and self.asked is not None
        digests = None if status is ServingStatus.REFUSED else self._digests
        return Receipt(
            id=self.id,
            time=self._arrived_at,
            tenant=self._caller.tenant or self._issuer.home_tenant,
            api_key_id=self._caller.key_id or UNSET,
            base_model=base_label(base_name, base_digest),
            base_digest=base_digest,
            adapter_cid=next((one.cid for one in named if one.weight != 0), None),
            adapters=adapters,
            combination=UNSET if recipe is None else recipe.to_dict(),
            pool_id=self._issuer.pool_id,
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
            prompt_digests=UNSET if digests is None else digests.prompts,
            answer_digests=UNSET if digests is None else digests.answers,
            status=status,
            asked=(self.asked or "")[:MAX_ASKED_CHARACTERS] if is_refused else UNSET,
            http_status=UNSET if info is None else info.code,
            reason=UNSET if info is None else info.message[:MAX_REASON_CHARACTERS],
        )


def served_adapter(adapter: NamedAdapter) -> ServedAdapter:
    resolved = adapter.resolved
    if resolved is None:
        return ServedAdapter(cid=adapter.cid, weight=adapter.weight, name=adapter.given)
    return ServedAdapter(
        cid=adapter.cid,
        weight=adapter.weight,
        tenant=resolved.tenant,
        name=resolved.name,
        version=resolved.version,
        alias=resolved.alias,
        signed_by=resolved.signed_by or UNSET,
        part_of=UNSET if adapter.part_of is None else full_name(adapter.part_of),
        recipe_cid=UNSET if adapter.version_cid == adapter.cid else adapter.version_cid,
        recipe=UNSET if resolved.recipe is None else resolved.recipe.to_dict(),
    )


DraftT = TypeVar("DraftT", bound=ReceiptDraft)


@contextmanager
def receipt_draft(issuer: ReceiptIssuer, base: BaseIdentity, http: Call) -> Iterator[ReceiptDraft]:
    """Yield the draft of a request's receipt; an error inside the context is a refusal."""
    with refusing(ReceiptDraft(issuer, base, http.known_caller), issuer, http) as draft:
        yield draft


@contextmanager
def refusing(draft: DraftT, issuer: ReceiptIssuer, http: Call) -> Iterator[DraftT]:
    """End the draft of a receipt as refused if the context raises an error."""
    draft.on_drop = lambda: setattr(http.facts, "receipt_id", None)
    try:
        yield draft
    except ClientDisconnect:
        raise
    except Exception as error:
        if issuer.stores_refusals:
            http.facts.receipt_id = draft.id
            draft.refuse(error)
        raise


def slowest(first: RequestFacts, second: RequestFacts) -> RequestFacts:
    """Combine the facts of several prompts of one request: those of the slowest count."""
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
