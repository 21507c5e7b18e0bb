"""One deployment on Ray: what changes in place, what is replaced, and what heals, under traffic.

The tests run in their order on one deployment. They print how long Ray took.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import ray

from loramux.deploy.prewarm import own_adapters
from loramux.deploy.ray_server import DeployFailed, DeploymentState, RayDeployment, connect
from loramux.specs import (
    FleetConfig,
    LoRAAdapter,
    LoRAConfig,
    ModelSpec,
    ResourceConfig,
    ScalingConfig,
)
from tests.adapter_factory import lora_config_dict, lora_tensors, write_adapter
from tests.engine_factory import save_byte_level
from tests.model_factory import save_hf_folder, tiny_transformers_model
from tests.ray.traffic import Traffic, ask, expected_tokens, tokens_of
from tests.s3_server import free_ports

NAMES = ("a0", "a1", "a2", "a3")
BASE = "base"
MODELS = ("first", "second")
NUM_REPLICAS = 3
WAIT_S = 300


@dataclass
class Scene:
    folder: Path
    expected: dict[str, dict[str, list[int]]]
    """PEFT's greedy tokens by model and name."""
    spec: ModelSpec
    server: RayDeployment
    state: DeploymentState
    log: list[str] = field(default_factory=list)

    @property
    def model(self) -> str:
        return Path(self.spec.backend_kwargs["model_id"]).name

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.spec.lora.adapters) if self.spec.lora else ()

    @property
    def proxy(self) -> str:
        return f"http://127.0.0.1:{self.spec.fleet.proxy_port}"

    def update(self, **fields: Any) -> DeploymentState:
        self.spec = replace(self.spec, **fields)
        self.state = self.server.update(self.spec)
        return self.state

    def traffic(self, *models: str, names: tuple[str, ...] = ()) -> Traffic:
        """Traffic whose answers may be those of any of the models; by default as the spec says."""
        names, models = names or self.names, models or (self.model,)
        asked = {name: [self.expected[model][name] for model in models] for name in names}
        asked[BASE] = [self.expected[model][""] for model in models]
        return Traffic(self.server.url, asked)

    def wait_until(self, is_done: Callable[[DeploymentState], bool]) -> float:
        """Wait for a state of the deployment; return the seconds that it took."""
        began = time.monotonic()
        while True:
            self.state = self.server.status()
            if is_done(self.state):
                return time.monotonic() - began
            assert time.monotonic() - began < WAIT_S, self.state
            time.sleep(0.2)


def adapters_of(folder: Path, *names: str, pinned: tuple[str, ...] = ()) -> LoRAConfig:
    return LoRAConfig(
        {
            name: LoRAAdapter(str(folder / "adapters" / name), pinned=name in pinned)
            for name in names
        }
    )


@pytest.fixture(scope="module")
def scene(
    isolated: None, tmp_path_factory: pytest.TempPathFactory, printing: Callable[[str], None]
) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("ray")
    models = {}
    for seed, name in enumerate(MODELS):
        models[name] = tiny_transformers_model("llama", seed=seed, vocab_size=512)
        save_hf_folder(models[name], folder / name)
        save_byte_level(folder / name)
    paths = {name: str(folder / "adapters" / name) for name in NAMES}
    for seed, path in enumerate(paths.values()):
        config = lora_config_dict(r=4, lora_alpha=64, base_model_name_or_path="model")
        write_adapter(Path(path), config, lora_tensors(models["first"].config, seed=seed))
    expected = {name: expected_tokens(model, paths) for name, model in models.items()}
    front, proxy, engines = free_ports(3)
    spec = ModelSpec(
        name=BASE,
        model_type="text",
        backend="loramux",
        backend_kwargs={"model_id": str(folder / "first")},
        lora=adapters_of(folder, "a0", "a1"),
        settings={
            "dtype": "float32", "device_memory": "8MiB", "prewarm": 0, "drain_s": 60,
            "data": str(folder / "data"),
        },
        resources=ResourceConfig(num_cpus=0.1, replicas=NUM_REPLICAS),
        fleet=FleetConfig(
            front_port=front, proxy_port=proxy, engine_port=min(engines, 60_000), surge_percent=34
        ),
    )  # fmt: skip
    began = time.monotonic()
    assert connect(num_cpus=4)
    started_s = time.monotonic() - began
    server = RayDeployment(spec, on_progress=lambda line: None)
    try:
        state = server.run()
        total_s = time.monotonic() - began
        printing(f"Ray {started_s:.1f} s, {NUM_REPLICAS} replicas {total_s - started_s:.1f} s")
        yield Scene(folder, expected, spec, server, state)
    finally:
        began = time.monotonic()
        server.shutdown()
        ray.shutdown()
        printing(f"shutdown {time.monotonic() - began:.1f} s")


@pytest.fixture(scope="module")
def printing(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Print past pytest's capture: times are told, not asserted."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def write(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n  {line}", end="", flush=True)

    return write


@pytest.fixture
def timed(printing: Callable[[str], None]) -> Callable[[str], Any]:
    @contextmanager
    def measure(what: str) -> Iterator[list[str]]:
        began, more = time.monotonic(), list[str]()
        yield more
        printing(" ".join([what, f"{time.monotonic() - began:.1f} s", *more]))

    return measure


def pids(state: DeploymentState) -> set[tuple[int, int]]:
    return {(one["actor_pid"], one["server_pid"]) for one in state.engines}


def front_pid(scene: Scene) -> int:
    from ray import serve

    (told,) = serve.get_deployment_handle("Front", "front").broadcast("describe").results()
    return int(told["pid"])


def is_whole(count: int) -> Callable[[DeploymentState], bool]:
    def check(state: DeploymentState) -> bool:
        return state.is_settled and len(state.engines) == count

    return check


def test_replicas_answer_through_the_router_and_through_rays_proxy(scene: Scene) -> None:
    assert len(pids(scene.state)) == NUM_REPLICAS
    for url in (scene.server.url, scene.proxy):
        assert httpx2.get(f"{url}/health").json()["ready"] == NUM_REPLICAS
        for name in ("a0", "a1"):
            assert tokens_of(ask(url, name)) == scene.expected["first"][name]
        assert tokens_of(ask(url, BASE)) == scene.expected["first"][""]


def test_clients_cannot_change_what_the_spec_says(scene: Scene) -> None:
    body = {"lora_name": "x", "lora_path": str(scene.folder / "adapters" / "a2")}
    for url in (scene.server.url, scene.proxy):
        for path in ("/v1/load_lora_adapter", "/load_lora_adapter", "/v1/unload_lora_adapter"):
            refused = httpx2.post(url + path, json=body)
            assert refused.status_code == 403
            assert "--update" in refused.json()["error"]["message"]
    assert ask(scene.server.url, "x").status_code == 404


def test_adapters_and_pins_change_in_place(scene: Scene, timed: Callable[[str], Any]) -> None:
    before, front = pids(scene.state), front_pid(scene)
    with scene.traffic("first", names=("a1",)).flowing(4) as traffic:
        time.sleep(1)
        with timed("adapters in place:") as told:
            scene.update(lora=adapters_of(scene.folder, "a1", "a2", "a3", pinned=("a2",)))
        time.sleep(1)
    told.append(str(dict(traffic.outcomes)))
    assert not traffic.faults and set(traffic.outcomes) == {"complete"}
    assert pids(scene.state) == before and front_pid(scene) == front
    for engine in scene.state.engines:
        listed = httpx2.get(f"{engine['url']}/v1/adapters").json()["data"]
        assert {one["id"]: one["pinned"] for one in listed} == {
            "a1": False, "a2": True, "a3": False,
        }  # fmt: skip
        assert tokens_of(ask(engine["url"], "a2")) == scene.expected["first"]["a2"]
    assert tokens_of(ask(scene.server.url, "a3")) == scene.expected["first"]["a3"]
    assert ask(scene.server.url, "a0").status_code == 404


def test_an_adapter_that_cannot_be_loaded_changes_nothing(scene: Scene) -> None:
    before, spec = pids(scene.state), scene.spec
    broken = scene.folder / "adapters" / "broken"
    write_adapter(broken, lora_config_dict(), b"no tensors")
    adapters = dict(spec.lora.adapters) if spec.lora else {}
    adapters.pop("a1")
    with pytest.raises(DeployFailed, match="broken"):
        scene.update(lora=LoRAConfig(adapters | {"broken": LoRAAdapter(str(broken))}))
    scene.spec = spec
    scene.wait_until(lambda state: is_whole(NUM_REPLICAS)(state) and not faults(state))
    assert pids(scene.state) == before
    assert tokens_of(ask(scene.server.url, "a1")) == scene.expected["first"]["a1"]
    assert ask(scene.server.url, "broken").status_code == 404


def faults(state: DeploymentState) -> list[str]:
    return [one["fault"] for one in state.engines if one["fault"]]


def test_another_base_model_comes_by_a_rolling_update_that_loses_no_stream(
    scene: Scene, timed: Callable[[str], Any]
) -> None:
    before, front = pids(scene.state), front_pid(scene)
    traffic = scene.traffic("first", "second", names=("a1", "a2"))
    with traffic.flowing(4):
        time.sleep(1)
        with timed("rolling update of the base:") as told:
            scene.update(backend_kwargs={"model_id": str(scene.folder / "second")})
            told.append(f"{dict(traffic.outcomes)}, slowest first token {traffic.slowest_s:.2f} s")
        # Streams that began on old replicas end there.
        time.sleep(2)
    assert not traffic.faults, traffic.faults[:5]
    assert set(traffic.outcomes) == {"complete"}
    assert traffic.outcomes["complete"] > 10
    assert not pids(scene.state) & before and len(pids(scene.state)) == NUM_REPLICAS
    assert front_pid(scene) == front
    for name in ("a1", "a2"):
        assert tokens_of(ask(scene.server.url, name)) == scene.expected["second"][name]


def test_a_base_model_that_does_not_start_leaves_the_old_replicas(scene: Scene) -> None:
    before, spec = pids(scene.state), scene.spec
    broken = scene.folder / "no-model"
    broken.mkdir()
    with (
        scene.traffic().flowing(2) as traffic,
        pytest.raises(DeployFailed, match="no-model"),
    ):
        scene.update(backend_kwargs={"model_id": str(broken)})
    scene.spec = spec
    scene.wait_until(is_whole(NUM_REPLICAS))
    assert not traffic.faults and set(traffic.outcomes) == {"complete"}
    # With surge no old replica stops before a new one is ready.
    assert pids(scene.state) == before


@pytest.mark.parametrize("killed", ["actor_pid", "server_pid"])
def test_a_replica_that_is_killed_is_replaced(
    scene: Scene, timed: Callable[[str], Any], killed: str
) -> None:
    victim = scene.state.engines[0]
    with scene.traffic().flowing(4) as traffic:
        time.sleep(1)
        os.kill(victim[killed], signal.SIGKILL)
        with timed(f"kill -9 of {killed}: whole again after") as told:
            scene.wait_until(
                lambda state: (
                    is_whole(NUM_REPLICAS)(state)
                    and victim["actor_pid"] not in [one["actor_pid"] for one in state.engines]
                )
            )
            told.append(str(dict(traffic.outcomes)))
    # Answers that had begun on it end with an error event; no other client sees anything.
    assert not traffic.faults, traffic.faults[:5]
    assert set(traffic.outcomes) <= {"complete", "ended with an error event"}
    assert traffic.outcomes["complete"] > traffic.outcomes["ended with an error event"]
    # Neither process of the replica is left, and its address has a successor.
    for pid in (victim["actor_pid"], victim["server_pid"]):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert victim["url"] in {one["url"] for one in scene.state.engines}


def test_replicas_come_with_the_load_and_go_without_it(
    scene: Scene, timed: Callable[[str], Any]
) -> None:
    scaling = ScalingConfig(
        min_replicas=1, max_replicas=2, target_load=1.5, upscale_delay_s=1, downscale_delay_s=4
    )
    kept = pids(scene.state)
    with timed("scaling set, idle: one replica after"):
        scene.update(fleet=replace(scene.spec.fleet, scaling=scaling))
        scene.wait_until(is_whole(1))
    assert pids(scene.state) < kept
    remaining = scene.state.engines[0]["actor_pid"]
    # Each open stream is half a unit of load.
    traffic = scene.traffic()
    with traffic.flowing(8), timed("8 clients: two replicas after"):
        scene.wait_until(is_whole(2))
        time.sleep(1)
    assert not traffic.faults, traffic.faults[:5]
    assert set(traffic.outcomes) == {"complete"}
    # Before it took requests, the new one had loaded what the hash makes its own.
    (old,) = (one for one in scene.state.engines if one["actor_pid"] == remaining)
    (new,) = (one for one in scene.state.engines if one["actor_pid"] != remaining)
    listed = httpx2.get(f"{old['url']}/v1/adapters").json()["data"]
    adapters = [(one["id"], one["cid"]) for one in listed]
    own = own_adapters(adapters, own=new["url"], members=[old["url"]])
    assert sorted(new["prewarmed"]) == sorted(own)
    with timed("idle again: one replica after"):
        scene.wait_until(is_whole(1))
    assert tokens_of(ask(scene.server.url, "a1")) == scene.expected[scene.model]["a1"]


def test_the_number_of_replicas_changes_in_place(scene: Scene, timed: Callable[[str], Any]) -> None:
    kept = pids(scene.state)
    with timed("from one to two replicas:"):
        scene.update(
            resources=replace(scene.spec.resources, replicas=2),
            fleet=replace(scene.spec.fleet, scaling=None),
        )
    assert len(pids(scene.state)) == 2 and kept < pids(scene.state)
