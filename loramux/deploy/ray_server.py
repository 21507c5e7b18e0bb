"""`RayDeployment`: deploys a spec on Ray Serve, changes it, and takes it down.

It deploys by configuration, as `serve deploy` and KubeRay do: Ray then restarts only what the
configuration changes, while `serve.run` restarts everything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from loramux.deploy.serve_config import (
    ENGINE,
    ENGINES,
    FRONT,
    changes,
    only_spec,
    placed,
    serve_config,
)
from loramux.errors import InvalidRequest, LoramuxError
from loramux.launch.specs import ModelSpec

APPLICATIONS = (ENGINES, FRONT)
_LOOK_S = 0.25
_CALL_S = 10.0
_FAILED = ("DEPLOY_FAILED", "UNHEALTHY")
# After the last replica is ready, Ray needs a moment to say so.
_SLACK_S = 60.0

OnProgress = Callable[[str], None]


class DeployFailed(LoramuxError):
    """A deployment did not become what its spec says."""


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """What Ray says of the applications, and what the replicas say of themselves."""

    applications: dict[str, str]
    """Status by name."""
    replicas: dict[str, dict[str, int]]
    """Number of replicas by deployment and state."""
    messages: list[str]
    engines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_settled(self) -> bool:
        return set(self.applications) == set(APPLICATIONS) and all(
            status == "RUNNING" for status in self.applications.values()
        )

    def text(self) -> str:
        """Return one line."""
        parts = []
        for name, states in self.replicas.items():
            counts = ", ".join(f"{count} {state.lower()}" for state, count in states.items())
            parts.append(f"{name}: {counts or 'none'}")
        return "; ".join(parts) or "nothing is deployed"


def connect(
    address: str | None = None, *, needs_cluster: bool = False, num_cpus: int | None = None
) -> bool:
    """Connect to a Ray cluster; without one, start one that ends with this process.

    Returns whether it was started here. Raises DeployFailed if there is none at `address`, or none
    at all and `needs_cluster`.
    """
    if ray.is_initialized():
        return False
    # Nothing is sent to Ray's makers unless the user asks for it.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    given = address or os.environ.get("RAY_ADDRESS")
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    try:
        ray.init(address=given or "auto", **quiet)
        return False
    except ConnectionError as error:
        if given or needs_cluster:
            where = given or "this machine"
            raise DeployFailed(f"There is no Ray cluster at {where}: {error}") from error
    ray.init(num_cpus=num_cpus, include_dashboard=False, **quiet)
    return True


class RayDeployment:
    """The deployment of one spec on the Ray cluster of this process."""

    def __init__(
        self,
        models: ModelSpec | Sequence[ModelSpec],
        *,
        host: str | None = None,
        port: int | None = None,
        on_progress: OnProgress = lambda line: None,
    ) -> None:
        """Take one spec, alone or in a list.

        `host`, `port`: of the router, in place of `fleet.front_host` and `fleet.front_port`;
        `on_progress`: gets a line each time something changes.
        """
        self._host, self._port = host, port
        self._spec = placed(only_spec(models), host, port)
        self._on_progress = on_progress

    @property
    def url(self) -> str:
        """Where the router listens."""
        fleet = self._spec.fleet
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(fleet.front_host, fleet.front_host)
        return f"http://{host}:{fleet.front_port}"

    def run(self) -> DeploymentState:
        """Deploy the spec, and return when all replicas are ready; raise DeployFailed."""
        connect()
        if deployed_config() is not None:
            raise DeployFailed("This cluster already has a deployment: update it, or shut it down.")
        fleet = self._spec.fleet
        serve.start(http_options={"host": fleet.proxy_host, "port": fleet.proxy_port})
        return self._deploy(serve_config(self._spec))

    def update(self, spec: ModelSpec) -> DeploymentState:
        """Change the deployment into another spec, and return when that is done.

        Adapters, pins, limits and the number of replicas change in place; the model and settings
        by a rolling update. Raises DeployFailed; the spec of before is then deployed again.
        """
        spec = placed(spec, self._host, self._port)
        before = deployed_config()
        if before is None:
            raise DeployFailed("Nothing is deployed on this cluster: run it first.")
        _refuse_fixed(self._spec if self._spec is not spec else None, spec)
        config = serve_config(spec)
        for line in changes(before, config) or ["nothing changes"]:
            self._on_progress(line)
        try:
            state = self._deploy(config)
        except DeployFailed:
            self._on_progress("the update failed: back to the spec of before")
            _apply(before)
            raise
        self._spec = spec
        return state

    def status(self) -> DeploymentState:
        return deployment_state()

    def shutdown(self) -> None:
        """Stop all replicas, which first finish their open streams."""
        serve.shutdown()

    def _deploy(self, config: Mapping[str, Any]) -> DeploymentState:
        _apply(config)
        (engine,) = config["applications"][0]["deployments"]
        revision = engine["user_config"]["revision"]
        start_s = config["applications"][0]["args"]["start_s"]
        stop_s = engine["graceful_shutdown_timeout_s"]
        timeout_s = start_s + stop_s + _SLACK_S
        scaling = engine["autoscaling_config"]
        bounds = range(scaling["min_replicas"], scaling["max_replicas"] + 1)
        return _Waiting(revision, bounds, timeout_s, self._on_progress).wait()


class _Waiting:
    """Waits until all replicas have a revision; the time begins anew with all progress."""

    def __init__(
        self, revision: str, bounds: range, timeout_s: float, on_progress: OnProgress
    ) -> None:
        self._revision = revision
        self._bounds = bounds
        self._timeout_s = timeout_s
        self._on_progress = on_progress
        self._told = ""

    def wait(self) -> DeploymentState:
        deadline = time.monotonic() + self._timeout_s
        while True:
            state = deployment_state()
            line = state.text()
            if line != self._told:
                self._told = line
                self._on_progress(line)
                deadline = time.monotonic() + self._timeout_s
            self._refuse_failed(state)
            if state.is_settled and self._has_followed(state):
                return state
            if time.monotonic() > deadline:
                raise DeployFailed(
                    f"Nothing has moved for {self._timeout_s:g} s: {line}. "
                    + " ".join(state.messages)
                )
            time.sleep(_LOOK_S)

    def _refuse_failed(self, state: DeploymentState) -> None:
        for name, status in state.applications.items():
            if status in _FAILED:
                told = "\n".join(state.messages) or "Ray gives no reason."
                raise DeployFailed(f"The application {name} is {status}: {told}")
        for engine in state.engines:
            if engine["revision"] == self._revision and engine["fault"]:
                raise DeployFailed(engine["fault"])

    def _has_followed(self, state: DeploymentState) -> bool:
        running = state.replicas.get(ENGINE, {}).get("RUNNING", 0)
        followed = [one for one in state.engines if one["revision"] == self._revision]
        is_all = len(followed) == len(state.engines) == running
        return is_all and running in self._bounds


def deployed_config() -> dict[str, Any] | None:
    """Return the configuration of the cluster's deployment; None without one."""
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return None
    found = client.get_serve_details()["applications"]
    if not all(name in found for name in APPLICATIONS):
        return None
    applications = [found[name]["deployed_app_config"] for name in APPLICATIONS]
    return None if None in applications else {"applications": applications}


def deployment_state() -> DeploymentState:
    told = serve.status().applications
    applications = {name: str(told[name].status.value) for name in APPLICATIONS if name in told}
    messages = [told[name].message for name in applications if told[name].message]
    replicas: dict[str, dict[str, int]] = {}
    for name in applications:
        for deployment, one in told[name].deployments.items():
            states = {str(getattr(s, "value", s)): n for s, n in one.replica_states.items()}
            replicas[deployment] = states
            if one.message and one.status.value != "HEALTHY":
                messages.append(one.message)
    has_engines = replicas.get(ENGINE, {}).get("RUNNING", 0) > 0
    return DeploymentState(applications, replicas, messages, _described() if has_engines else [])


def _described() -> list[dict[str, Any]]:
    """Return what each replica says of itself; nothing while one does not answer."""
    try:
        handle = serve.get_deployment_handle(ENGINE, ENGINES)
        return list(handle.broadcast("describe").results(timeout_s=_CALL_S))
    except Exception:
        # A replica may end at any time.
        return []


def _apply(config: Mapping[str, Any]) -> None:
    client = _get_global_client()
    client.deploy_apps(ServeDeploySchema.model_validate(config))


def _refuse_fixed(old: ModelSpec | None, new: ModelSpec) -> None:
    """Refuses what only another deployment can have; raises InvalidRequest."""
    if old is None:
        return
    for name in ("proxy_host", "proxy_port"):
        if getattr(old.fleet, name) != getattr(new.fleet, name):
            raise InvalidRequest(
                f"fleet.{name} is set when Ray Serve starts: shut the deployment down first.",
                param=name,
            )
