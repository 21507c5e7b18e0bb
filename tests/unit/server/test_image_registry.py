"""Adapters of the registry on the routes of images, and the kind that decides the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest

from loramux.adapters.recipe import CombinationOptions
from loramux.types.access import KeyScope
from tests.store_factory import write_image, write_tiny
from tests.unit.server.asgi_client import chat, get, post
from tests.unit.server.registry_app import RegistryApp, make_registry_app

DRAW = "/v1/images/generations"


@pytest.fixture
def served(tmp_path: Path) -> Any:
    found = make_registry_app(
        tmp_path,
        has_images=True,
        served_model_names=("tiny-base",),
        allowed_roots=(str(tmp_path),),
        allow_runtime_lora_updating=True,
    )
    yield found
    found.registry.close()


def draw(served: RegistryApp, **fields: Any) -> httpx2.Response:
    headers = fields.pop("headers", None)
    body = {"prompt": "a fox", "steps": 1, **fields}
    return post(served.app, DRAW, body, headers=headers)


def drawn_with(response: httpx2.Response) -> list[tuple[str, float]]:
    assert response.status_code == 200, response.text
    return [(one["cid"], one["weight"]) for one in response.json()["serving"]["adapters"]]


def test_names_versions_aliases_splits_and_cids(served: RegistryApp) -> None:
    first = served.push_image("acme/ink@1.0.0", 1)
    second = served.push_image("acme/ink@1.1.0", 2)
    served.registry.promote("acme/ink", "1.0.0", alias="prod")
    served.adapters.forget([])
    for name, cid in (
        ("acme/ink", first),
        ("acme/ink@prod", first),
        ("acme/ink@1.1.0", second),
        (second, second),
    ):
        assert drawn_with(draw(served, adapters=[name])) == [(cid, 1.0)]
        assert drawn_with(draw(served, model=name)) == [(cid, 1.0)]
    both = draw(served, adapters=["acme/ink", second], adapter_weights=[0.5, -1])
    assert drawn_with(both) == [(first, 0.5), (second, -1.0)]
    assert drawn_with(draw(served, model="acme/ink+0.3*acme/ink@1.1.0")) == [
        (first, 1.0),
        (second, 0.3),
    ]
    post(served.app, "/v1/adapters/acme/ink/split", {"weights": {"1.0.0": 1, "1.1.0": 1}})
    found = {
        user: {drawn_with(draw(served, adapters=["acme/ink"], user=user))[0][0] for _ in range(3)}
        for user in map(str, range(12))
    }
    assert all(len(cids) == 1 for cids in found.values())
    assert set().union(*found.values()) == {first, second}
    (receipt,) = draw(served, adapters=["acme/ink@1.1.0"]).json()["serving"]["adapters"]
    assert (receipt["tenant"], receipt["name"], receipt["version"]) == ("acme", "ink", "1.1.0")


def test_a_sum_of_the_registry_is_drawn_with_its_parts(served: RegistryApp) -> None:
    cids = [served.push_image(f"acme/{name}@1.0.0", seed) for seed, name in enumerate("ab")]
    served.library.push_recipe(
        [("acme/a", 0.5), ("acme/b", 2.0)], "acme/c@1.0.0", CombinationOptions()
    )
    found = draw(served, adapters=["acme/c"], adapter_weights=[0.5])
    assert sorted(drawn_with(found)) == sorted([(cids[0], 0.25), (cids[1], 1.0)])


def test_each_kind_is_refused_on_the_routes_of_the_other(served: RegistryApp) -> None:
    served.push("acme/sql@1.0.0", 1)
    served.push_image("acme/ink@1.0.0", 2)
    wrong = chat(served.app, model="acme/ink")
    assert wrong.status_code == 422
    error = wrong.json()["error"]
    assert error["reason"] == "other_modality" and "/v1/images/generations" in error["message"]
    wrong = draw(served, adapters=["acme/sql"])
    assert wrong.status_code == 422 and "a text model" in wrong.json()["error"]["message"]
    given = draw(served, adapters=["legal"])
    assert given.status_code == 422 and "a text model" in given.json()["error"]["message"]


def test_lists_say_what_is_for_images(served: RegistryApp) -> None:
    served.push("acme/sql@1.0.0", 1)
    cid = served.push_image("acme/ink@1.0.0", 2)
    models = {one["id"]: one for one in get(served.app, "/v1/models").json()["data"]}
    assert (models["acme/ink"]["modality"], models["acme/ink"]["parent"]) == ("image", "tiny-flux")
    assert models["acme/sql"]["parent"] == "tiny-base" and "modality" not in models["acme/sql"]
    stored = get(served.app, "/v1/adapters?stored=1").json()["data"]
    found = {one["id"]: one.get("modality") for one in stored}
    assert (found["acme/ink@1.0.0"], found["acme/sql@1.0.0"]) == ("image", None)
    (version,) = get(served.app, "/v1/adapters/acme/ink").json()["versions"]
    assert (version["cid"], version["modality"]) == (cid, "image")
    warmed = post(served.app, "/v1/adapters/acme/ink/warm")
    assert warmed.status_code == 200 and warmed.json()["modality"] == "image"
    assert served.images.drawn[-1].cids == (cid,)
    assert post(served.app, "/v1/adapters/acme/ink/pin").json()["pinned"] is True


def test_pushes_over_http_and_promotion_with_warming(served: RegistryApp) -> None:
    write_image(served.folder / "ink.safetensors", 4)
    pushed = post(
        served.app,
        "/v1/adapters",
        {"reference": "acme/ink@1.0.0", "source": str(served.folder / "ink.safetensors")},
    )
    assert pushed.status_code == 200, pushed.text
    assert pushed.json()["modality"] == "image"
    moved = post(served.app, "/v1/adapters/acme/ink/promote", {"version": "1.0.0", "warm": True})
    assert moved.status_code == 200, moved.text
    assert served.images.drawn[-1].cids == (pushed.json()["cid"],)


def test_runtime_loads_go_to_the_model_of_their_kind(served: RegistryApp) -> None:
    image = write_image(served.folder / "image" / "ink.safetensors", 4)
    text = write_tiny(served.folder / "text")
    for name, place in (("ink", image.parent), ("sql", text)):
        body = {"lora_name": name, "lora_path": str(place)}
        loaded = post(served.app, "/v1/load_lora_adapter", body)
        assert loaded.status_code == 200, loaded.text
    assert draw(served, adapters=["ink"]).status_code == 200
    assert chat(served.app, model="sql").status_code == 200
    assert chat(served.app, model="ink").status_code == 422
    taken = post(served.app, "/v1/load_lora_adapter", {"lora_name": "ink", "lora_path": str(text)})
    assert taken.status_code == 400 and "already been loaded" in taken.text
    assert post(served.app, "/v1/unload_lora_adapter", {"lora_name": "ink"}).status_code == 200
    assert draw(served, adapters=["ink"]).status_code == 422


def test_tenants_draw_with_what_is_theirs_or_shared(served: RegistryApp) -> None:
    own = served.push_image("acme/ink@1.0.0", 1)
    other = served.push_image("globex/night@1.0.0", 2)
    key = served.key("acme", KeyScope.INFER)
    assert drawn_with(draw(served, adapters=["ink"], headers=key)) == [(own, 1.0)]
    for name in ("globex/night", other, "globex/absent"):
        refused = draw(served, adapters=[name], headers=key)
        assert refused.status_code == 422
        assert refused.json()["error"]["message"].startswith("Unknown adapter(s)")
        assert "night" not in refused.json()["error"]["message"].replace(name, "")
    served.share("globex/night", "acme")
    assert drawn_with(draw(served, adapters=["globex/night"], headers=key)) == [(other, 1.0)]
    no_base = served.key("acme", KeyScope.INFER, may_use_base=False)
    assert draw(served, headers=no_base).status_code == 403
    assert draw(served, adapters=["ink"], adapter_weights=[0], headers=no_base).status_code == 403


def test_refused_requests_leave_a_receipt(served: RegistryApp) -> None:
    refused = draw(served, adapters=["nope"])
    assert refused.status_code == 422
    receipt = served.writer.receipts[-1]
    assert (receipt.status, receipt.asked, receipt.http_status) == ("refused", "nope", 422)
    assert refused.headers["x-loramux-receipt"] == receipt.id
