"""Receipts of requests that are refused before they reach the engine."""

from __future__ import annotations

from typing import Any

import pytest

from loramux.backend.host import Health
from loramux.errors import EngineBusy
from loramux.receipts.issuer import ReceiptIssuer
from tests.unit.server.asgi_client import CHAT, COMPLETIONS, chat, complete, get, make_app, post
from tests.unit.server.registry_app import Make, RegistryApp
from tests.unit.server.scripted_backend import ScriptedBackend

RUN = "/v1/run"


def told(served: RegistryApp, response: Any) -> dict[str, Any]:
    """Return the receipt of the answer, as the server has kept it."""
    receipt_id = response.headers["x-loramux-receipt"]
    found = get(served.app, f"/v1/receipts/{receipt_id}")
    assert found.status_code == 200, "an answer has the id of a receipt that is not there"
    body: dict[str, Any] = found.json()
    return body


@pytest.mark.parametrize(
    ("path", "body", "status", "asked"),
    [
        (COMPLETIONS, {"model": "parrot", "prompt": "x"}, 404, "parrot"),
        (COMPLETIONS, {"adapters": ["a", "b"], "prompt": "x"}, 404, "a+b"),
        (COMPLETIONS, {"model": "legal", "prompt": "x", "temperature": -1}, 400, "legal"),
        (COMPLETIONS, {"model": "legal", "prompt": "x", "max_tokens": 10**9}, 400, "legal"),
        (CHAT, {"model": "acme/sql@9.9.9", "messages": []}, 404, "acme/sql@9.9.9"),
        (CHAT, {"model": "m" * 999, "messages": []}, 404, "m" * 200),
        (RUN, {"artifact": "acme/none", "input": "x"}, 404, "acme/none"),
        (CHAT, {"model": "legal", "messages": [], "tools": [{}]}, 400, "legal"),
        (RUN, b"{", 400, None),
    ],
)
def test_the_receipt_has_the_model_and_the_reason(
    registry_app: Make, path: str, body: Any, status: int, asked: str | None
) -> None:
    served = registry_app(tenant_header="x-tenant")
    arguments = {} if isinstance(body, bytes) else {"headers": {"x-tenant": "acme"}}
    response = post(served.app, path, body, **arguments)
    assert response.status_code == status
    receipt = told(served, response)
    assert (receipt["status"], receipt["http_status"]) == ("refused", status)
    assert receipt.get("asked") == asked
    assert response.json()["error"]["message"].startswith(receipt["reason"])
    assert receipt["tenant"] == ("default" if isinstance(body, bytes) else "acme")
    assert receipt["ttft_ms"] is None and receipt["completion_tokens"] == 0
    if status == 404 or asked is None:
        assert receipt["adapter_cid"] is None and receipt["adapters"] == []


def test_a_resolved_adapter_is_named_but_not_counted_as_used(registry_app: Make) -> None:
    served = registry_app()
    cid = served.push("acme/sql@1.0.0", 1)
    response = complete(served.app, model="acme/sql", max_tokens=10**9)
    receipt = told(served, response)
    assert receipt["adapter_cid"] == cid and receipt["adapters"][0]["version"] == "1.0.0"
    assert served.registry.usage(cid) is None


def test_a_full_queue_is_a_refusal(registry_app: Make) -> None:
    served = registry_app()

    async def full(job: Any) -> Any:
        raise EngineBusy("Too many.")
        yield

    served.backend.script = full
    receipt = told(served, chat(served.app))
    assert (receipt["status"], receipt["http_status"]) == ("refused", 429)


def test_an_engine_that_is_starting_is_a_refusal(registry_app: Make) -> None:
    served = registry_app()
    served.backend.health = Health.STARTING
    response = complete(served.app)
    assert response.status_code == 503
    assert served.writer.receipts[0].id == response.headers["x-loramux-receipt"]
    assert served.writer.receipts[0].base_digest == ""


@pytest.mark.parametrize("issuer", [ReceiptIssuer(), ReceiptIssuer(is_on=False)])
def test_a_receipt_that_is_not_stored_has_no_header(issuer: ReceiptIssuer) -> None:
    response = complete(make_app(ScriptedBackend(), receipts=issuer), model="parrot")
    assert response.status_code == 404
    assert "x-loramux-receipt" not in response.headers
