"""What Ray Serve is told about a deployment: its configuration file, as for `serve deploy`.

Two applications, so that a change of the replicas never restarts the router. Ray compares the
configuration with what runs: `user_config` and the number of replicas change in place, `args`
replaces all replicas of their application.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from loramux.config.serve import SETTINGS
from loramux.errors import InvalidRequest
from loramux.launch.specs import FleetConfig, LoRAConfig, ModelSpec, ScalingConfig

ENGINES, FRONT = "engines", "front"
"""Names of the applications."""
ENGINE, ROUTER = "Engine", "Front"
"""Names of their deployments."""
# Ray sees only calls of the control plane; the servers have limits of their own.
_MAX_ONGOING = 100_000
# How long Ray waits for a replica beyond what the server itself waits for its streams.
_STOP_S = 15
_FRONT_DRAIN_S = 300
_FRONT_CPUS = 0.1
_HEALTH_PERIOD_S, _HEALTH_TIMEOUT_S = 2, 30
_METRICS_PERIOD_S, _LOOK_BACK_S = 1, 3


def only_spec(models: ModelSpec | Sequence[ModelSpec]) -> ModelSpec:
    """Return the model of a deployment; raise InvalidRequest for several."""
    specs = [models] if isinstance(models, ModelSpec) else list(models)
    if len(specs) != 1:
        raise InvalidRequest(
            f"A deployment has one model, got {len(specs)} specs: the cluster's Serve belongs to "
            "it. Give each model a cluster.",
            param="models",
        )
    return specs[0]


def placed(spec: ModelSpec, host: str | None, port: int | None) -> ModelSpec:
    """Return the spec with its router on a host and port; None: those of the spec."""
    fleet = spec.fleet
    host = fleet.front_host if host is None else host
    port = fleet.front_port if port is None else port
    # Ray's proxy takes the router's place where the router takes the proxy's.
    proxy = fleet.front_port if port == fleet.proxy_port else fleet.proxy_port
    return replace(spec, fleet=replace(fleet, front_host=host, front_port=port, proxy_port=proxy))


def serve_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the configuration of the whole deployment."""
    fleet = spec.fleet
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": fleet.proxy_host, "port": fleet.proxy_port},
        "logging_config": {"enable_access_log": False},
        "applications": [_engines(spec), _front(fleet)],
    }


def user_config(spec: ModelSpec) -> dict[str, Any]:
    """Return what replicas change while they run."""
    lora = (spec.lora if spec.is_text else None) or LoRAConfig()
    scaling = spec.fleet.scaling
    config: dict[str, Any] = {
        "adapters": {
            name: {"source": one.source, "pinned": one.pinned}
            for name, one in lora.adapters.items()
        },
        "limits": {name: dict(limits) for name, limits in spec.limits.items()},
        "target_load": 1.0 if scaling is None else scaling.target_load,
    }
    # Replicas tell what they have applied by this.
    told = {"config": config, "args": engine_args(spec)}
    return config | {"revision": _digest(told)}


def build_of(args: Mapping[str, Any]) -> str:
    """Return a digest of what makes a replica start again."""
    return _digest(args)


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Says what Ray does on the way from one configuration to another."""
    (was, was_front), (now, front) = old["applications"], new["applications"]
    (was_engine,), (engine,) = was["deployments"], now["deployments"]
    said = []
    actor = [one["ray_actor_options"] for one in (was_engine, engine)]
    if was["args"] != now["args"] or not _says_all(*actor):
        surge = engine["max_surge_percent"]
        how = f"with up to {surge} % more" if surge else "old ones stop first"
        said.append(f"replicas: rolling update, {how}")
    elif was_engine["user_config"] != engine["user_config"]:
        said.append(f"in place: {_in_place(was_engine['user_config'], engine['user_config'])}")
    if not _says_all(was_engine["autoscaling_config"], engine["autoscaling_config"]):
        said.append(f"number of replicas: {_size(was_engine)} -> {_size(engine)}")
    if not _says_all(was_front, front):
        said.append("router: rolling update")
    return said


def _engines(spec: ModelSpec) -> dict[str, Any]:
    fleet, resources = spec.fleet, spec.resources
    actor: dict[str, Any] = {"num_cpus": resources.num_cpus}
    if resources.num_gpus:
        actor["num_gpus"] = resources.num_gpus
    if resources.memory_gb is not None:
        actor["memory"] = int(resources.memory_gb * 2**30)
    drain_s = float(spec.settings.get("drain_s", SETTINGS["drain_s"].default))
    engine: dict[str, Any] = {
        "name": ENGINE,
        "user_config": user_config(spec),
        "max_ongoing_requests": _MAX_ONGOING,
        "max_surge_percent": fleet.surge_percent,
        "graceful_shutdown_timeout_s": drain_s + _STOP_S,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_period_s": _HEALTH_PERIOD_S,
        "health_check_timeout_s": _HEALTH_TIMEOUT_S,
        "ray_actor_options": actor,
        "request_router_config": {
            "request_router_class": "loramux.deploy.ray_members:FollowingRouter"
        },
        "autoscaling_config": _autoscaling(spec),
    }
    return {
        "name": ENGINES,
        "route_prefix": None,
        "import_path": "loramux.deploy.ray_engine:engines",
        "args": engine_args(spec),
        "deployments": [engine],
    }


def engine_args(spec: ModelSpec) -> dict[str, Any]:
    """Return what a process gets when it starts: a change of it makes another process."""
    fleet = spec.fleet
    settings = spec.serve_settings
    if spec.is_text:
        settings["allow_runtime_lora_updating"] = True
    return {
        "settings": settings,
        "host": fleet.engine_host,
        "port": fleet.engine_port,
        "start_s": fleet.start_s,
        # Servers of images have no route that loads an adapter ahead of a request.
        "prewarm": fleet.prewarm if spec.is_text else 0,
    }


def _autoscaling(spec: ModelSpec) -> dict[str, Any]:
    """Return the bounds of the number of replicas.

    A fixed number is a range of one: Ray would replace all replicas of a deployment that begins
    or ceases to have a policy.
    """
    count = spec.resources.replicas
    fixed = ScalingConfig(
        min_replicas=count, max_replicas=count, upscale_delay_s=0.0, downscale_delay_s=0.0
    )
    scaling = spec.fleet.scaling or fixed
    return {
        "min_replicas": scaling.min_replicas,
        "max_replicas": scaling.max_replicas,
        "upscale_delay_s": scaling.upscale_delay_s,
        "downscale_delay_s": scaling.downscale_delay_s,
        "metrics_interval_s": _METRICS_PERIOD_S,
        "look_back_period_s": _LOOK_BACK_S,
        "policy": {"policy_function": "loramux.deploy.ray_scaling:replicas_by_load"},
    }


def _front(fleet: FleetConfig) -> dict[str, Any]:
    return {
        "name": FRONT,
        "route_prefix": "/",
        "import_path": "loramux.deploy.ray_front:front",
        "args": {
            "host": fleet.front_host,
            "port": fleet.front_port,
            "runtime_loads": fleet.runtime_loads,
            "drain_s": _FRONT_DRAIN_S,
        },
        "deployments": [
            {
                "name": ROUTER,
                "num_replicas": fleet.front_replicas,
                "max_ongoing_requests": _MAX_ONGOING,
                "max_surge_percent": 100,
                "graceful_shutdown_timeout_s": _FRONT_DRAIN_S + _STOP_S,
                "graceful_shutdown_wait_loop_s": 0.2,
                "ray_actor_options": {"num_cpus": _FRONT_CPUS},
            }
        ],
    }


def _says_all(old: Any, new: Any) -> bool:
    """Whether a configuration has all of another one; Ray adds its defaults to what it is given."""
    if isinstance(new, Mapping):
        return isinstance(old, Mapping) and all(
            _says_all(old.get(key), one) for key, one in new.items()
        )
    if isinstance(new, list):
        return isinstance(old, list) and len(old) == len(new) and all(map(_says_all, old, new))
    return bool(old == new)


def _in_place(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    before, after = old["adapters"], new["adapters"]
    added, removed = len(after.keys() - before.keys()), len(before.keys() - after.keys())
    changed = sum(before[name] != after[name] for name in before.keys() & after.keys())
    said = [f"{added} adapters added, {removed} removed, {changed} changed"]
    if old["limits"] != new["limits"]:
        said.append("limits")
    return ", ".join(said)


def _size(engine: Mapping[str, Any]) -> str:
    scaling = engine["autoscaling_config"]
    bounds = (scaling["min_replicas"], scaling["max_replicas"])
    return " to ".join(map(str, dict.fromkeys(bounds)))


def _digest(what: object) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]
