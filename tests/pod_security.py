"""The restricted Pod Security Standard, by the fields that its documentation lists.

https://kubernetes.io/docs/concepts/security/pod-security-standards/, controls of the baseline and
the restricted profile for Linux pods.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Pod = dict[str, Any]
_VOLUMES = frozenset(
    (
        *("configMap", "csi", "downwardAPI", "emptyDir"),
        *("ephemeral", "persistentVolumeClaim", "projected", "secret"),
    )
)
_SYSCTLS = frozenset(
    (
        "kernel.shm_rmid_forced",
        "net.ipv4.ip_local_port_range",
        "net.ipv4.ip_unprivileged_port_start",
        "net.ipv4.tcp_syncookies",
        "net.ipv4.ping_group_range",
        "net.ipv4.ip_local_reserved_ports",
        "net.ipv4.tcp_keepalive_time",
        "net.ipv4.tcp_fin_timeout",
        "net.ipv4.tcp_keepalive_intvl",
        "net.ipv4.tcp_keepalive_probes",
    )
)
_PROFILES = ("RuntimeDefault", "Localhost")
_SELINUX_TYPES = ("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")


def violations(spec: Pod) -> list[str]:
    """Return what the restricted profile forbids of the `spec` of a pod."""
    return [*_of_pod(spec), *(text for one in _containers(spec) for text in _of(one, spec))]


def _containers(spec: Pod) -> Iterator[Pod]:
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        yield from spec.get(kind, ())


def _of_pod(spec: Pod) -> Iterator[str]:
    context = spec.get("securityContext", {})
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield name
    for volume in spec.get("volumes", ()):
        if not volume.keys() - {"name"} <= _VOLUMES:
            yield f"volume {volume['name']}"
    for sysctl in context.get("sysctls", ()):
        if sysctl["name"] not in _SYSCTLS:
            yield f"sysctl {sysctl['name']}"
    yield from _of_context(context, "pod")


def _of(container: Pod, spec: Pod) -> Iterator[str]:
    name, context = container["name"], container.get("securityContext", {})
    pod = spec.get("securityContext", {})
    yield from _of_context(context, name)
    if context.get("privileged"):
        yield f"{name}: privileged"
    if context.get("procMount", "Default") != "Default":
        yield f"{name}: procMount"
    if any(port.get("hostPort") for port in container.get("ports", ())):
        yield f"{name}: hostPort"
    if context.get("allowPrivilegeEscalation") is not False:
        yield f"{name}: allowPrivilegeEscalation"
    capabilities = context.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", ()):
        yield f"{name}: capabilities.drop"
    if not set(capabilities.get("add", ())) <= {"NET_BIND_SERVICE"}:
        yield f"{name}: capabilities.add"
    if not context.get("runAsNonRoot", pod.get("runAsNonRoot")):
        yield f"{name}: runAsNonRoot"
    profile = context.get("seccompProfile", pod.get("seccompProfile", {}))
    if profile.get("type") not in _PROFILES:
        yield f"{name}: seccompProfile"


def _of_context(context: Pod, name: str) -> Iterator[str]:
    """Yield what neither a pod nor a container may set."""
    if context.get("runAsUser") == 0:
        yield f"{name}: runAsUser"
    if context.get("seccompProfile", {}).get("type", _PROFILES[0]) not in _PROFILES:
        yield f"{name}: seccompProfile"
    if context.get("appArmorProfile", {}).get("type", _PROFILES[0]) not in _PROFILES:
        yield f"{name}: appArmorProfile"
    if context.get("windowsOptions", {}).get("hostProcess"):
        yield f"{name}: hostProcess"
    selinux = context.get("seLinuxOptions", {})
    if selinux.get("type", "") not in _SELINUX_TYPES or {"user", "role"} & selinux.keys():
        yield f"{name}: seLinuxOptions"
