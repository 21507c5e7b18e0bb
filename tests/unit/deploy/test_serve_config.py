"""What Ray is told, and what a change of the spec means for what runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from loramux.deploy.ray_scaling import replicas_by_load
from loramux.deploy.serve_config import changes, only_spec, placed, serve_config
from loramux.errors import InvalidRequest
from loramux.specs import (
    FleetConfig,
    LoRAAdapter,
    LoRAConfig,
    ModelSpec,
    ResourceConfig,
    ScalingConfig,
)

SPEC = ModelSpec(
    name="chat",
    model_type="text",
    backend="loramux",
    backend_kwargs={"model_id": "/models/a"},
    lora=LoRAConfig({"a": LoRAAdapter("/a"), "b": LoRAAdapter("/b")}),
    settings={"drain_s": 60},
    resources=ResourceConfig(num_cpus=4, num_gpus=1, replicas=3, memory_gb=2),
)
IMAGES = ModelSpec(
    name="flux",
    model_type="diffusion",
    backend="flux",
    backend_kwargs={"model_id": "/models/flux"},
    lora=LoRAConfig({"ink": LoRAAdapter("/ink.safetensors", weight=0.5)}),
)


def engine_of(spec: ModelSpec) -> dict[str, Any]:
    engine: dict[str, Any] = serve_config(spec)["applications"][0]["deployments"][0]
    return engine


def test_replicas_have_the_resources_and_stop_after_their_streams() -> None:
    engine = engine_of(SPEC)
    assert engine["ray_actor_options"] == {"num_cpus": 4, "num_gpus": 1, "memory": 2 * 2**30}
    scaling = engine["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (3, 3)
    # The server waits 60 s for streams; Ray must wait for longer.
    assert engine["graceful_shutdown_timeout_s"] > 60
    assert engine["user_config"]["adapters"]["a"] == {"source": "/a", "pinned": False}


def test_the_constructor_of_sheaf_places_the_router() -> None:
    assert only_spec([SPEC]) is only_spec(SPEC) is SPEC
    with pytest.raises(InvalidRequest, match="one model, got 2 specs"):
        only_spec([SPEC, IMAGES])
    fleet = placed(SPEC, "0.0.0.0", 9000).fleet
    assert (fleet.front_host, fleet.front_port, fleet.proxy_port) == ("0.0.0.0", 9000, 8000)
    # sheaf's port is that of Ray's proxy by default.
    fleet = placed(SPEC, None, 8000).fleet
    assert (fleet.front_host, fleet.front_port, fleet.proxy_port) == ("127.0.0.1", 8000, 8080)
    assert placed(SPEC, None, None) == SPEC


def test_engines_and_router_are_applications_of_their_own() -> None:
    engines, front = serve_config(SPEC)["applications"]
    assert (engines["route_prefix"], front["route_prefix"]) == (None, "/")
    other = replace(SPEC, backend_kwargs={"model_id": "/models/b"})
    assert serve_config(other)["applications"][1] == front


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, []),
        (
            {"lora": LoRAConfig({"b": LoRAAdapter("/b", pinned=True), "c": LoRAAdapter("/c")})},
            ["in place: 1 adapters added, 1 removed, 1 changed"],
        ),
        (
            {"limits": {"acme": {"requests_per_minute": 5}}},
            ["in place: 0 adapters added, 0 removed, 0 changed, limits"],
        ),
        (
            {"resources": replace(SPEC.resources, replicas=5)},
            ["number of replicas: 3 -> 5"],
        ),
        (
            {"backend_kwargs": {"model_id": "/models/b"}},
            ["replicas: rolling update, with up to 100 % more"],
        ),
        (
            {"settings": {"drain_s": 30}, "fleet": FleetConfig(surge_percent=0)},
            ["replicas: rolling update, old ones stop first"],
        ),
        ({"fleet": FleetConfig(front_port=9999)}, ["router: rolling update"]),
    ],
)
def test_a_change_restarts_only_what_it_must(change: dict[str, Any], said: list[str]) -> None:
    old, new = serve_config(SPEC), serve_config(replace(SPEC, **change))
    assert changes(old, new) == said
    args = [one["applications"][0]["args"] for one in (old, new)]
    assert (args[0] == args[1]) == (not any("rolling" in line for line in said if "repl" in line))


def test_a_revision_stands_for_all_that_a_replica_applies() -> None:
    def revision(**fields: Any) -> str:
        return str(engine_of(replace(SPEC, **fields))["user_config"]["revision"])

    assert revision() == revision(resources=replace(SPEC.resources, replicas=9))
    others = (
        {"lora": None},
        {"limits": {"acme": {"max_rank": 8}}},
        {"settings": {}},
        {"backend_kwargs": {"model_id": "/models/b"}},
    )
    assert len({revision(), *(revision(**one) for one in others)}) == 1 + len(others)


def test_adapters_of_images_are_arguments_of_the_server() -> None:
    engines = serve_config(IMAGES)["applications"][0]
    assert engines["args"]["settings"]["image_lora"] == ["ink=/ink.safetensors@0.5"]
    assert engines["deployments"][0]["user_config"]["adapters"] == {}


def test_replicas_scale_by_load_where_the_spec_says_so() -> None:
    scaling = ScalingConfig(min_replicas=2, max_replicas=8, target_load=4)
    engine = engine_of(replace(SPEC, fleet=FleetConfig(scaling=scaling)))
    assert engine["autoscaling_config"]["max_replicas"] == 8
    # Another policy would replace all replicas.
    assert engine["autoscaling_config"]["policy"] == engine_of(SPEC)["autoscaling_config"]["policy"]
    assert engine["user_config"]["target_load"] == 4


class Context:
    def __init__(self, metrics: dict[str, dict[str, float]] | None) -> None:
        self.aggregated_metrics = metrics
        self.target_num_replicas = 3


@pytest.mark.parametrize(
    ("loads", "count"),
    [([0.0, 0.0], 1), ([1.0, 1.0], 2), ([2.5, 0.6], 4), ([0.3], 1), ([], 3), (None, 3)],
)
def test_each_replica_gets_the_load_that_it_should_have(
    loads: list[float] | None, count: int
) -> None:
    metrics = None if loads is None else {"load": {str(i): one for i, one in enumerate(loads)}}
    assert replicas_by_load(Context(metrics)) == (count, {})
