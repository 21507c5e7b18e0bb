"""The wheel, in an environment without the checkout: commands, page, migrations, demo."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.s3_server import free_ports

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel, built from the source distribution as an index would."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_has_what_a_server_reads(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        *(
            "loramux/server/ui/index.html",
            "loramux/py.typed",
            "loramux/demo/model/model_index.json",
        ),
        *(
            "loramux/demo/adapters/night.safetensors",
            "loramux/registry/migrations/r0001_names_and_receipts.py",
        ),
    ):
        assert name in names, name
    assert not any(name.startswith(("tests/", "benchmarks/", "examples/")) for name in names)
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"} <= inside


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["router", "server"])
def test_it_works_with_an_empty_home_outside_the_checkout(dist: Path, kind: str) -> None:
    (wheel,) = dist.glob("*.whl")
    (port,) = free_ports(1)
    program = [sys.executable, str(ROOT / "scripts" / "try_wheel.py"), kind, "--linked"]
    command = [*program, "--wheel", str(wheel), "--port", str(port)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
