"""The manifests of deploy/kubernetes: valid without a cluster, and true to the programs."""

from __future__ import annotations

import copy
import functools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from typer.main import get_command

from loramux.cli.main import app
from loramux.config.file import load_serve_config
from loramux.config.paths import REGISTRY_VARIABLE
from loramux.deploy.serve_config import serve_config
from loramux.deploy.spec_file import read_spec
from loramux.router.members import NamedMembers, find_members
from tests.kubernetes_schemas import SCHEMAS
from tests.pod_security import violations
from tests.serve_flags import served

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("base", "keda", "gateway", "ray")
KUBERNETES = "1.34"
Document = dict[str, Any]


def documents(path: Path) -> list[Document]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one is not None]


def check(document: Document) -> None:
    """Raise ValidationError as an API server with strict validation would."""
    key = (document["apiVersion"], document["kind"])
    if key not in SCHEMAS:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        return
    jsonschema.validate(document, SCHEMAS[key])
    for template in templates(document["spec"]):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}}
        kubernetes_validate.validate(pod | {"template": template}, KUBERNETES, strict=True)


def templates(found: Any) -> Iterator[Document]:
    """Yield the pod templates of a custom resource."""
    values = found.values() if isinstance(found, dict) else found
    for value in values:
        if isinstance(value, dict | list):
            yield from templates(value)
    if isinstance(found, dict) and "template" in found:
        yield found["template"]


MANIFESTS = {
    f"{path.parent.name}/{path.stem}/{one['kind']}/{one['metadata']['name']}": one
    for path in sorted(FOLDER.glob("*/*.yaml"))
    if path.name != "kustomization.yaml"
    for one in documents(path)
}


def found(kind: str, name: str = "loramux") -> Document:
    (manifest,) = [
        one for one in MANIFESTS.values() if (one["kind"], one["metadata"]["name"]) == (kind, name)
    ]
    return copy.deepcopy(manifest)


@pytest.mark.parametrize("title", MANIFESTS)
def test_the_manifest_is_valid(title: str) -> None:
    check(MANIFESTS[title])


def test_all_kinds_are_there() -> None:
    kinds = {one["kind"] for one in MANIFESTS.values()}
    assert {kind for _, kind in SCHEMAS} <= kinds
    assert {"StatefulSet", "Deployment", "Service", "PodDisruptionBudget"} <= kinds


def break_a_probe(manifests: Document) -> Document:
    container(manifests)["livenessProbe"]["httpGets"] = {}
    return manifests


def break_a_port(manifests: Document) -> Document:
    manifests["spec"]["targetPorts"] = [{"number": "8000"}]
    return manifests


def break_a_pod(manifests: Document) -> Document:
    group = manifests["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    group["template"]["spec"]["containers"][0]["image"] = 5
    return manifests


def break_a_trigger(manifests: Document) -> Document:
    manifests["spec"]["triggers"][0]["metadata"]["threshold"] = 24
    return manifests


@pytest.mark.parametrize(
    ("kind", "break_it"),
    [
        ("StatefulSet", break_a_probe),
        ("InferencePool", break_a_port),
        ("RayService", break_a_pod),
        ("ScaledObject", break_a_trigger),
    ],
)
def test_a_broken_manifest_is_refused(kind: str, break_it: Any) -> None:
    """Catches a check that finds nothing."""
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check(break_it(found(kind)))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_an_overlay_names_exists(overlay: str) -> None:
    (kustomization,) = documents(FOLDER / overlay / "kustomization.yaml")
    assert kustomization["kind"] == "Kustomization"
    for resource in kustomization["resources"]:
        assert (FOLDER / overlay / resource).exists()


def pod_specs(manifest: Document) -> Iterator[Document]:
    """Yield the pods of a manifest."""
    if manifest["kind"] in ("StatefulSet", "Deployment", "RayService"):
        for template in templates(manifest["spec"]):
            yield template["spec"]


def test_all_pods_pass_the_restricted_pod_security_standard() -> None:
    specs = [spec for one in MANIFESTS.values() for spec in pod_specs(one)]
    assert len(specs) == 4 and not [text for spec in specs for text in violations(spec)]
    # KubeRay adds a container to the head.
    cluster = found("RayService")["spec"]["rayClusterConfig"]
    pod = cluster["headGroupSpec"]["template"]["spec"]["securityContext"]
    added = {"name": "autoscaler", **cluster["autoscalerOptions"]}
    assert not violations({"containers": [added], "securityContext": pod})


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("allowPrivilegeEscalation", None, "loramux: allowPrivilegeEscalation"),
        ("capabilities", {"drop": ["NET_RAW"]}, "loramux: capabilities.drop"),
        ("capabilities", {"drop": ["ALL"], "add": ["SYS_ADMIN"]}, "loramux: capabilities.add"),
        ("runAsNonRoot", False, "loramux: runAsNonRoot"),
        ("runAsUser", 0, "loramux: runAsUser"),
        ("seccompProfile", {"type": "Unconfined"}, "loramux: seccompProfile"),
        ("privileged", True, "loramux: privileged"),
        ("procMount", "Unmasked", "loramux: procMount"),
    ],
)
def test_the_check_of_the_standard_finds_what_it_forbids(field: str, value: Any, told: str) -> None:
    (spec,) = pod_specs(found("StatefulSet"))
    spec["containers"][0]["securityContext"][field] = value
    assert told in violations(spec)
    spec["hostNetwork"] = True
    spec["volumes"].append({"name": "host", "hostPath": {"path": "/"}})
    assert {"hostNetwork", "volume host"} <= set(violations(spec))


@functools.cache
def rendered(overlay: str) -> list[Document]:
    command = ["kubectl", "kustomize", str(FOLDER / overlay)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [one for one in yaml.safe_load_all(text) if one is not None]


needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is not installed"
)


@needs_kubectl
def test_the_gateway_has_no_router_and_only_it_reaches_servers_without_keys() -> None:
    made = rendered("gateway")
    assert not [one for one in made if "loramux-router" in yaml.safe_dump(one)]
    (servers,) = [one for one in made if one["kind"] == "StatefulSet"]
    assert served(container(servers)["args"]).access.insecure_no_auth
    (policy,) = [one for one in made if one["kind"] == "NetworkPolicy"]
    selector = policy["spec"]["podSelector"]["matchLabels"]
    assert selector.items() <= pod_labels(servers).items()
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    (rule,) = policy["spec"]["ingress"]
    labels = [one["podSelector"]["matchLabels"] for one in rule["from"]]
    assert {"app": "loramux-epp"} in labels and {"app.kubernetes.io/name": "prometheus"} in labels
    (gateway,) = [one for one in rule["from"] if "gateway" in str(one)]
    # Not any pod of any namespace that has its label.
    assert "namespaceSelector" not in gateway


@pytest.mark.parametrize("name", ["loramux", "loramux-router"])
def test_the_policies_of_base_select_its_pods_and_let_prometheus_in(name: str) -> None:
    (policy,) = [
        one for one in documents(FOLDER / "base" / "access.yaml") if one["metadata"]["name"] == name
    ]
    kind = "StatefulSet" if name == "loramux" else "Deployment"
    selector = policy["spec"]["podSelector"]["matchLabels"]
    assert selector.items() <= pod_labels(found(kind, name)).items()
    (rule,) = policy["spec"]["ingress"]
    if name == "loramux":
        labels = [one["podSelector"]["matchLabels"] for one in rule["from"]]
        router = pod_labels(found("Deployment", "loramux-router"))
        assert any(one.items() <= router.items() for one in labels)
        assert {"app.kubernetes.io/name": "prometheus"} in labels


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_renders_to_valid_manifests(overlay: str) -> None:
    made = rendered(overlay)
    assert made
    assert not [text for one in made for spec in pod_specs(one) for text in violations(spec)]
    for one in made:
        check(one)
    for one in made:
        if overlay == "gateway" and one["kind"] == "StatefulSet":
            # Checked with the image's own flags, as the others.
            assert served(container(one)["args"]).access.insecure_no_auth
            assert "LORAMUX_API_KEY" not in variables(container(one))


def container(manifest: Document) -> Document:
    (one,) = manifest["spec"]["template"]["spec"]["containers"]
    return one


def variables(one: Document) -> dict[str, Document]:
    return {variable["name"]: variable for variable in one["env"]}


def test_the_server_takes_the_flags_of_its_manifest() -> None:
    one = container(found("StatefulSet"))
    entry = [line for line in dockerfile() if line.startswith("ENTRYPOINT")][0]
    words: list[str] = yaml.safe_load(entry.partition(" ")[2])
    assert words[:4] == ["tini", "--", "loramux", "serve"] and "command" not in one
    config = served([*words[4:], *one["args"]])
    assert (config.host, config.port) == ("0.0.0.0", one["ports"][0]["containerPort"])
    assert {REGISTRY_VARIABLE, "LORAMUX_API_KEY"} <= variables(one).keys()
    # $(POD) is the pod's name.
    assert f"$({'POD'})" in one["args"] and "POD" in variables(one)
    mounted = {mount["mountPath"] for mount in one["volumeMounts"]}
    for path in (config.model, str(config.engine.disk_folder)):
        assert path is not None and path.startswith(tuple(mounted))


def test_the_router_takes_the_flags_of_its_manifest() -> None:
    one = container(found("Deployment", "loramux-router"))
    assert one["command"] == ["tini", "--", "loramux", "router"]
    command = get_command(app).commands["router"]  # type: ignore[attr-defined]
    parsed = command.make_context("router", list(one["args"])).params
    assert (parsed["host"], parsed["port"]) == ("0.0.0.0", one["ports"][0]["containerPort"])
    assert find_members(parsed["replicas"])
    members = NamedMembers(parsed["replicas"][0])
    servers, service = found("StatefulSet"), found("Service")
    name, port = servers["metadata"]["name"], service["spec"]["ports"][0]["port"]
    assert members._places[0] == (f"{name}-0.{service['metadata']['name']}", port)
    assert len(members._places) >= found("ScaledObject")["spec"]["maxReplicaCount"]
    assert servers["spec"]["serviceName"] == service["metadata"]["name"]
    grace = pod_of(found("Deployment", "loramux-router"))["terminationGracePeriodSeconds"]
    assert grace > parsed["drain_s"] + one["lifecycle"]["preStop"]["sleep"]["seconds"]


def pod_of(manifest: Document) -> Document:
    spec: Document = manifest["spec"]["template"]["spec"]
    return spec


def dockerfile() -> list[str]:
    return (ROOT / "Dockerfile").read_text().splitlines()


def test_probes_and_times_are_in_the_order_that_loses_nothing() -> None:
    servers = found("StatefulSet")
    one = container(servers)
    paths = {
        name: one[f"{name}Probe"]["httpGet"]["path"]
        for name in ("startup", "readiness", "liveness")
    }
    # A draining or restarting server must not be killed.
    assert paths == {"startup": "/health", "readiness": "/health", "liveness": "/live"}
    sleep_s = one["lifecycle"]["preStop"]["sleep"]["seconds"]
    config = served(one["args"])
    assert pod_of(servers)["terminationGracePeriodSeconds"] >= sleep_s + config.drain_s + 15
    readiness = one["readinessProbe"]
    # Failures at the end of a time limit each.
    taken_s = max(readiness["periodSeconds"], readiness["timeoutSeconds"])
    assert sleep_s > taken_s * readiness["failureThreshold"]
    for server in (one, container(found("Deployment", "loramux-router"))):
        for name in ("readiness", "liveness"):
            probe = server[f"{name}Probe"]
            assert probe["timeoutSeconds"] >= 2 and probe["failureThreshold"] >= 2


def test_labels_select_the_pods() -> None:
    labels = pod_labels(found("StatefulSet"))
    selectors = [found("Service")["spec"]["selector"]]
    for kind in ("PodDisruptionBudget", "InferencePool"):
        selectors.append(found(kind)["spec"]["selector"]["matchLabels"])
    assert all(selector.items() <= labels.items() for selector in selectors)
    router = pod_labels(found("Deployment", "loramux-router"))
    assert found("Service", "loramux-router")["spec"]["selector"].items() <= router.items()


def pod_labels(manifest: Document) -> dict[str, str]:
    labels: dict[str, str] = manifest["spec"]["template"]["metadata"]["labels"]
    return labels


def test_autoscaling_reads_metrics_that_servers_have() -> None:
    (trigger,) = found("ScaledObject")["spec"]["triggers"]
    for name in ("vllm:num_requests_waiting", "vllm:num_requests_running"):
        assert f"{name}{{" in trigger["metadata"]["query"]
    target = found("ScaledObject")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("StatefulSet", "loramux")


def test_the_replicas_of_ray_take_their_settings() -> None:
    config = yaml.safe_load(found("RayService")["spec"]["serveConfigV2"])
    assert config == serve_config(read_spec(ROOT / "deploy" / "ray_spec.yaml"))
    engines, front = config["applications"]
    settings = engines["args"]["settings"]
    assert load_serve_config(dict(settings), None).model == settings["model"]
    (deployment,) = engines["deployments"]
    wait_s = deployment["graceful_shutdown_timeout_s"]
    assert wait_s > settings["drain_s"]
    (router,) = front["deployments"]
    (group,) = found("RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    grace = group["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > max(wait_s, router["graceful_shutdown_timeout_s"])
    assert router["graceful_shutdown_timeout_s"] > front["args"]["drain_s"]
