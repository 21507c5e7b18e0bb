"""Versions that are recipes, over HTTP: pushed, resolved, listed and receipted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest

from loramux.adapters.combine.cache import CombinationCache
from loramux.adapters.combine.maker import CombinationMaker
from loramux.adapters.peft.unbound import read_without_base
from loramux.adapters.recipe import Recipe
from loramux.receipts.issuer import ReceiptIssuer
from loramux.server.app import ServerApp, create_app
from loramux.server.context import OnDemand, ServerOptions
from loramux.server.live.warming import prewarm
from loramux.server.naming.combinations import Combinations
from tests.adapter_factory import lora_config_dict, lora_tensors, tiny_llama_config, write_adapter
from tests.unit.server.asgi_client import complete, get, post, request, run
from tests.unit.server.registry_app import RegistryApp, make_registry_app
from tests.unit.server.scripted_backend import ScriptedBackend

MODEL = tiny_llama_config(num_hidden_layers=1)
ADAPTERS = "/v1/adapters"
TIES = {"combination": "ties", "density": 0.5}


class Scene:
    """A server with the versions acme/a, acme/b (rank 4) and acme/wide (rank 8) in its registry."""

    def __init__(self, folder: Path) -> None:
        self.served: RegistryApp = make_registry_app(folder)
        self.cids: dict[str, str] = {}
        for seed, (name, r) in enumerate({"a": 4, "b": 4, "wide": 8}.items()):
            tensors = lora_tensors(MODEL, seed=seed, r=r)
            path = write_adapter(folder / name, lora_config_dict(r=r), tensors)
            self.cids[name] = self.served.library.push(path, f"acme/{name}@1.0.0").cid
        self.cache = CombinationCache(folder / "combinations", 2**30)
        self.made: list[Recipe] = []
        self.start()

    def start(self) -> None:
        """Start a server process anew; the registry, the store and the cache stay."""
        self.backend = ScriptedBackend(registry=self.served.adapters)
        self.backend.read_cid = lambda folder: read_without_base(folder).cid  # type: ignore[method-assign]
        self.combinations = Combinations(self.backend, self.cache, make=self.make)
        self.app: ServerApp = create_app(
            self.backend,
            ServerOptions(),
            names=self.backend.names,
            receipts=ReceiptIssuer(writer=self.served.writer),
            on_demand=OnDemand(combinations=self.combinations),
        )

    async def make(self, recipe: Recipe, folders: Mapping[str, str]) -> Path:
        self.made.append(recipe)
        paths = {cid: Path(path) for cid, path in folders.items()}
        return await asyncio.to_thread(CombinationMaker(self.cache).make, recipe, paths)

    def push(self, reference: str, *adapters: str, **recipe: Any) -> Any:
        body = {"reference": reference, "recipe": {"adapters": adapters, **recipe}}
        return post(self.app, ADAPTERS, body)

    def listed(self) -> dict[str, Any]:
        return {one["id"]: one for one in get(self.app, ADAPTERS).json()["data"]}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.served.registry.close()


def test_a_sum_resolves_to_its_parts(scene: Scene) -> None:
    pushed = scene.push("acme/ab@1.0.0", "acme/a", "acme/b", weights=[1, 0.5]).json()
    assert (pushed["is_new"], pushed["bytes"]) == (True, 0)
    named = {part["name"]: part["weight"] for part in pushed["recipe"]["parts"]}
    assert named == {"acme/a@1.0.0": 1, "acme/b@1.0.0": 0.5}
    answer = complete(scene.app, model="acme/ab").json()
    assert answer["model"] == "acme/ab"
    expected = sorted([(scene.cids["a"], 1.0), (scene.cids["b"], 0.5)])
    assert list(scene.backend.requests[0].selection) == expected
    served = answer["serving"]["adapters"]
    assert {(one["name"], one["version"], one["part_of"]) for one in served} == {
        (name, "1.0.0", "acme/ab@1.0.0") for name in "ab"
    }
    assert {one["recipe_cid"] for one in served} == {pushed["cid"]}
    entry = scene.listed()["acme/ab@1.0.0"]
    assert (entry["cid"], entry["bytes"]) == (pushed["cid"], 0)
    assert entry["recipe"]["parts"] == pushed["recipe"]["parts"]
    assert scene.listed()["acme/a@1.0.0"]["bytes"] > 0
    shown = get(scene.app, f"{ADAPTERS}/acme/ab").json()
    assert shown["versions"][0]["recipe"] == pushed["recipe"]
    found = get(scene.app, "/v1/receipts", params={"adapter": "acme/ab"}).json()["data"]
    assert [one["id"] for one in found] == [answer["serving"]["id"]]
    assert scene.made == []


def test_a_sum_may_be_part_of_the_sum_of_a_request(scene: Scene) -> None:
    scene.push("acme/ab@1.0.0", "acme/a", "acme/b", weights=[1, 0.5])
    assert complete(scene.app, model="2*acme/ab+acme/wide").status_code == 200
    weights = dict(scene.backend.requests[0].selection)
    assert weights == {scene.cids["a"]: 2, scene.cids["b"]: 1, scene.cids["wide"]: 1}
    twice = complete(scene.app, model="acme/ab+acme/b")
    assert twice.status_code == 400
    assert "`acme/b@1.0.0 of acme/ab@1.0.0` and `acme/b` are the same" in twice.text


def test_a_combination_is_made_once_and_survives_a_restart(scene: Scene) -> None:
    recipe_cid = scene.push("acme/ab@1.0.0", "acme/a", "acme/b", **TIES).json()["cid"]

    async def send_all() -> list[int]:
        transport = httpx2.ASGITransport(scene.app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"model": "acme/ab", "prompt": "x"}
            sent = [client.post("/v1/completions", json=body, timeout=60) for _ in range(32)]
            return [answer.status_code for answer in await asyncio.gather(*sent)]

    assert run(send_all()) == [200] * 32
    assert len(scene.made) == 1
    [cid] = set(scene.backend.cids)
    assert cid not in (recipe_cid, None)
    for _ in range(2):
        serving = complete(scene.app, model="acme/ab").json()["serving"]
        [adapter] = serving["adapters"]
        assert serving["adapter_cid"] == adapter["cid"] == cid
        assert (adapter["name"], adapter["recipe_cid"]) == ("ab", recipe_cid)
        named = {part["name"] for part in adapter["recipe"]["parts"]}
        assert named == {"acme/a@1.0.0", "acme/b@1.0.0"}
        entry = scene.listed()["acme/ab@1.0.0"]
        assert (entry["cid"], entry["recipe"]["method"]) == (cid, "ties")
        scene.start()
    assert len(scene.made) == 1
    for name in ("a", "ab"):
        found = get(scene.app, "/v1/receipts", params={"adapter": f"acme/{name}"}).json()["data"]
        assert len(found) == 34


def test_aliases_move_between_adapters_and_recipes(scene: Scene) -> None:
    scene.served.library.push(scene.served.folder / "wide", "acme/x@1.0.0")
    scene.push("acme/x@1.1.0", "acme/a", "acme/b")
    scene.push("acme/x@1.2.0", "acme/a", "acme/b", **TIES)
    lengths = {"1.0.0": 1, "1.1.0": 2, "1.2.0": 1}
    for version, length in lengths.items():
        moved = post(
            scene.app, f"{ADAPTERS}/acme/x/promote", {"version": version, "warm": True}
        ).json()
        assert moved["targets"] == {version: 1}
        warmed = scene.backend.requests[-1].selection
        assert complete(scene.app, model="acme/x").status_code == 200
        assert scene.backend.requests[-1].selection == warmed
        assert len(warmed) == length
    post(scene.app, f"{ADAPTERS}/acme/x/rollback", {})
    complete(scene.app, model="acme/x")
    assert len(scene.backend.requests[-1].selection) == 2
    pinned = post(scene.app, f"{ADAPTERS}/acme/x@1.1.0/pin")
    assert pinned.json()["id"] == "acme/x@1.1.0"


def test_a_recipe_is_prewarmed(scene: Scene) -> None:
    scene.push("acme/sum@1.0.0", "acme/a", "acme/wide")
    scene.push("acme/ties@1.0.0", "acme/a", "acme/b", **TIES)
    found = [scene.served.registry.resolve(name) for name in ("acme/sum", "acme/ties")]
    names, combinations = scene.backend.names, scene.combinations
    run(prewarm(scene.backend, names, adapters=found, combinations=combinations))
    assert set(scene.backend.prewarmed[:2]) == {scene.cids["a"], scene.cids["wide"]}
    assert scene.backend.prewarmed[2] in combinations.recipes


def test_what_cannot_be_made_is_refused_by_name(scene: Scene) -> None:
    scene.push("acme/bad@1.0.0", "acme/a", "acme/wide", **TIES)
    refused = complete(scene.app, model="acme/bad")
    assert refused.status_code == 422
    assert "acme/bad@1.0.0" in refused.text and "acme/wide@1.0.0" in refused.text
    assert "cidv1" not in refused.text
    scene.push("acme/sum@1.0.0", "acme/a", "acme/b")
    nested = complete(scene.app, adapters=["acme/sum", "acme/wide"], **TIES)
    assert nested.status_code == 400 and "acme/sum@1.0.0 is itself a recipe" in nested.text
    removed = request(scene.app, "DELETE", f"{ADAPTERS}/acme/a@1.0.0")
    assert removed.status_code == 409 and "part of the recipe acme/bad@1.0.0" in removed.text
    assert scene.backend.requests == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"recipe": {"adapters": ["acme/a", "acme/b"]}, "source": "x"}, "source"),
        ({}, "source"),
        ({"recipe": {"adapters": ["acme/a"]}}, "adapters"),
        ({"recipe": {"adapters": ["acme/a", "acme/b"], "weights": [1]}}, "weights"),
        ({"recipe": {"adapters": ["acme/a", "acme/b"], "density": 0.5}}, "density"),
    ],
)
def test_errors_of_a_push_name_the_field(body: dict[str, Any], param: str, scene: Scene) -> None:
    answer = post(scene.app, ADAPTERS, {"reference": "acme/x", **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
