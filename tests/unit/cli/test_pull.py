from __future__ import annotations

import inspect
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from loramux.cli.pull import pull
from loramux.cli.serve import serve
from loramux.sources.config import SOURCE_SETTINGS
from tests.cli_factory import NAME, Shell
from tests.fault_server import FaultServer
from tests.store_factory import damage


@pytest.mark.parametrize("form", ["alice/flagger", "alice/flagger@1.4.2", "cid", "digits"])
def test_a_pulled_folder_has_the_bytes_that_were_pushed(
    form: str, shell: Shell, tmp_path: Path
) -> None:
    cid = shell.push(f"{NAME}@1.4.2")
    reference = {"cid": cid, "digits": cid[-64:][:12]}.get(form, form)
    output = shell.ok("pull", reference, tmp_path / "copy")
    assert cid in output
    copied = {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()}
    assert copied == {path.name: path.read_bytes() for path in shell.adapter().iterdir()}


def test_a_filled_folder_is_left_alone(shell: Shell, tmp_path: Path) -> None:
    shell.push(f"{NAME}@1.4.2")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("precious")
    assert shell.run("pull", NAME, tmp_path / "full").exit_code == 2
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.txt"]


def test_an_unknown_or_damaged_adapter_leaves_no_folder(shell: Shell, tmp_path: Path) -> None:
    shell.push(f"{NAME}@1.4.2")
    assert shell.run("pull", f"{NAME}@9.9.9", tmp_path / "copy").exit_code == 1
    for blob in shell.blobs():
        damage(blob)
    result = shell.run("pull", NAME, tmp_path / "copy")
    assert result.exit_code == 1
    assert "damaged" in result.stderr
    assert not (tmp_path / "copy").exists()


@pytest.fixture
def web(shell: Shell) -> Iterator[FaultServer]:
    """Where an adapter was pushed from that the store has lost."""
    files = {f"a/{path.name}": path.read_bytes() for path in shell.adapter().iterdir()}
    with FaultServer(files) as server:
        source = f"{server.url}/a"
        shell.ok("push", source, f"{NAME}@1.4.2", "--private-http-hosts", server.host)
        shutil.rmtree(shell.data / "store")
        yield server


def test_what_the_store_has_lost_comes_from_where_it_was_pushed_from(
    web: FaultServer, shell: Shell, tmp_path: Path
) -> None:
    shell.ok("pull", NAME, tmp_path / "copy", "--private-http-hosts", web.host)
    copied = {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()}
    assert copied == {path.name: path.read_bytes() for path in shell.adapter().iterdir()}


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], "allowed hosts"),
        (["--allowed-http-hosts", "other.example"], "allowed hosts"),
        (["--private-http-hosts", "HOST", "--max-adapter-size", "100"], "100"),
    ],
)
def test_the_limits_of_serve_hold_for_a_pull(
    flags: list[str], reason: str, web: FaultServer, shell: Shell, tmp_path: Path
) -> None:
    seen = len(web.seen)
    given = [web.host if flag == "HOST" else flag for flag in flags]
    result = shell.run("pull", NAME, tmp_path / "copy", *given)
    assert result.exit_code == 1 and reason in result.stderr, result.stderr
    assert not (tmp_path / "copy").exists()
    assert "HOST" in flags or len(web.seen) == seen, "a place that is not allowed was asked"


def test_a_limit_is_written_as_serve_takes_it(shell: Shell, tmp_path: Path) -> None:
    result = shell.run("pull", NAME, tmp_path / "copy", "--max-adapter-size", "many")
    assert result.exit_code == 2 and "--max-adapter-size" in result.stderr


def test_pull_has_the_settings_of_serve_with_their_defaults() -> None:
    signature = inspect.signature(pull)
    for name in SOURCE_SETTINGS:
        ours, theirs = signature.parameters[name], inspect.signature(serve).parameters[name]
        assert ours.default is theirs.default is None, "what is not given is serve's default"
        assert ours.annotation.__origin__ == theirs.annotation.__origin__
