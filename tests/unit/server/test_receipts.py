"""GET /v1/receipts: found by id, by adapter, by tenant, by slowness."""

from __future__ import annotations

from typing import Any

import pytest

from loramux.receipts.receipt import Receipt
from tests.unit.server.asgi_client import COMPLETIONS, complete, get, make_app, post
from tests.unit.server.registry_app import Make, RegistryApp
from tests.unit.server.scripted_backend import named


def found(served: RegistryApp, query: str) -> list[dict[str, Any]]:
    response = get(served.app, f"/v1/receipts?{query}")
    assert response.status_code == 200, response.text
    data: list[dict[str, Any]] = response.json()["data"]
    return data


def test_a_receipt_is_got_by_the_id_of_the_header(registry_app: Make) -> None:
    served = registry_app()
    cid = served.push("acme/sql@1.0.0", 1)
    response = complete(served.app, model="acme/sql")
    told = response.json()["serving"]
    got = get(served.app, f"/v1/receipts/{response.headers['x-loramux-receipt']}").json()
    assert got == told
    (adapter,) = got["adapters"]
    assert adapter == {
        "cid": cid,
        "weight": 1.0,
        "tenant": "acme",
        "name": "sql",
        "version": "1.0.0",
        "alias": "latest",
    }


def test_one_that_is_not_stored_yet_is_got_from_the_writer(registry_app: Make) -> None:
    served = registry_app()
    complete(served.app)
    (receipt,) = served.writer.receipts
    served.registry.prune_receipts(max_count=0)
    path = f"/v1/receipts/{receipt.id}"
    assert get(served.app, path).status_code == 404

    def find(receipt_id: str) -> Receipt | None:
        return receipt if receipt_id == receipt.id else None

    served.writer.find = find  # type: ignore[method-assign]
    assert get(served.app, path).json() == receipt.body()


def test_receipts_are_found_by_adapter_and_tenant(registry_app: Make) -> None:
    served = registry_app(tenant_header="X-Tenant")
    first, second = served.push("acme/sql@1.0.0", 1), served.push("acme/sql@1.1.0", 2)
    for tenant, model in [("acme", "acme/sql@1.0.0"), ("b", "acme/sql@1.1.0"), ("b", "legal")]:
        body = {"model": model, "prompt": "hi"}
        post(served.app, COMPLETIONS, body, headers={"x-tenant": tenant})

    def cids(query: str) -> set[str]:
        return {receipt["adapter_cid"] for receipt in found(served, query)}

    legal = named("legal").cid
    assert cids("adapter=acme/sql") == {first, second}
    assert cids("adapter=acme/sql@1.1.0") == {second}
    assert cids(f"adapter={first}") == {first}
    assert cids("adapter=legal") == {legal}
    assert cids("tenant=b") == {second, legal}
    assert len(found(served, "limit=2")) == 2
    assert found(served, "slow_ms=100000000") == []
    assert len(found(served, "slow_ms=0")) == 3
    assert get(served.app, "/v1/receipts?adapter=acme/none").status_code == 404


@pytest.mark.parametrize("query", ["slow_ms=x", "slow_ms=-1", "limit=nan", "limit=0", "limit=1e9"])
def test_odd_numbers_are_refused(registry_app: Make, query: str) -> None:
    assert get(registry_app().app, f"/v1/receipts?{query}").status_code == 400


def test_without_a_registry_the_error_names_the_flag() -> None:
    for path in ("/v1/receipts", "/v1/receipts/x"):
        response = get(make_app(), path)
        assert response.status_code == 404 and "--registry" in response.text
