"""Receipts of requests that are refused before the engine hears of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.requests import ClientDisconnect, Request

from loramux.backend import Health
from loramux.receipts.receipt import ServingStatus
from loramux.server.context import Context
from loramux.server.names import Selected
from loramux.server.serving import Arrival, Served, ServingRecord
from loramux.server.serving_bodies import RunRequest
from loramux.server.terms import known_tenant
from loramux.server.wire import GenerationRequest

MAX_ASKED_CHARACTERS = 200


@dataclass(slots=True, kw_only=True)
class Draft:
    """What is known of a request so far."""

    tenant: str = ""
    arrival: Arrival = field(default_factory=Arrival)
    asked: str | None = None
    selected: Selected | None = None

    def read(self, request: GenerationRequest) -> None:
        named = "+".join(request.adapters or ()) or request.model
        if isinstance(request, RunRequest):
            named = request.artifact
        self.asked = None if named is None else named[:MAX_ASKED_CHARACTERS]


@contextmanager
def noting_refusals(context: Context, http: Request) -> Iterator[Draft]:
    """For all that comes before the engine; whatever is raised passes on."""
    draft = Draft(tenant=known_tenant(http.headers, context.options.tenant_header))
    try:
        yield draft
    except ClientDisconnect:
        raise
    except Exception as error:
        if context.receipts.keeps_refusals:
            http.state.receipt_id = _write(context, draft, error)
        raise


def _write(context: Context, draft: Draft, error: Exception) -> str:
    """The receipt's id."""
    is_known = context.backend.health is not Health.STARTING
    names = context.options.served_model_names
    served = Served(
        base_name=context.base_names[0] if is_known else "".join(names[:1]),
        base_digest=context.backend.card.digest if is_known else "",
        tenant=draft.tenant,
        selected=draft.selected,
        arrival=draft.arrival,
        asked=draft.asked,
    )
    record = ServingRecord(context.receipts, served, ())
    if draft.selected is not None and draft.selected.cid is not None:
        record.begin(draft.selected.cid)
    record.end(ServingStatus.REFUSED, error)
    return record.id
