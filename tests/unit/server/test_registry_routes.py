"""The registry over HTTP: what is pushed is served, what is moved is served on the next request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.store_factory import write_tiny
from tests.unit.server.asgi_client import complete, get, make_app, post, request
from tests.unit.server.registry_app import BASE, Make, RegistryApp

ADAPTERS = "/v1/adapters"
SQL = f"{ADAPTERS}/acme/sql"


def push(served: RegistryApp, reference: str, source: str) -> Any:
    return post(served.app, ADAPTERS, {"reference": reference, "source": source})


def two_versions(registry_app: Make, **options: Any) -> tuple[RegistryApp, str, str]:
    served = registry_app(**options)
    return served, served.push("acme/sql@1.0.0", 1), served.push("acme/sql@1.1.0", 2)


def cid_of(served: RegistryApp, model: str = "acme/sql") -> str:
    cid: str = complete(served.app, model=model).json()["serving"]["adapter_cid"]
    return cid


def test_an_adapter_is_pushed_once_and_served(registry_app: Make, tmp_path: Path) -> None:
    served = registry_app(allowed_roots=(str(tmp_path),))
    write_tiny(tmp_path / "sql", 1, config=BASE)
    pushed = push(served, "acme/sql@1.0.0", "sql").json()
    assert (pushed["id"], pushed["is_new"]) == ("acme/sql@1.0.0", True)
    assert cid_of(served) == pushed["cid"]
    assert push(served, "acme/sql@1.0.0", "sql").json()["is_new"] is False
    assert push(served, "sql", "sql").json()["id"].startswith("default/sql@")


def test_a_forbidden_push_is_refused_and_has_no_effect(registry_app: Make, tmp_path: Path) -> None:
    served = registry_app(allowed_roots=(str(tmp_path / "root"),))
    write_tiny(tmp_path / "root" / "sql", 1)
    write_tiny(tmp_path / "root" / "new", 2)
    write_tiny(tmp_path / "outside", 3)
    assert push(served, "acme/sql@1.0.0", "sql").status_code == 200
    cases = {
        ("acme/sql@1.0.0", "new"): 409,
        ("acme/sql@2.0.0", "nothing"): 404,
        ("acme/sql@2.0.0", str(tmp_path / "outside")): 403,
        ("acme/sql@2.0.0", "http://10.0.0.1/x"): 403,
        ("acme/sql@prod", "sql"): 400,
        ("acme/../x", "sql"): 400,
    }
    assert {case: push(served, *case).status_code for case in cases} == cases
    assert [version.version for version in served.registry.show("acme/sql").versions] == ["1.0.0"]


def test_promote_and_rollback_are_served_on_the_next_request(registry_app: Make) -> None:
    served, first, second = two_versions(registry_app)
    state = post(served.app, f"{SQL}/promote", {"version": "1.0.0"}).json()
    assert (state["alias"], state["targets"], state["revision"]) == ("prod", {"1.0.0": 1}, 1)
    assert cid_of(served) == first
    post(served.app, f"{SQL}/promote", {"version": "1.1.0"})
    assert cid_of(served) == second
    assert post(served.app, f"{SQL}/rollback", {}).json()["action"] == "rollback"
    assert cid_of(served) == first


def test_a_stale_revision_changes_nothing(registry_app: Make) -> None:
    served, first, _ = two_versions(registry_app)
    post(served.app, f"{SQL}/promote", {"version": "1.0.0"})
    body = {"version": "1.1.0", "if_revision": 7}
    response = post(served.app, f"{SQL}/promote", body)
    assert response.status_code == 409 and response.json()["error"]["type"] == "ConflictError"
    assert cid_of(served) == first


def test_warm_loads_the_version_before_the_alias_moves(registry_app: Make) -> None:
    served, _, second = two_versions(registry_app)
    post(served.app, f"{SQL}/promote", {"version": "1.0.0"})
    seen: list[tuple[str | None, dict[str, int]]] = []
    script = served.backend.script

    async def watching(job: Any) -> Any:
        state = served.registry.show("acme/sql").aliases[0]
        seen.append((job.selection[0][0], {target.version: 1 for target in state.targets}))
        async for item in script(job):
            yield item

    served.backend.script = watching
    response = post(served.app, f"{SQL}/promote", {"version": "1.1.0", "warm": True})
    assert response.status_code == 200
    assert seen == [(second, {"1.0.0": 1})]


def test_a_rollback_warms_what_it_goes_back_to_before_the_alias_moves(registry_app: Make) -> None:
    served, first, second = two_versions(registry_app)
    for version in ("1.0.0", "1.1.0"):
        post(served.app, f"{SQL}/promote", {"version": version})
    seen: list[tuple[str | None, str]] = []
    script = served.backend.script

    async def watching(job: Any) -> Any:
        state = served.registry.show("acme/sql").aliases[0]
        seen.append((job.selection[0][0], state.targets[0].version))
        async for item in script(job):
            yield item

    served.backend.script = watching
    assert post(served.app, f"{SQL}/rollback", {"warm": True}).status_code == 200
    assert seen == [(first, "1.1.0")]
    assert cid_of(served) == first
    assert post(served.app, f"{SQL}/rollback", {"warm": True}).status_code == 409


def test_a_rollback_after_a_concurrent_change_is_refused(registry_app: Make) -> None:
    served, _, second = two_versions(registry_app)
    for version in ("1.1.0", "1.0.0"):
        post(served.app, f"{SQL}/promote", {"version": version})
    script = served.backend.script

    async def overtaking(job: Any) -> Any:
        served.registry.split("acme/sql", {"1.0.0": 1, "1.1.0": 1}, alias="prod")
        async for item in script(job):
            yield item

    served.backend.script = overtaking
    assert post(served.app, f"{SQL}/rollback", {"warm": True}).status_code == 409
    assert len(served.registry.show("acme/sql").aliases[0].targets) == 2


def test_a_version_that_cannot_be_warmed_is_not_promoted(registry_app: Make) -> None:
    from loramux.errors import AdapterRefused

    served, first, _ = two_versions(registry_app)
    post(served.app, f"{SQL}/promote", {"version": "1.0.0"})
    assert cid_of(served) == first
    served.backend.refusal = AdapterRefused("wrong_shape", "It is for another base.")
    response = post(served.app, f"{SQL}/promote", {"version": "1.1.0", "warm": True})
    assert response.status_code == 422
    assert cid_of(served) == first


def test_a_split_shares_the_alias(registry_app: Make) -> None:
    served, first, second = two_versions(registry_app)
    body = {"weights": {"1.0.0": 50, "1.1.0": 50}, "alias": "canary", "warm": True}
    state = post(served.app, f"{SQL}/split", body).json()
    assert state["targets"] == {"1.0.0": 50, "1.1.0": 50}
    assert {cid_of(served, "acme/sql@canary") for _ in range(24)} == {first, second}


def test_versions_aliases_and_adapters_are_removed(registry_app: Make) -> None:
    served, _, _ = two_versions(registry_app)
    post(served.app, f"{SQL}/promote", {"version": "1.0.0"})
    assert request(served.app, "DELETE", f"{SQL}@1.0.0").status_code == 409
    assert request(served.app, "DELETE", f"{SQL}@prod").json()["deleted"] is True
    assert request(served.app, "DELETE", f"{SQL}@1.0.0").status_code == 200
    assert complete(served.app, model="acme/sql@1.0.0").status_code == 404
    assert complete(served.app, model="acme/sql").status_code == 200
    assert request(served.app, "DELETE", SQL).status_code == 200
    assert complete(served.app, model="acme/sql").status_code == 404
    assert request(served.app, "DELETE", SQL).status_code == 404


def test_an_adapter_is_shown(registry_app: Make) -> None:
    served, first, second = two_versions(registry_app)
    shown = get(served.app, SQL).json()
    assert shown["id"] == "acme/sql" and shown["latest"] == "1.1.0"
    assert [version["cid"] for version in shown["versions"]] == [second, first]
    assert get(served.app, f"{ADAPTERS}/acme/none").status_code == 404
    assert get(served.app, f"{ADAPTERS}/team/polite").json()["object"] == "adapter"


def test_metrics_call_an_adapter_by_its_name_whatever_its_version(registry_app: Make) -> None:
    served, first, _ = two_versions(registry_app)
    for model in ("acme/sql@1.0.0", "acme/sql@1.1.0", "legal+0.5*acme/sql@1.1.0"):
        complete(served.app, model=model)
    scraped = get(served.app, "/metrics").text
    assert (
        'loramux:adapter_requests_total{adapter="acme/sql",model_name="tiny-base"} 3.0' in scraped
    )
    assert 'loramux:adapter_requests_total{adapter="legal",model_name="tiny-base"} 1.0' in scraped
    assert first not in scraped
    complete(served.app, model=first)
    assert f'adapter_requests_total{{adapter="{first}"' in get(served.app, "/metrics").text
    listed = get(served.app, "/v1/adapters?order=busiest").json()["data"]
    assert {entry["cid"]: entry["requests"] for entry in listed}[first] == 2, "counted by content"


def test_models_and_adapters_list_those_of_the_registry(registry_app: Make) -> None:
    served, _, second = two_versions(registry_app)
    served.push("team/polite@1.0.0", 3)
    listed = get(served.app, "/v1/models").json()["data"]
    assert [entry["id"] for entry in listed] == ["tiny-base", "legal", "team/polite", "acme/sql"]
    assert (listed[-1]["root"], listed[-1]["parent"]) == (second, "tiny-base")
    assert get(served.app, "/v1/models/acme/sql").json() == listed[-1]
    assert get(served.app, "/v1/models/acme/none").status_code == 404
    complete(served.app, model="acme/sql")
    assert Path(get(served.app, "/v1/models/acme/sql").json()["root"]).is_dir()
    entries = get(served.app, ADAPTERS).json()["data"]
    assert [entry["id"] for entry in entries] == ["legal", "team/polite", "acme/sql@1.1.0"]


def test_an_adapter_of_the_registry_is_pinned_by_its_name(registry_app: Make) -> None:
    served, _, second = two_versions(registry_app)
    assert post(served.app, f"{SQL}/pin").json()["cid"] == second
    assert post(served.app, f"{ADAPTERS}/acme/none/pin").status_code == 404


@pytest.mark.parametrize("path", ["promote", "split", "rollback"])
def test_without_a_registry_the_error_names_the_flag(path: str) -> None:
    bodies = {"promote": {"version": "1.0.0"}, "split": {"weights": {}}, "rollback": {}}
    response = post(make_app(), f"{SQL}/{path}", bodies[path])
    assert response.status_code == 404 and "--registry" in response.text
    assert request(make_app(), "DELETE", SQL).status_code == 404
