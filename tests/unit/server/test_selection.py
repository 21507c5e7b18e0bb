"""Names in a request: the base, given names, and references to the registry."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import pytest

from loramux.adapters.identity import CID_PREFIX
from loramux.registry.records import Content
from tests.unit.server.asgi_client import COMPLETIONS, complete, make_app, post
from tests.unit.server.registry_app import Make, RegistryApp
from tests.unit.server.scripted_backend import ScriptedBackend, named

# Request fields, expected adapter, its weight, the model name in the answer.
SELECTIONS: list[tuple[dict[str, Any], str | None, float, str]] = [
    ({}, None, 1.0, "tiny-base"),
    ({"model": None}, None, 1.0, "tiny-base"),
    ({"model": "legal"}, "legal", 1.0, "legal"),
    ({"model": "team/polite"}, "team/polite", 1.0, "team/polite"),
    ({"model": "legal", "adapters": None}, "legal", 1.0, "legal"),
    ({"model": "legal", "adapters": []}, None, 1.0, "tiny-base"),
    ({"adapters": [], "adapter_weights": []}, None, 1.0, "tiny-base"),
    ({"adapters": ["legal"]}, "legal", 1.0, "legal"),
    ({"adapters": ["legal"], "adapter_weights": [0.5]}, "legal", 0.5, "legal"),
    ({"adapters": ["legal"], "adapter_weights": [-2]}, "legal", -2.0, "legal"),
    ({"model": "team/polite", "adapters": ["legal"]}, "legal", 1.0, "legal"),
]


@pytest.mark.parametrize(("fields", "adapter", "weight", "name"), SELECTIONS)
def test_request_selects_its_adapter(
    fields: dict[str, Any], adapter: str | None, weight: float, name: str
) -> None:
    backend = ScriptedBackend()
    answer = complete(make_app(backend), **fields).json()
    assert answer["model"] == name
    cid = None if adapter is None else named(adapter).cid
    assert backend.requests[0].selection == (() if cid is None else ((cid, weight),))


def test_every_served_model_name_selects_the_base() -> None:
    backend = ScriptedBackend()
    app = make_app(backend, served_model_names=("smol", "gpt-4"))
    assert complete(app, model="gpt-4").json()["model"] == "smol"
    assert complete(app, model=None).json()["model"] == "smol"
    assert complete(app, model="tiny-base").status_code == 404
    assert backend.cids == [None, None]


def test_a_name_of_the_base_selects_the_base_even_if_an_adapter_has_it() -> None:
    backend = ScriptedBackend()
    backend.give_name("tiny-base", named("legal"))
    app = make_app(backend)
    complete(app, model="tiny-base")
    assert backend.cids == [None]


LEGAL, POLITE = named("legal").cid, named("team/polite").cid
# Request fields, expected weights, the model name in the answer.
SUMS: list[tuple[dict[str, Any], dict[str, float], str]] = [
    ({"adapters": ["team/polite", "legal"]}, {LEGAL: 1, POLITE: 1}, "team/polite+legal"),
    (
        {"adapters": ["legal", "team/polite"], "adapter_weights": [-1, 0.5]},
        {LEGAL: -1, POLITE: 0.5},
        "-1*legal+0.5*team/polite",
    ),
    ({"model": "legal+0.3*team/polite"}, {LEGAL: 1, POLITE: 0.3}, "legal+0.3*team/polite"),
    (
        {"model": ".5*legal + 5e-1*team/polite"},
        {LEGAL: 0.5, POLITE: 0.5},
        ".5*legal + 5e-1*team/polite",
    ),
    ({"model": "legal+-2e+1*team/polite"}, {LEGAL: 1, POLITE: -20}, "legal+-2e+1*team/polite"),
    ({"model": "0.25*legal"}, {LEGAL: 0.25}, "0.25*legal"),
    ({"model": "legal+0*team/polite"}, {LEGAL: 1}, "legal+0*team/polite"),
    ({"adapters": ["legal"], "adapter_weights": [0]}, {}, "legal"),
]


@pytest.mark.parametrize(("fields", "weights", "name"), SUMS)
def test_request_selects_a_sum_of_adapters(
    fields: dict[str, Any], weights: dict[str, float], name: str
) -> None:
    backend = ScriptedBackend()
    answer = complete(make_app(backend), **fields).json()
    assert answer["model"] == name
    assert backend.requests[0].selection == tuple(sorted(weights.items()))


def test_the_order_of_a_sum_does_not_change_its_selection() -> None:
    backend = ScriptedBackend()
    app = make_app(backend)
    complete(app, model="legal+0.3*team/polite")
    complete(app, adapters=["team/polite", "legal"], adapter_weights=[0.3, 1])
    assert backend.requests[0].selection == backend.requests[1].selection


def test_a_name_with_an_operator_in_it_takes_precedence_over_a_sum() -> None:
    backend = ScriptedBackend()
    for name in ("legal+team/polite", "2*legal"):
        backend.give_name(name, named("legal"))
        assert complete(make_app(backend), model=name).status_code == 200
        assert backend.requests[-1].selection == ((LEGAL, 1.0),)


def test_two_names_of_one_adapter_are_refused_by_name() -> None:
    backend = ScriptedBackend()
    backend.give_name("other", named("legal"))
    error = complete(make_app(backend), model="legal+other").json()["error"]
    assert "`legal` and `other` are the same adapter" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "how"),
    [
        ({"model": "legal+team/polite"}, "model", "in a sum with other adapters"),
        ({"model": "0.5*legal"}, "model", "with weight 0.5"),
        ({"adapters": ["team/polite", "legal"]}, "adapters", "in a sum with other adapters"),
        ({"adapters": ["legal"], "adapter_weights": [2]}, "adapters", "with weight 2"),
        (
            {"adapters": ["legal", "team/polite"], "combination": "ties", "density": 0.5},
            "adapters",
            "in a sum with other adapters",
        ),
    ],
)
def test_an_adapter_that_can_only_be_used_alone_is_refused_in_sums(
    fields: dict[str, Any], param: str, how: str
) -> None:
    backend = ScriptedBackend()
    app = make_app(backend)
    backend.adapters[LEGAL] = replace(named("legal"), only_alone="it has one position")
    error = complete(app, **fields).json()["error"]
    assert (error["code"], error["param"]) == (400, param)
    assert f"`legal` cannot be used {how}: it has one position" in error["message"]
    for model in ("legal", "1*legal", "legal+0*team/polite", "team/polite+0*legal"):
        assert complete(app, model=model).status_code == 200


def test_a_sum_may_mix_given_names_versions_aliases_and_cids(registry_app: Make) -> None:
    served = registry_app()
    first, second = served.push("acme/sql@1.0.0", 1), served.push("acme/sql@1.1.0", 2)
    served.registry.promote("acme/sql", "1.0.0", alias="prod")
    model = f"legal+0.5*acme/sql@prod+0.25*{second}"
    assert complete(served.app, model=model).json()["model"] == model
    expected = {LEGAL: 1.0, first: 0.5, second: 0.25}
    assert dict(served.backend.requests[-1].selection) == expected
    error = complete(served.app, model="acme/sql@1.0.0+acme/sql@prod").json()["error"]
    assert (error["code"], error["param"]) == (400, "model")


def test_the_smallest_share_of_a_sum_counts() -> None:
    backend = ScriptedBackend()
    app = make_app(backend, adapter_shares={"legal": 4.0, "team/polite": 2.0})
    for model in ("legal", "legal+team/polite", "legal+0*team/polite"):
        complete(app, model=model)
    assert [request.adapter_share for request in backend.requests] == [4.0, 2.0, 4.0]


def test_an_unknown_model_is_404_with_openais_message() -> None:
    error = complete(make_app(), model="x").json()["error"]
    assert error == {
        "message": "The model `x` does not exist.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }


def cid_served(served: RegistryApp, model: str, **fields: str) -> str | None:
    response = complete(served.app, model=model, **fields)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == model
    return served.backend.cids[-1]


def test_every_form_of_a_reference_selects_its_version(registry_app: Make) -> None:
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


def test_given_names_take_precedence_over_the_registry(registry_app: Make) -> None:
    """A push must not take over a name that the operator gave."""
    served = registry_app()
    served.push("default/legal@1.0.0", 1)
    served.push("team/polite@1.0.0", 2)
    assert cid_served(served, "legal") == named("legal").cid
    assert cid_served(served, "team/polite") == named("team/polite").cid
    assert cid_served(served, "tiny-base") is None


def test_a_bare_name_is_looked_up_in_the_tenant_and_then_in_the_home_tenant(
    registry_app: Make,
) -> None:
    served = registry_app(tenant_header="X-Tenant")
    own, home = served.push("acme/sql@1.0.0", 1), served.push("default/sql@1.0.0", 2)
    shared = served.push("default/shared@1.0.0", 3)

    def adapter_of(model: str, tenant: str) -> str | None:
        body = {"model": model, "prompt": "hi"}
        response = post(served.app, COMPLETIONS, body, headers={"x-tenant": tenant})
        assert response.status_code == 200, response.text
        return served.backend.cids[-1]

    assert adapter_of("sql", "acme") == own
    assert adapter_of("sql", "other") == home
    assert adapter_of("sql", "not a name!") == home
    assert adapter_of("shared", "acme") == shared


@pytest.mark.parametrize("model", ["acme/none", "acme/sql@9.0.0", "acme/sql@no", "a b", "x/y/z"])
def test_an_unknown_name_is_404_with_the_models_message(registry_app: Make, model: str) -> None:
    served = registry_app()
    served.push("acme/sql@1.0.0", 1)
    error = complete(served.app, model=model).json()["error"]
    assert error["code"] == 404 and error["param"] == "model"
    assert error["message"].startswith(f"The model `{model}` does not exist.")
    assert not served.backend.requests


def test_an_ambiguous_cid_prefix_is_refused_with_the_number_of_matches(
    registry_app: Make,
) -> None:
    served = registry_app()
    cid = served.push("acme/sql@1.0.0", 1)
    content = served.registry.manifest(cid)
    similar = cid[:-1] + ("0" if cid[-1] != "0" else "1")
    served.registry.push("acme/other@1.0.0", Content(cid=similar, manifest=content, size_bytes=1))
    error = complete(served.app, model=cid[:30]).json()["error"]
    assert error["code"] == 400 and error["param"] == "model"
    assert error["message"].startswith("2 content ids begin with ")
    assert cid_served(served, cid) == cid


def test_a_cid_prefix_with_too_few_digits_is_refused(registry_app: Make) -> None:
    error = complete(registry_app().app, model="cidv1:sha256:abc").json()["error"]
    assert error["code"] == 400 and "12" in error["message"]


def test_without_a_registry_a_given_adapter_is_found_by_its_cid() -> None:
    backend = ScriptedBackend()
    cid, similar = CID_PREFIX + "ab" * 32, CID_PREFIX + "ab" * 31 + "cc"
    backend.give_name("legal", replace(named("legal"), cid=cid))
    backend.give_name("other", replace(named("legal"), cid=similar))
    app = make_app(backend)
    assert complete(app, model=cid).status_code == 200
    assert backend.cids == [cid]
    assert "2 content ids" in complete(app, model="ab" * 8).json()["error"]["message"]
    assert complete(app, model="cd" * 8).status_code == 404


def test_a_removed_version_is_404_although_the_engine_still_has_it(registry_app: Make) -> None:
    served = registry_app()
    cid = served.push("acme/sql@1.0.0", 1)
    assert cid_served(served, cid) == cid
    served.registry.remove("acme/sql@1.0.0")
    served.adapters.forget([])
    assert complete(served.app, model=cid).status_code == 404


def test_a_user_always_gets_the_same_version_of_a_split(registry_app: Make) -> None:
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


def test_a_version_whose_files_are_missing_is_not_reported_as_unknown(registry_app: Make) -> None:
    served = registry_app()
    served.push("acme/sql@1.0.0", 1)
    shutil.rmtree(served.folder / "store")
    response = complete(served.app, model="acme/sql")
    assert response.status_code == 404 and "is in the store" in response.text


def test_a_sum_may_have_eight_full_cids(registry_app: Make) -> None:
    served = registry_app()
    cids = [served.push(f"acme/sql@1.0.{number}", number) for number in range(8)]
    response = complete(served.app, model="+".join(f"0.5*{cid}" for cid in cids))
    assert response.status_code == 200, response.text
    response = complete(served.app, model="+".join(cids))
    assert response.status_code == 200, response.text
    assert served.backend.requests[-1].selection == tuple((cid, 1.0) for cid in sorted(cids))
