"""The committed files of the web page are what a fresh build of its source gives."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from loramux.server.live.page import FOLDER

SOURCE = Path(__file__).resolve().parents[3] / "ui"
MIN_NODE = (20, 19)


def node_version() -> tuple[int, ...] | None:
    if shutil.which("npm") is None or shutil.which("node") is None:
        return None
    text = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(map(int, text.strip().removeprefix("v").split(".")))


@pytest.mark.slow
def test_committed_files_are_those_of_a_fresh_build(tmp_path: Path) -> None:
    version = node_version()
    if version is None or version < MIN_NODE:
        pytest.skip(f"the build needs node 20.19 with npm, found {version}")
    source = tmp_path / "ui"
    shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("node_modules"))
    npm = ["npm", "--silent", "--no-audit", "--no-fund"]
    for command in (["ci"], ["run", "check"], ["run", "build", "--", "--outDir", "../built"]):
        done = subprocess.run([*npm, *command], cwd=source, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    built = tmp_path / "built"
    names = {path.relative_to(built) for path in built.rglob("*") if path.is_file()}
    assert names == {path.relative_to(FOLDER) for path in FOLDER.rglob("*") if path.is_file()}
    different = [
        str(name) for name in names if (built / name).read_bytes() != (FOLDER / name).read_bytes()
    ]
    assert different == [], "run `make ui` and commit loramux/server/ui"
