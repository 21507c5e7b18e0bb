"""What names in a request mean, with a registry and without."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from loramux.registry.records import Content
from tests.unit.server.asgi_client import COMPLETIONS, complete, make_app, post
from tests.unit.server.registry_app import Make, RegistryApp
from tests.unit.server.scripted_backend import ScriptedBackend


def cid_served(served: RegistryApp, model: str, **fields: str) -> str | None:
    response = complete(served.app, model=model, **fields)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == model
    return served.backend.requests[-1].adapter


def test_every_form_of_a_name_reaches_its_version(registry_app: Make) -> None:
    served = registry_app()
    first, second = served.push("acme/sql@1.0.0", 1), served.push("acme/sql@1.1.0", 2)
    home = served.push("default/own@2.0.0", 3)
    served.registry.promote("acme/sql", "1.0.0", alias="prod")
    digits = second.rpartition(":")[2]
    cases = {
        "acme/sql": first,
        "acme/sql@prod": first,
        "acme/sql@latest": second,
        "acme/sql@1.1.0": second,
        "own": home,
        "own@2.0.0": home,
        second: second,
        f"cidv1:sha256:{digits[:12]}": second,
        digits[:14]: second,
    }
    assert {model: cid_served(served, model) for model in cases} == cases


def test_names_given_at_start_win(registry_app: Make) -> None:
    """A push by somebody else must not take over a name that the operator gave."""
    served = registry_app()
    served.push("default/legal@1.0.0", 1)
    served.push("team/polite@1.0.0", 2)
    assert cid_served(served, "legal") == "legal"
    assert cid_served(served, "team/polite") == "team/polite"
    assert cid_served(served, "tiny-base") is None


def test_a_bare_name_is_looked_for_in_the_requests_tenant_and_then_at_home(
    registry_app: Make,
) -> None:
    served = registry_app(tenant_header="X-Tenant")
    own, home = served.push("acme/sql@1.0.0", 1), served.push("default/sql@1.0.0", 2)
    shared = served.push("default/shared@1.0.0", 3)

    def adapter_of(model: str, tenant: str) -> str | None:
        body = {"model": model, "prompt": "hi"}
        response = post(served.app, COMPLETIONS, body, headers={"x-tenant": tenant})
        assert response.status_code == 200, response.text
        return served.backend.requests[-1].adapter

    assert adapter_of("sql", "acme") == own
    assert adapter_of("sql", "other") == home
    assert adapter_of("sql", "not a name!") == home
    assert adapter_of("shared", "acme") == shared


@pytest.mark.parametrize("model", ["acme/none", "acme/sql@9.0.0", "acme/sql@no", "a b", "x/y/z"])
def test_unknown_names_have_the_known_message(registry_app: Make, model: str) -> None:
    served = registry_app()
    served.push("acme/sql@1.0.0", 1)
    error = complete(served.app, model=model).json()["error"]
    assert error["code"] == 404 and error["param"] == "model"
    assert error["message"] == f"The model `{model}` does not exist."
    assert not served.backend.requests


def test_a_prefix_of_several_content_ids_says_how_many(
    registry_app: Make,
) -> None:
    served = registry_app()
    cid = served.push("acme/sql@1.0.0", 1)
    content = served.registry.manifest(cid)
    twin = cid[:-1] + ("0" if cid[-1] != "0" else "1")
    served.registry.push("acme/twin@1.0.0", Content(cid=twin, manifest=content, size_bytes=1))
    error = complete(served.app, model=cid[:30]).json()["error"]
    assert error["code"] == 400 and error["param"] == "model"
    assert error["message"].startswith("2 content ids begin with ")
    assert cid_served(served, cid) == cid


def test_too_few_digits_are_told_how_many_are_needed(registry_app: Make) -> None:
    error = complete(registry_app().app, model="cidv1:sha256:abc").json()["error"]
    assert error["code"] == 400 and "12" in error["message"]


def test_without_a_registry_a_given_adapter_is_found_by_its_content_id() -> None:
    backend = ScriptedBackend()
    card = backend.adapters["legal"]
    backend.adapters["legal"] = replace(card, cid="cidv1:sha256:" + "ab" * 32)
    backend.adapters["twin"] = replace(card, cid="cidv1:sha256:" + "ab" * 31 + "cc")
    app = make_app(backend)
    assert complete(app, model="cidv1:sha256:" + "ab" * 32).status_code == 200
    assert backend.requests[-1].adapter == "legal"
    assert "2 content ids" in complete(app, model="ab" * 8).json()["error"]["message"]
    assert complete(app, model="cd" * 8).status_code == 404


def test_a_removed_version_is_gone_although_the_engine_still_knows_it(registry_app: Make) -> None:
    served = registry_app()
    cid = served.push("acme/sql@1.0.0", 1)
    assert cid_served(served, cid) == cid
    served.registry.remove("acme/sql@1.0.0")
    served.adapters.forget([])
    assert complete(served.app, model=cid).status_code == 404


def test_a_user_stays_on_one_side_of_a_split(registry_app: Make) -> None:
    served = registry_app()
    sides = {served.push("acme/sql@1.0.0", 1), served.push("acme/sql@1.1.0", 2)}
    served.registry.split("acme/sql", {"1.0.0": 1, "1.1.0": 1}, alias="prod")
    served.adapters.forget([])
    met = set()
    for user in map(str, range(12)):
        chosen = {cid_served(served, "acme/sql", user=user) for _ in range(3)}
        assert len(chosen) == 1
        met |= chosen
    assert met == sides


def test_a_version_whose_bytes_are_gone_is_not_called_unknown(registry_app: Make) -> None:
    served = registry_app()
    served.push("acme/sql@1.0.0", 1)
    shutil.rmtree(served.folder / "store")
    response = complete(served.app, model="acme/sql")
    assert response.status_code == 404 and "is in the store" in response.text
