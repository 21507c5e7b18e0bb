"""Dockerfile and compose file: linted, and true to the package. No image is built here."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml

from loramux.config.paths import DATA_VARIABLE, REGISTRY_VARIABLE, SHARED_CACHE_VARIABLE
from tests.serve_flags import served

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
# Continued lines joined, comments left out.
LINES = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE)).splitlines()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SERVERS = {name: COMPOSE["services"][name] for name in ("cpu", "gpu")}


def instructions(name: str) -> list[str]:
    return [line.partition(" ")[2].strip() for line in LINES if line.startswith(f"{name} ")]


def run(*command: str) -> None:
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def entry_flags() -> list[str]:
    (entry,) = instructions("ENTRYPOINT")
    words: list[str] = yaml.safe_load(entry)
    assert words[:4] == ["tini", "--", "loramux", "serve"]
    return words[4:]


def test_the_dockerfile_passes_hadolint() -> None:
    run(str(Path(sys.executable).parent / "hadolint"), "--no-color", "Dockerfile")


def test_the_compose_file_has_the_form_of_the_specification() -> None:
    check = (sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec")
    run(*check, "compose.yaml")


def test_what_is_copied_exists_and_is_sent_to_the_builder() -> None:
    sent = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    copied = [
        word for line in instructions("COPY") if "--from" not in line for word in line.split()
    ]
    sources = [word for word in copied if not word.startswith("./")]
    assert sorted(sources) == sorted(sent)
    assert all((ROOT / name).exists() for name in sources)


LOCK = (ROOT / "requirements-image.txt").read_text()
CUDA_LOCK = (ROOT / "requirements-image-cuda.txt").read_text()
LOCKED, LOCKED_CUDA = (
    dict(re.findall(r"^([a-z0-9-]+)==(\S+)", lock, re.MULTILINE)) for lock in (LOCK, CUDA_LOCK)
)
PINNED = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
# In the GPU image alone; the CPU image has torch from torch's own index.
OF_TORCH = {"torch", "triton"}
EXTRAS_OF_IMAGES = ("server", "router", "cpu", "gpu", "images", "jwt", "postgres", "redis", "s3")


def needed(*extras: str) -> set[str]:
    """Return the packages that the project and its extras ask for, on Linux."""
    listed = list(PROJECT["dependencies"])
    for extra in extras:
        listed += PROJECT["optional-dependencies"][extra]
    names = {re.split(r"[\[<>=;]", one)[0].strip() for one in listed} - {"loramux"}
    others = {
        inner
        for one in listed
        for inner in re.findall(r"^loramux\[(.+)\]", one)
        for inner in inner.split(",")
    }
    return names | (needed(*others) - names if others else set())


def test_packages_of_the_images_are_pinned_by_hash() -> None:
    installs = [line for line in instructions("RUN") if "pip install" in line]
    for name, lock in (("image", LOCK), ("image-cuda", CUDA_LOCK)):
        (locked,) = [line for line in installs if f"-r requirements-{name}.txt" in line]
        assert locked == f"pip install --require-hashes --no-deps -r requirements-{name}.txt"
        entries = re.split(r"\n(?=[a-z])", lock.partition("\n")[2].strip())
        assert len(entries) == lock.count("==") > 20
        assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", entry) for entry in entries)
        installs.remove(locked)
    # The package itself, and torch for CPUs, whose build is on torch's own index alone.
    package, torch = installs
    assert "--no-deps --no-build-isolation --no-index" in package
    assert "--no-deps --index-url https://download.pytorch.org/whl/cpu -c constraints.txt" in torch


def test_the_lock_holds_what_the_package_needs_at_the_pinned_versions() -> None:
    assert needed(*EXTRAS_OF_IMAGES) - OF_TORCH <= set(LOCKED)
    both = set(PINNED) & set(LOCKED)
    assert {name: LOCKED[name] for name in both} == {name: PINNED[name] for name in both}
    assert needed(*EXTRAS_OF_IMAGES) & set(PINNED) - OF_TORCH <= both
    assert not OF_TORCH & set(LOCKED) and set(PINNED) >= OF_TORCH
    # torch for CUDA needs an older setuptools.
    assert set(LOCKED_CUDA) >= OF_TORCH and set(LOCKED) & set(LOCKED_CUDA) == {"setuptools"}


def test_extras_name_only_extras_that_exist() -> None:
    extras = PROJECT["optional-dependencies"]
    for requirement in (r for listed in extras.values() for r in listed):
        for names in re.findall(r"^loramux\[(.+)\]", requirement):
            assert set(names.split(",")) <= set(extras)


def test_the_entry_point_serves_on_the_exposed_port_on_all_addresses() -> None:
    config = served(entry_flags())
    assert (config.host, [str(config.port)]) == ("0.0.0.0", instructions("EXPOSE"))
    (health,) = instructions("HEALTHCHECK")
    assert f"http://127.0.0.1:{config.port}/health" in health


def test_no_image_runs_as_root_or_holds_build_tools_that_it_does_not_need() -> None:
    stages = re.split(r"^FROM ", "\n".join(LINES), flags=re.MULTILINE)[1:]
    by_name = {stage.split("\n")[0].split(" AS ")[1]: stage for stage in stages}
    for target in ("cpu", "cuda"):
        assert by_name[target].rstrip().splitlines()[-1] == "USER 10001"
        assert f"COPY --from=build-{target} " in by_name[target]
    assert "gcc" not in by_name["runtime"] + by_name["cpu"]
    assert "--uid 10001" in by_name["runtime"]


def test_caches_and_data_are_in_volumes() -> None:
    (line,) = [line for line in instructions("ENV") if "LORAMUX_CACHE" in line]
    variables = dict(word.split("=", 1) for word in shlex.split(line))
    assert {DATA_VARIABLE, "HF_HOME", "TRITON_CACHE_DIR", "NUMBA_CACHE_DIR"} <= set(variables)
    (volumes,) = instructions("VOLUME")
    places = yaml.safe_load(volumes)
    for name, path in variables.items():
        assert name == "PATH" or path.startswith(tuple(places)), name
    for service in SERVERS.values():
        mounted = {volume.split(":")[1] for volume in service["volumes"]}
        assert set(places) <= mounted


def test_compose_builds_targets_of_the_dockerfile_and_gives_them_valid_flags() -> None:
    for name, service in SERVERS.items():
        assert f" AS {service['build']['target']}" in DOCKERFILE
        assert service["profiles"] == [name]
        config = served([*entry_flags(), *service["command"]])
        assert config.lora_modules or config.model
        variables = {REGISTRY_VARIABLE, SHARED_CACHE_VARIABLE}
        assert variables <= set(service["environment"])
        assert all(COMPOSE["services"][needed]["profiles"] for needed in service["depends_on"])
    adapters = served(SERVERS["cpu"]["command"]).lora_modules
    assert all((ROOT / "examples" / m.path.removeprefix("/")).is_dir() for m in adapters)
