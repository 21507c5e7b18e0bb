"""Requests that name a combination of adapters: made once, kept, listed and receipted."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from loramux.adapters.combine.cache import CombinationCache
from loramux.adapters.combine.maker import CombinationMaker
from loramux.adapters.identity import CID_PREFIX
from loramux.adapters.peft.unbound import read_without_base
from loramux.adapters.recipe import CombinationOptions, Recipe, decode_recipe, make_recipe
from loramux.server.app import ServerApp, create_app
from loramux.server.context import OnDemand, ServerOptions
from loramux.server.naming.combinations import Combinations, make_in_child
from loramux.types.adapter import AdapterCard
from tests.adapter_factory import lora_config_dict, lora_tensors, tiny_llama_config, write_adapter
from tests.unit.server.asgi_client import complete, get, post, run
from tests.unit.server.scripted_backend import ScriptedBackend

CONFIG = tiny_llama_config(num_hidden_layers=1)
TIES = {"combination": "ties", "density": 0.5}


class Scene:
    """A server with the adapters a and b of rank 4 and wide of rank 8."""

    def __init__(self, folder: Path, *, budget_bytes: int = 2**30) -> None:
        self.backend = ScriptedBackend()
        self.cids: dict[str, str] = {}
        for seed, (name, r) in enumerate({"a": 4, "b": 4, "wide": 8}.items()):
            path = write_adapter(
                folder / name, lora_config_dict(r=r), lora_tensors(CONFIG, seed=seed, r=r)
            )
            card = AdapterCard(cid=read_without_base(path).cid, path=str(path), rank=r, num_bytes=1)
            self.backend.give_name(name, card)
            self.cids[name] = card.cid
        self.cache = CombinationCache(folder / "cache", budget_bytes)
        self.made: list[Recipe] = []
        self.app = self.start()

    def start(self, make: Any = None) -> ServerApp:
        combinations = Combinations(self.backend, self.cache, make=make or self.make)
        names = self.backend.names
        return create_app(
            self.backend,
            ServerOptions(),
            names=names,
            on_demand=OnDemand(combinations=combinations),
        )

    async def make(self, recipe: Recipe, folders: Mapping[str, str]) -> Path:
        self.made.append(recipe)
        paths = {cid: Path(path) for cid, path in folders.items()}
        return await asyncio.to_thread(CombinationMaker(self.cache).make, recipe, paths)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_combination_is_one_adapter_of_the_request(scene: Scene) -> None:
    answer = complete(scene.app, adapters=["b", "a"], adapter_weights=[0.5, 1], **TIES).json()
    assert answer["model"] == "0.5*b+a"
    ((cid, weight),) = scene.backend.requests[0].selection
    assert weight == 1
    serving = answer["serving"]
    assert serving["adapter_cid"] == cid
    assert [(one["name"], one["weight"]) for one in serving["adapters"]] == [("b", 0.5), ("a", 1)]
    recipe = decode_recipe(str(serving["combination"]).replace("'", '"'))
    assert recipe == scene.made[0]
    assert complete(scene.app, model="a+0.5*b", **TIES).status_code == 200
    assert complete(scene.app, model=cid).status_code == 200
    assert scene.backend.cids == [cid] * 3
    assert len(scene.made) == 1
    entries = get(scene.app, "/v1/adapters").json()["data"]
    listed = {one["cid"]: one.get("recipe") for one in entries}
    assert decode_recipe(str(listed[cid]).replace("'", '"')) == recipe
    assert listed[scene.cids["a"]] is None
    assert cid not in get(scene.app, "/v1/models").text


def test_32_concurrent_requests_make_it_once_in_a_child_process(scene: Scene) -> None:
    makes = 0

    async def make(recipe: Recipe, folders: Mapping[str, str]) -> Path:
        nonlocal makes
        makes += 1
        return await make_in_child(scene.cache.root, recipe, folders)

    async def send_all() -> list[int]:
        transport = httpx2.ASGITransport(scene.start(make), raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"model": "a+b", "prompt": "x", **TIES}
            sent = [client.post("/v1/completions", json=body, timeout=60) for _ in range(32)]
            return [answer.status_code for answer in await asyncio.gather(*sent)]

    assert run(send_all()) == [200] * 32
    assert makes == 1
    assert len(set(scene.backend.cids)) == 1
    # A server that starts later finds it on disk.
    assert complete(scene.start(make), model="b+a", **TIES).status_code == 200
    assert makes == 1


def test_loraxs_merged_adapters_are_made_by_the_same_methods(scene: Scene) -> None:
    def generate(**merged: Any) -> Any:
        body = {"inputs": "x", "parameters": {"merged_adapters": {"ids": ["a", "b"]} | merged}}
        return post(scene.app, "/generate", body)

    # The client always sends a density.
    response = generate(weights=[1, 0.5], density=0.0)
    assert response.status_code == 200, response.text
    assert response.headers["x-adapter-id"] == "a,b"
    assert scene.made[0].method.name == "linear"
    ties = {"merge_strategy": "ties", "density": 0.5, "majority_sign_method": "frequency"}
    assert generate(**ties).status_code == 200
    assert scene.made[1].majority_sign_method == "frequency"
    assert [part.weight for part in scene.made[1].parts] == [1, 1]
    assert len({cid for cid in scene.backend.cids if cid}) == 2
    # A density of 0 would make the base.
    assert generate(merge_strategy="ties", density=0.0).status_code == 422
    assert generate(ids=["a", "wide"]).status_code in (422, 424)
    assert generate(ids=["a", "nope"]).status_code == 424
    assert generate(merge_strategy="nope").status_code == 422


def test_the_sum_is_not_made_but_computed_in_the_batch(scene: Scene) -> None:
    complete(scene.app, adapters=["a", "b"], combination="cat")
    complete(scene.app, adapters=["a", "b"])
    assert len(scene.backend.requests[0].selection) == 2
    assert scene.backend.requests[0].selection == scene.backend.requests[1].selection
    assert scene.made == []


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "a", **TIES}, 400, "adapters"),
        ({"adapters": [], **TIES}, 400, "adapters"),
        ({"model": "a+b", "combination": "tied"}, 400, "combination"),
        ({"model": "a+b", "combination": "ties"}, 400, "density"),
        ({"model": "a+b", "density": 0.5}, 400, "density"),
        ({"model": "a+b", "combination_seed": 1}, 400, "combination_seed"),
        ({"model": "0*a+0*b", **TIES}, 400, "adapter_weights"),
        ({"adapters": ["a", "a"], **TIES}, 400, "adapters"),
        ({"adapters": ["a", "b"], "adapter_weights": [1], **TIES}, 400, "adapter_weights"),
        ({"model": "a+wide", **TIES}, 422, None),
        ({"model": "a+absent", **TIES}, 404, "model"),
    ],
)
def test_errors_name_the_field(
    fields: dict[str, Any], status: int, param: str | None, scene: Scene
) -> None:
    for _ in range(2):
        answer = complete(scene.app, **fields)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["param"] == param
        assert CID_PREFIX not in answer.text, "names are shown as the request has them"
    # The refusal of a combination is remembered.
    assert len(scene.made) == (status == 422)
    assert scene.backend.requests == []
    left = list(scene.cache.root.iterdir()) if scene.cache.root.exists() else []
    assert all(path.name.startswith(".lock") for path in left)


def test_a_replaced_part_is_refused_and_not_remembered(scene: Scene, tmp_path: Path) -> None:
    other = lora_tensors(CONFIG, seed=99)
    write_adapter(tmp_path / "a", lora_config_dict(), other)
    for _ in range(2):
        answer = complete(scene.app, model="a+b", **TIES)
        assert answer.status_code == 422
        assert "replaced" in answer.text
    assert len(scene.made) == 2


def test_missing_files_of_a_part_are_restored(scene: Scene, tmp_path: Path) -> None:
    async def restore(cid: str) -> bool:
        assert cid == scene.cids["a"]
        (tmp_path / "gone").rename(tmp_path / "a")
        return True

    (tmp_path / "a").rename(tmp_path / "gone")
    combinations = Combinations(scene.backend, scene.cache, restore=restore, make=scene.make)
    app = create_app(
        scene.backend,
        ServerOptions(),
        names=scene.backend.names,
        on_demand=OnDemand(combinations=combinations),
    )
    assert complete(app, model="a+b", **TIES).status_code == 200


def test_combinations_over_the_budget_are_removed(tmp_path: Path) -> None:
    scene = Scene(tmp_path, budget_bytes=1)
    first = complete(scene.app, model="a+b", **TIES).json()["serving"]["adapter_cid"]
    second = complete(scene.app, model="a+0.5*b", **TIES).json()["serving"]["adapter_cid"]
    assert scene.backend.removed == [first]
    assert second in scene.backend.adapters
    # It is made again when a request names it again.
    assert complete(scene.app, model="a+b", **TIES).status_code == 200
    assert len(scene.made) == 3


def test_the_cache_evicts_by_last_use_and_rejects_other_content(scene: Scene) -> None:
    maker = CombinationMaker(scene.cache)
    folders = {card.cid: Path(card.path) for card in scene.backend.adapters.values()}
    pair = [scene.cids["a"], scene.cids["b"]]
    recipes = [
        make_recipe(pair, [1, weight], CombinationOptions(method="linear")) for weight in (1, 2, 3)
    ]
    made = [maker.make(recipe, folders) for recipe in recipes]
    for age, path in zip((1, 3, 2), made, strict=True):
        os.utime(path, (1000 - age, 1000 - age))
    size = sum(file.stat().st_size for file in made[0].iterdir())
    assert CombinationCache(scene.cache.root, 2 * size + 100).trim(made[2]) == [made[1]]
    assert scene.cache.find(recipes[1]) is None
    assert scene.cache.find(recipes[0]) == made[0]
    (made[0] / "adapter_model.safetensors").write_bytes(b"damaged")
    assert scene.cache.find(recipes[0]) is None
    assert maker.make(recipes[0], folders) == made[0]
    assert read_without_base(made[0]).modules


def test_a_child_that_fails_says_why(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loramux.server.naming.combinations.MAKER", "loramux.absent")
    answer = complete(scene.start(partial(make_in_child, scene.cache.root)), model="a+b", **TIES)
    assert answer.status_code == 500
