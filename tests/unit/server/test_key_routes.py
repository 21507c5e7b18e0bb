"""/v1/keys: operators make keys of any tenant, the admin of a tenant those of its own."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from loramux.types.access import KeyScope
from tests.unit.server.asgi_client import COMPLETIONS, get, post, request
from tests.unit.server.registry_app import Make, RegistryApp

PATH = "/v1/keys"
PROMPT = {"prompt": "hi", "max_tokens": 2}
Header = dict[str, str]


def ask(
    served: RegistryApp, header: Header, method: str, path: str = PATH, body: Any = None
) -> httpx2.Response:
    given = {} if body is None else {"json": body}
    return request(served.app, method, path, headers=header, **given)


def bearer(answer: httpx2.Response) -> Header:
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    return {"authorization": f"Bearer {answer.json()['key']}"}


def use(served: RegistryApp, header: Header) -> int:
    return ask(served, header, "POST", COMPLETIONS, PROMPT).status_code


def ids(served: RegistryApp, header: Header, query: str = "") -> set[str]:
    return {one["id"] for one in ask(served, header, "GET", PATH + query).json()["data"]}


def test_a_new_key_works_at_once_and_its_text_is_shown_once(registry_app: Make) -> None:
    served = registry_app()
    admin = served.key(None, KeyScope.ADMIN)
    body = {
        "tenant": "acme",
        "scopes": ["infer", "push"],
        "adapters": ["sql*"],
        "may_use_base": True,
        "expires_in_s": 3600,
        "limits": {"requests_per_minute": 2},
        "note": "CI of acme",
    }
    made = ask(served, admin, "POST", body=body)
    key, entry = bearer(made), made.json()
    assert [use(served, key) for _ in range(3)] == [200, 200, 429]
    listed = ask(served, admin, "GET", f"{PATH}?tenant=acme")
    assert entry.pop("key") not in listed.text
    entry["limits"] = {"requests_per_minute": 2}
    assert listed.json()["data"] == [entry]
    assert (entry["tenant"], entry["scopes"]) == ("acme", ["infer", "push"])
    assert 3500 < entry["ends_at"] - entry["created_at"] <= 3600
    assert made.text.count(entry["id"]) == 2 and "digest" not in made.text


def test_rotated_and_revoked_keys_end_with_the_answer(registry_app: Make) -> None:
    served = registry_app()
    admin = served.key(None)
    body = {"tenant": "acme", "limits": {"requests_per_minute": 2}}
    made = ask(served, admin, "POST", body=body)
    old, path = bearer(made), f"{PATH}/{made.json()['id']}"
    overlapping = ask(served, admin, "POST", f"{path}/rotate", {"overlap_s": 60})
    new = bearer(overlapping)
    # The limits go to the new key, and both share what is left until the old one ends.
    assert overlapping.json()["limits"] == {"requests_per_minute": 2}
    assert [use(served, old), use(served, new)] == [200, 200]
    assert [use(served, old), use(served, new)] == [429, 429]
    newest = bearer(ask(served, admin, "POST", f"{path}/rotate", {}))
    assert use(served, old) == 401 and use(served, newest) == 429
    path = f"{PATH}/{newest['authorization'].split('_')[1]}"
    revoked = ask(served, admin, "DELETE", path)
    assert (revoked.status_code, revoked.json()["state"]) == (200, "revoked")
    assert use(served, newest) == 401
    assert ask(served, admin, "DELETE", path).status_code == 404


def test_a_key_that_ends_makes_keys_that_end_with_it(registry_app: Make) -> None:
    served = registry_app()
    operator = served.key(None)
    made = ask(served, operator, "POST", body={"scopes": ["admin"], "expires_in_s": 600})
    admin, end = bearer(made), made.json()["ends_at"]
    child = ask(served, admin, "POST", body={})
    assert child.json()["ends_at"] == end
    assert ask(served, admin, "POST", body={"expires_in_s": 9e6}).json()["ends_at"] == end
    assert ask(served, admin, "POST", body={"expires_in_s": 60}).json()["ends_at"] < end
    for key in (made, child):
        rotated = ask(served, admin, "POST", f"{PATH}/{key.json()['id']}/rotate", {"overlap_s": 60})
        assert rotated.json()["ends_at"] == pytest.approx(end)
    # A key without an end gives the whole lifetime again.
    path = f"{PATH}/{made.json()['id']}/rotate"
    assert ask(served, operator, "POST", path, {}).json()["ends_at"] > end


def test_the_admin_of_a_tenant_manages_its_keys_alone(registry_app: Make) -> None:
    served = registry_app()
    operator, acme, globex = served.key(None), served.key("acme"), served.key("globex")
    made = ask(served, acme, "POST", body={})
    assert made.json()["tenant"] == "acme"
    assert use(served, bearer(made)) == 200
    own = {acme["authorization"].split("_")[1], made.json()["id"]}
    assert ids(served, acme) == own == ids(served, operator, "?tenant=acme")
    for tenant in ("globex", "absent"):
        refused = ask(served, acme, "POST", body={"tenant": tenant})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tenant")
        assert ask(served, acme, "GET", f"{PATH}?tenant={tenant}").status_code == 400
    for header in (operator, globex):
        foreign = header["authorization"].split("_")[1]
        for method, path, body in (
            ("DELETE", f"{PATH}/{{}}", None),
            ("POST", f"{PATH}/{{}}/rotate", {}),
        ):
            answers = [
                ask(served, acme, method, path.format(one), body) for one in (foreign, "0" * 12)
            ]
            assert [answer.status_code for answer in answers] == [404, 404]
            assert answers[0].text.replace(foreign, "0" * 12) == answers[1].text
        assert use(served, header) == 200


@pytest.mark.parametrize(
    ("tenant", "scopes", "rights"),
    [
        ("acme", (KeyScope.INFER, KeyScope.PUSH, KeyScope.METRICS, KeyScope.RECEIPTS), {}),
        ("acme", (KeyScope.ADMIN,), {"adapters": ("sql*",)}),
        (None, (KeyScope.ADMIN,), {"may_use_base": False}),
    ],
)
def test_no_key_makes_one_that_may_do_more(
    registry_app: Make, tenant: str | None, scopes: tuple[KeyScope, ...], rights: dict[str, Any]
) -> None:
    served = registry_app()
    key = served.key(tenant, *scopes, **rights)
    before = served.registry.access.keys()
    own = key["authorization"].split("_")[1]
    for method, path, body in (
        ("POST", PATH, {}),
        ("POST", f"{PATH}/{own}/rotate", {}),
        ("DELETE", f"{PATH}/{own}", None),
    ):
        assert ask(served, key, method, path, body).status_code == 403
    assert served.registry.access.keys() == before


def test_a_server_without_keys_gets_its_first_one_by_the_command(registry_app: Make) -> None:
    served = registry_app()
    refused = post(served.app, PATH, {})
    assert refused.status_code == 403 and "loramux keys create" in refused.text
    assert get(served.app, PATH).json()["data"] == []
    assert post(served.app, COMPLETIONS, PROMPT).status_code == 200


def test_changes_of_keys_are_audited_with_their_maker(registry_app: Make) -> None:
    served = registry_app()
    acme, operator = served.key("acme"), served.key(None)
    made = ask(served, acme, "POST", body={"limits": {"requests_per_minute": 9}})
    path = f"{PATH}/{made.json()['id']}"
    ask(served, acme, "POST", f"{path}/rotate", {})
    ask(served, acme, "DELETE", path)
    entries = ask(served, operator, "GET", "/v1/audit?limit=3").json()["data"]
    shown = [(one["action"], one["result"], one["target"]) for one in entries]
    key_id = made.json()["id"]
    assert shown == [
        ("key.revoke", "refused", key_id),
        ("key.rotate", "ok", key_id),
        ("key.create", "ok", key_id),
    ]
    maker = acme["authorization"].split("_")[1]
    assert {one["actor"]["key_id"] for one in entries} == {maker}
    assert {one["tenant"] for one in entries} == {"acme"}
    assert entries[2]["details"]["limits"] == {"requests_per_minute": 9}
    assert made.json()["key"].split("_", 2)[2] not in str(entries)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"scopes": []}, "scopes"),
        ({"scopes": ["root"]}, "scopes"),
        ({"tenant": "a b"}, None),
        ({"expires_in_s": -1}, "expires_in_s"),
        ({"expires_in_s": 0}, "expires_in_s"),
        ({"expires_in_s": 1e308}, "expires_in_s"),
        ({"expires_in_s": 4e9}, "expires_in_s"),
        ({"limits": {"apples": 1}}, None),
        ({"limits": {"max_rank": -1}}, "max_rank"),
        ({"note": "a\nb"}, "note"),
        ({"adapters": ["a b"]}, "adapters"),
        ({"owner": "x"}, None),
    ],
)
def test_invalid_keys_are_refused_by_field(
    registry_app: Make, body: dict[str, Any], param: str | None
) -> None:
    served = registry_app()
    operator = served.key(None)
    before = served.registry.access.keys()
    answer = ask(served, operator, "POST", body=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert served.registry.access.keys() == before
