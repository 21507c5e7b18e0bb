"""What the key of a tenant sees, uses and changes, route by route."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from loramux.registry.names import parse_name_reference
from loramux.types.access import KeyScope
from tests.unit.server.asgi_client import COMPLETIONS, request
from tests.unit.server.registry_app import Make, RegistryApp
from tests.unit.server.scripted_backend import CARD

CID = "cidv1:sha256:"


class Tenants:
    """Two tenants with an adapter each, and adapters that the operator has named."""

    def __init__(self, make: Make, **options: Any) -> None:
        self.served: RegistryApp = make(**options)
        self.sql = self.served.push("acme/sql@1.0.0", 1)
        self.newer = self.served.push("acme/sql@1.1.0", 2)
        self.secret = self.served.push("globex/secret@1.0.0", 3)
        self.acme, self.globex = self.served.key("acme"), self.served.key("globex")
        self.operator = self.served.key(None)

    def ask(self, key: dict[str, str], method: str, path: str, body: Any = None) -> httpx2.Response:
        given = {} if body is None else {"json": body}
        return request(self.served.app, method, path, headers=key, **given)

    def use(self, key: dict[str, str], model: str, **fields: Any) -> int:
        body = {"model": model, "prompt": "hi", "max_tokens": 2} | fields
        return self.ask(key, "POST", COMPLETIONS, body).status_code

    def models(self, key: dict[str, str]) -> set[str]:
        listed = self.ask(key, "GET", "/v1/models").json()["data"]
        return {entry["id"] for entry in listed}

    def adapters(self, key: dict[str, str]) -> dict[str, Any]:
        listed = self.ask(key, "GET", "/v1/adapters").json()
        assert listed["total"] == len(listed["data"])
        return {entry["id"]: entry for entry in listed["data"]}


@pytest.fixture
def tenants(registry_app: Make) -> Tenants:
    return Tenants(registry_app)


def test_a_tenant_uses_its_own_adapters_by_every_form_of_name(tenants: Tenants) -> None:
    forms = ["acme/sql", "sql", "sql@1.0.0", tenants.sql, tenants.sql[len(CID) :][:12], "tiny-base"]
    assert [tenants.use(tenants.acme, form) for form in forms] == [200] * len(forms)
    assert [tenants.use(tenants.globex, form) for form in forms] == [404] * 5 + [200]
    assert tenants.use(tenants.operator, "globex/secret") == 200


def test_foreign_and_missing_adapters_answer_alike_but_for_the_name(tenants: Tenants) -> None:
    tenants.use(tenants.globex, "secret")
    for method, path in [
        ("GET", "/v1/models/{}"),
        ("GET", "/v1/adapters/{}"),
        ("POST", "/v1/adapters/{}/pin"),
        ("POST", "/v1/adapters/{}/warm"),
        ("POST", "/v1/adapters/{}/promote"),
        ("DELETE", "/v1/adapters/{}"),
        ("GET", "/v1/receipts?adapter={}"),
    ]:
        body = {"version": "1.0.0"} if "promote" in path else None
        answers = []
        for name in ("globex/secret", "globex/absent", "acme/absent"):
            response = tenants.ask(tenants.acme, method, path.format(name), body)
            assert response.status_code == 404, (method, path, response.text)
            answers.append(response.text.replace(name, "NAME"))
        if "receipts" not in path:
            assert len(set(answers)) == 1, answers
        assert answers[0] == answers[1]


BY_CID = [
    ("GET", "/v1/adapters/{}", None),
    ("GET", "/v1/models/{}", None),
    ("GET", "/v1/doctor/{}", None),
    ("POST", "/v1/adapters/{}/pin", None),
    ("DELETE", "/v1/adapters/{}/pin", None),
    ("POST", "/v1/adapters/{}/warm", None),
    ("POST", "/v1/adapters/{}/promote", {"version": "1.0.0"}),
    ("POST", "/v1/adapters/{}/rollback", {}),
    ("POST", "/v1/adapters/{}/split", {"versions": {"1.0.0": 1}}),
    ("DELETE", "/v1/adapters/{}", None),
    ("GET", "/v1/receipts?adapter={}", None),
    ("GET", "/v1/adapters?search={}&stored=1", None),
    ("POST", COMPLETIONS, {"model": "CID", "prompt": "hi"}),
    (
        "POST",
        "/v1/chat/completions",
        {"model": "CID", "messages": [{"role": "user", "content": ""}]},
    ),
    ("POST", "/v1/run", {"artifact": "CID", "input": "hi"}),
    ("POST", "/generate", {"inputs": "hi", "parameters": {"adapter_id": "CID"}}),
    ("POST", "/api/show", {"model": "CID"}),
    ("POST", "/api/generate", {"model": "CID", "prompt": "hi"}),
    ("POST", "/tokenize", {"model": "CID", "prompt": "hi"}),
    ("POST", "/v1/load_lora_adapter", {"lora_name": "acme/mine", "lora_path": "CID"}),
    ("POST", "/v1/unload_lora_adapter", {"lora_name": "CID"}),
    ("POST", "/v1/images/generations", {"model": "CID", "prompt": "a fox"}),
]


@pytest.mark.parametrize("loaded", [True, False])
def test_no_route_tells_foreign_content_from_content_that_nobody_has(
    registry_app: Make, loaded: bool
) -> None:
    tenants = Tenants(registry_app, has_images=True)
    if loaded:
        assert tenants.use(tenants.globex, "secret") == 200
    absent = CID + "0" * 64
    for method, path, body in BY_CID:
        told = []
        for cid in (tenants.secret, absent):
            sent = None if body is None else json.loads(json.dumps(body).replace("CID", cid))
            answer = tenants.ask(tenants.acme, method, path.format(cid), sent)
            headers = {name for name in answer.headers if name != "x-loramux-receipt"}
            text = answer.text.replace(cid, "CID").replace(cid[:100], "CID")
            told.append((answer.status_code, text, headers))
        assert told[0] == told[1], (method, path)
    (entry,) = tenants.ask(tenants.globex, "GET", "/v1/adapters").json()["data"] or [None]
    assert not loaded or entry["cid"] == tenants.secret
    own = tenants.ask(tenants.globex, "GET", f"/v1/adapters/{tenants.secret}")
    assert own.status_code == (200 if loaded else 404)


def test_foreign_names_are_never_looked_up(
    tenants: Tenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the time of an answer does not tell a foreign adapter from a missing one."""
    asked: list[object] = []
    route = tenants.served.registry.route
    monkeypatch.setattr(
        tenants.served.registry, "route", lambda one: (asked.append(str(one)), route(one))[1]
    )
    for name in ("globex/secret", "globex/absent", "globex/secret@1.0.0"):
        assert tenants.use(tenants.acme, name) == 404
    assert asked == []
    assert tenants.use(tenants.acme, "absent") == 404
    assert asked == ["acme/absent"]


def test_lists_have_only_what_the_tenant_may_use(tenants: Tenants) -> None:
    for key, model in ((tenants.acme, "sql"), (tenants.globex, "secret")):
        assert tenants.use(key, model) == 200
    assert tenants.models(tenants.acme) == {"tiny-base", "acme/sql"}
    assert tenants.models(tenants.globex) == {"tiny-base", "globex/secret"}
    assert {"legal", "acme/sql", "globex/secret"} <= tenants.models(tenants.operator)
    (entry,) = tenants.adapters(tenants.acme).values()
    assert (entry["id"], entry["requests"], entry["path"]) == ("acme/sql@1.1.0", 1, None)
    assert set(tenants.adapters(tenants.globex)) == {"globex/secret@1.0.0"}
    assert len(tenants.adapters(tenants.operator)) == 4
    for path, field in (("/models", "id"), ("/api/tags", "name"), ("/lora-adapters", "name")):
        shown = tenants.ask(tenants.acme, "GET", path).text
        assert "globex" not in shown and "legal" not in shown, (path, field)


def test_names_given_by_the_operator_belong_to_the_home_tenant(registry_app: Make) -> None:
    tenants = Tenants(registry_app, shared_names=("team/*",))
    home = tenants.served.key("default")
    assert {"legal", "team/polite"} <= tenants.models(home)
    assert tenants.use(home, "legal") == 200 and tenants.use(home, "sql") == 404
    assert tenants.models(tenants.acme) == {"tiny-base", "acme/sql", "team/polite"}
    assert (tenants.use(tenants.acme, "legal"), tenants.use(tenants.acme, "team/polite")) == (
        404,
        200,
    )
    team = tenants.served.key("team")
    assert tenants.models(team) == {"tiny-base", "team/polite"}
    entry = tenants.ask(team, "GET", "/v1/adapters/team/polite").json()
    # Others use it too: their requests do not show.
    assert (entry["id"], entry["path"], entry["requests"]) == ("team/polite", None, 0)
    listed = tenants.ask(team, "GET", "/lora-adapters").json()
    assert [(one["id"], one["name"], one["path"]) for one in listed] == [
        (0, "team/polite", "team/polite")
    ]
    body = {"prompt": "hi", "lora": [{"id": 0, "scale": 1}]}
    assert tenants.ask(team, "POST", "/completion", body).status_code == 200
    assert tenants.ask(tenants.acme, "POST", "/completion", body).status_code == 200
    wrong = {"prompt": "hi", "lora": [{"id": 1, "scale": 1}]}
    assert tenants.ask(team, "POST", "/completion", wrong).status_code == 400


def test_a_share_of_all_versions_lets_another_tenant_use_and_not_change(tenants: Tenants) -> None:
    served = tenants.served
    served.share("acme/sql", "globex")
    assert tenants.use(tenants.globex, "acme/sql") == 200
    assert tenants.use(tenants.globex, tenants.sql) == 200
    assert tenants.use(tenants.globex, "sql") == 404, "a bare name is one of the own tenant"
    assert tenants.models(tenants.globex) == {"tiny-base", "acme/sql", "globex/secret"}
    shown = tenants.ask(tenants.globex, "GET", "/v1/adapters/acme/sql").json()
    assert [one["version"] for one in shown["versions"]] == ["1.1.0", "1.0.0"]
    for method, path, body in [
        ("DELETE", "/v1/adapters/acme/sql@1.0.0", None),
        ("DELETE", "/v1/adapters/acme/sql", None),
        ("POST", "/v1/adapters/acme/sql/promote", {"version": "1.0.0"}),
        ("POST", "/v1/adapters/acme/sql/split", {"weights": {"1.0.0": 1}}),
        ("POST", "/v1/adapters/acme/sql/rollback", {}),
        ("POST", "/v1/adapters", {"reference": "acme/sql", "recipe": {"adapters": ["secret"]}}),
    ]:
        assert tenants.ask(tenants.globex, method, path, body).status_code == 404
    assert served.registry.show("acme/sql").aliases == ()
    # What the owner sees of the use is its own.
    assert tenants.use(tenants.acme, "sql@1.1.0") == 200
    entries = tenants.adapters(tenants.acme)
    assert entries["acme/sql@1.1.0"]["requests"] == 1


def test_a_share_of_one_version_is_used_by_that_version(tenants: Tenants) -> None:
    tenants.served.share("acme/sql@1.0.0", "globex")
    forms = ["acme/sql@1.0.0", tenants.sql, "acme/sql@1.1.0", "acme/sql", tenants.newer]
    assert [tenants.use(tenants.globex, form) for form in forms] == [200, 200, 404, 404, 404]
    shown = tenants.ask(tenants.globex, "GET", "/v1/adapters/acme/sql").json()
    assert ([one["version"] for one in shown["versions"]], shown["aliases"], shown["latest"]) == (
        ["1.0.0"],
        [],
        "1.0.0",
    )
    assert tenants.newer not in str(shown)


def test_a_share_with_all_tenants_makes_names_of_the_home_tenant_short(tenants: Tenants) -> None:
    tenants.served.push("default/common@1.0.0", 9)
    assert tenants.use(tenants.acme, "common") == 404
    tenants.served.share("default/common", "*")
    assert tenants.use(tenants.acme, "common") == 200
    assert "default/common" in tenants.models(tenants.acme)


def test_recipes_and_sums_are_made_of_what_the_tenant_sees(tenants: Tenants) -> None:
    for part in ("globex/secret", tenants.secret, "secret"):
        recipe = {"adapters": ["sql", part]}
        body = {"reference": "acme/sum@1.0.0", "recipe": recipe}
        assert tenants.ask(tenants.acme, "POST", "/v1/adapters", body).status_code == 404
    assert tenants.use(tenants.acme, "sql+0.5*globex/secret") == 404
    tenants.served.share("globex/secret", "acme")
    body = {"reference": "sum@1.0.0", "recipe": {"adapters": ["sql", "globex/secret"]}}
    pushed = tenants.ask(tenants.acme, "POST", "/v1/adapters", body)
    assert (pushed.status_code, pushed.json()["id"]) == (200, "acme/sum@1.0.0")
    assert tenants.use(tenants.acme, "sum") == 200
    assert tenants.use(tenants.globex, "acme/sum") == 404
    # When the share of a part ends, so does the use of the recipe.
    cid = pushed.json()["cid"]
    assert tenants.use(tenants.acme, cid) == 200
    access = tenants.served.registry.access
    access.unshare(parse_name_reference("globex/secret").adapter, "acme")
    tenants.served.adapters.follow_access()
    assert (tenants.use(tenants.acme, "sum"), tenants.use(tenants.acme, cid)) == (404, 404)
    assert tenants.use(tenants.operator, "acme/sum") == 200


def test_a_tenant_pushes_no_folder_of_the_server(registry_app: Make, tmp_path: Any) -> None:
    tenants = Tenants(registry_app, allowed_roots=(str(tmp_path),))
    body = {"reference": "acme/new", "source": str(tmp_path / "source-3")}
    refused = tenants.ask(tenants.acme, "POST", "/v1/adapters", body)
    assert (refused.status_code, refused.json()["error"]["reason"]) == (403, "not_allowed")
    assert tenants.ask(tenants.operator, "POST", "/v1/adapters", body).status_code == 200


def test_receipts_are_those_of_the_tenant(tenants: Tenants) -> None:
    tenants.served.share("acme/sql", "globex")
    for key in (tenants.acme, tenants.globex):
        assert tenants.use(key, "acme/sql") == 200
    ids = [receipt.id for receipt in tenants.served.writer.receipts]
    for query in ("", "?adapter=acme/sql", "?tenant=acme", f"?adapter={tenants.newer}"):
        listed = tenants.ask(tenants.acme, "GET", f"/v1/receipts{query}").json()["data"]
        assert [one["id"] for one in listed] == ids[:1]
    assert tenants.ask(tenants.acme, "GET", "/v1/receipts?tenant=globex").json()["data"] == []
    statuses = [tenants.ask(tenants.acme, "GET", f"/v1/receipts/{id}").status_code for id in ids]
    assert statuses == [200, 404]
    key_id = tenants.acme["authorization"].split("_")[1]
    (receipt, _) = tenants.served.writer.receipts
    assert (receipt.tenant, receipt.api_key_id) == ("acme", key_id)


def test_metrics_of_a_tenant_are_its_own(tenants: Tenants) -> None:
    for key, model in ((tenants.acme, "sql"), (tenants.globex, "secret")):
        assert tenants.use(key, model) == 200
    shown = tenants.ask(tenants.acme, "GET", "/metrics").text
    series = [line for line in shown.splitlines() if not line.startswith("#")]
    assert all('adapter="acme/sql"' in line for line in series) and len(series) == 3
    assert 'adapter="globex/secret"' in tenants.ask(tenants.operator, "GET", "/metrics").text


def test_the_same_content_in_two_tenants_shows_each_its_own_use(tenants: Tenants) -> None:
    cid = tenants.served.push("globex/copy@1.0.0", 1)
    assert cid == tenants.sql
    assert tenants.use(tenants.globex, "copy") == 200
    assert tenants.adapters(tenants.acme) == {}
    assert tenants.use(tenants.acme, "sql@1.0.0") == 200
    assert tenants.ask(tenants.globex, "POST", "/v1/adapters/copy/pin").json()["pinned"]
    entry = tenants.adapters(tenants.acme)["acme/sql@1.0.0"]
    assert (entry["names"], entry["requests"], entry["pinned"]) == (["acme/sql@1.0.0"], 1, False)
    unpinned = tenants.ask(tenants.acme, "DELETE", "/v1/adapters/sql@1.0.0/pin")
    assert unpinned.status_code == 200
    assert tenants.adapters(tenants.globex)["globex/copy@1.0.0"]["pinned"]


def test_a_key_may_be_limited_to_patterns_and_kept_from_the_base(tenants: Tenants) -> None:
    tenants.served.push("acme/mail@1.0.0", 5)
    key = tenants.served.key("acme", adapters=("sql*",), may_use_base=False)
    assert [tenants.use(key, model) for model in ("sql", "acme/mail", "absent")] == [200, 404, 404]
    assert [tenants.use(key, model) for model in ("tiny-base", "0*sql")] == [403, 403]
    assert tenants.models(key) == {"acme/sql"}
    assert tenants.ask(key, "DELETE", "/v1/adapters/acme/mail").status_code == 404
    narrow = tenants.served.key(None, adapters=("globex/*",))
    assert (tenants.use(narrow, "globex/secret"), tenants.use(narrow, "acme/sql")) == (200, 404)
    assert (tenants.use(narrow, tenants.secret), tenants.use(narrow, tenants.sql)) == (200, 404)
    assert tenants.models(narrow) == {"tiny-base", "globex/secret"}


def test_prefixes_are_cached_for_the_tenant_of_the_key(tenants: Tenants) -> None:
    tenants.served.share("acme/sql", "globex")
    for key in (tenants.acme, tenants.globex, tenants.operator):
        tenants.use(key, "acme/sql")
    assert [one.tenant for one in tenants.served.backend.requests] == ["acme", "globex", ""]


def test_scopes_of_a_tenant(tenants: Tenants) -> None:
    infer = tenants.served.key("acme", KeyScope.INFER)
    assert tenants.use(infer, "sql") == 200
    assert tenants.ask(infer, "GET", "/v1/receipts").status_code == 403
    assert tenants.ask(infer, "DELETE", "/v1/adapters/globex/secret").status_code == 403
    assert tenants.ask(tenants.acme, "GET", "/v1/stats").status_code == 403


@pytest.mark.parametrize("path", ["/get_model_info", "/model_info", "/props"])
def test_a_tenant_does_not_see_where_the_model_lies(tenants: Tenants, path: str) -> None:
    shown = tenants.ask(tenants.acme, "GET", path).json()
    assert shown["model_path"] == "tiny-base"
    assert shown.get("tokenizer_path", "tiny-base") == "tiny-base"
    seen = tenants.ask(tenants.operator, "GET", path).json()
    assert seen["model_path"] == CARD.path
