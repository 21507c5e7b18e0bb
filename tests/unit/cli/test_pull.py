from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli_factory import NAME, Shell
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
