"""GET /v1/usage and /v1/audit: what was used and changed, and for which keys."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime

from loramux.registry.audit import Action
from tests.unit.server.asgi_client import chat, get, post, request
from tests.unit.server.registry_app import Make


def test_usage_adds_up_the_receipts_of_a_day(registry_app: Make) -> None:
    found = registry_app()
    found.push("default/sql@1.0.0", 1)
    for model in (None, None, "default/sql"):
        assert chat(found.app, **({} if model is None else {"model": model})).status_code == 200
    rows = get(found.app, "/v1/usage").json()["data"]
    today = str(datetime.now(UTC).date())
    assert {(row["day"], row["adapter"], row["requests"]) for row in rows} == {
        (today, "", 2),
        (today, "default/sql", 1),
    }
    answer = get(found.app, "/v1/usage?format=csv")
    assert answer.headers["content-type"].startswith("text/csv")
    written = list(csv.DictReader(io.StringIO(answer.text)))
    assert [row["requests"] for row in written] == [str(row["requests"]) for row in rows]
    assert get(found.app, "/v1/usage?tenant=other").json()["data"] == []
    assert get(found.app, "/v1/usage?since=2020-01-01&until=2020-12-31").json()["data"] == []


def test_invalid_queries_name_their_field(registry_app: Make) -> None:
    app = registry_app().app
    for query, param in (
        ("usage?since=x", "since"),
        ("usage?until=2020-13-01", "until"),
        ("usage?since=2020-02-01&until=2020-01-01", "since"),
        ("usage?format=xml", "format"),
        ("audit?action=x", "action"),
        ("audit?limit=0", "limit"),
        ("audit?limit=100000", "limit"),
        ("audit?before=-1", "before"),
    ):
        answer = get(app, f"/v1/{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_changes_over_http_are_logged_with_address_and_result(registry_app: Make) -> None:
    found = registry_app()
    found.push("default/sql@1.0.0", 1)
    path = "/v1/adapters/default/sql"
    assert post(found.app, f"{path}/promote", {"version": "1.0.0"}).status_code == 200
    assert post(found.app, f"{path}/promote", {"version": "9.0.0"}).status_code == 404
    assert post(found.app, f"{path}/pin", {}).status_code == 200
    assert request(found.app, "DELETE", f"{path}/pin").status_code == 200
    assert request(found.app, "DELETE", f"{path}@prod").status_code == 200
    entries = get(found.app, "/v1/audit?limit=5").json()["data"]
    assert [(one["action"], one["result"]) for one in entries] == [
        (Action.DELETE, "ok"),
        (Action.UNPIN, "ok"),
        (Action.PIN, "ok"),
        (Action.PROMOTE, "refused"),
        (Action.PROMOTE, "ok"),
    ]
    assert {one["actor"]["address"] for one in entries} == {"127.0.0.1"}
    assert "9.0.0" in entries[3]["reason"]
    older = get(found.app, f"/v1/audit?before={entries[-1]['number']}").json()["data"]
    assert [one["action"] for one in older] == [Action.PUSH]
    pins = get(found.app, "/v1/audit?action=pin&tenant=default").json()["data"]
    assert [one["target"] for one in pins] == ["default/sql"]
    assert not found.registry.audit.verify().faults


def test_the_default_selection_of_llama_cpps_routes_is_logged(registry_app: Make) -> None:
    found = registry_app(allow_runtime_lora_updating=True)
    path = "/lora-adapters"
    assert post(found.app, path, [{"id": 1, "scale": 0.5}]).status_code == 200
    assert post(found.app, path, [{"id": 99, "scale": 1}]).status_code == 400
    entries = get(found.app, "/v1/audit?action=select").json()["data"]
    assert [(one["result"], one["details"]) for one in entries] == [
        ("refused", {}),
        ("ok", {"adapters": {"team/polite": 0.5}}),
    ]
    assert "99" in entries[0]["reason"] and entries[1]["tenant"] == "default"
