"""Promote, split, roll back, remove and collect, each as a user types it."""

from __future__ import annotations

import pytest

from loramux.cli.registry import parse_shares
from loramux.errors import InvalidRequest
from tests.cli_factory import NAME, Shell


@pytest.fixture
def two_versions(shell: Shell) -> Shell:
    shell.push(f"{NAME}@1.4.2", seed=1)
    shell.push(f"{NAME}@1.5.0", seed=2)
    return shell


def test_an_alias_is_promoted_split_and_rolled_back_step_by_step(two_versions: Shell) -> None:
    shell = two_versions
    assert "→ 1.4.2 (revision 1)" in shell.ok("promote", f"{NAME}@1.4.2", "--alias", "prod")
    output = shell.ok("split", NAME, "--alias", "prod", "1.4.2=90", "1.5.0=10")
    assert "1.4.2 90%, 1.5.0 10%" in output
    assert shell.targets() == [("1.4.2", 90), ("1.5.0", 10)]
    shell.ok("promote", f"{NAME}@1.5.0")
    assert shell.targets() == [("1.5.0", 1)]
    shell.ok("rollback", NAME, "--alias", "prod")
    assert shell.targets() == [("1.4.2", 90), ("1.5.0", 10)]
    shell.ok("rollback", NAME)
    assert shell.targets() == [("1.4.2", 1)]
    refused = shell.run("rollback", NAME)
    assert refused.exit_code == 1
    assert "no earlier state" in refused.stderr


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (1, ["promote", f"{NAME}@9.9.9"]),
        (1, ["promote", "bob/other@1.0.0"]),
        (1, ["rollback", NAME, "--alias", "canary"]),
        (1, ["split", NAME, "1.4.2=90", "9.9.9=10"]),
        (1, ["rm", f"{NAME}@9.9.9"]),
        (2, ["promote", NAME]),
        (2, ["promote", f"{NAME}@latest"]),
        (2, ["promote", f"{NAME}@1.5.0", "--alias", "Not An Alias"]),
        (2, ["split", NAME]),
        (2, ["split", NAME, "1.4.2"]),
        (2, ["split", NAME, "1.4.2=0"]),
        (2, ["split", NAME, "1.4.2=ten", "1.5.0=1"]),
        (2, ["gc", "--grace-s", "-1"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_an_invalid_change_has_no_effect(
    status: int, words: list[str], two_versions: Shell
) -> None:
    shell = two_versions
    shell.ok("promote", f"{NAME}@1.4.2")
    before = shell.json("show", NAME)
    assert shell.run(*words).exit_code == status
    assert shell.json("show", NAME) == before


def test_a_version_in_use_stays_and_one_out_of_use_goes(two_versions: Shell) -> None:
    shell = two_versions
    shell.ok("promote", f"{NAME}@1.4.2")
    refused = shell.run("rm", f"{NAME}@1.4.2")
    assert refused.exit_code == 1
    assert "prod" in refused.stderr
    assert f"Removed  {NAME}@1.5.0" in shell.ok("rm", f"{NAME}@1.5.0")
    assert [version["version"] for version in shell.json("show", NAME)["versions"]] == ["1.4.2"]


def test_collecting_frees_what_was_removed_and_keeps_the_rest(two_versions: Shell) -> None:
    shell = two_versions
    shell.ok("rm", f"{NAME}@1.5.0")
    assert "Removed  0 adapters" in shell.ok("gc"), "it was pushed within the grace"
    assert "Removed  1 adapters" in shell.ok("gc", "--grace-s", "0")
    assert shell.json("verify")["num_adapters"] == 1


def test_gc_with_an_empty_registry_is_refused(two_versions: Shell) -> None:
    shell = two_versions
    wrong = ["--registry", shell.folder / "wrong.db"]
    refused = shell.run("gc", "--grace-s", "0", *wrong)
    assert refused.exit_code == 1
    assert "--registry" in refused.stderr
    assert shell.json("verify")["is_sound"]
    assert "Removed  2 adapters" in shell.ok("gc", "--grace-s", "0", "--all", *wrong)


def test_shares_are_read_strictly() -> None:
    assert parse_shares(["1.4.2=90", "1.5.0=10"]) == {"1.4.2": 90, "1.5.0": 10}
    for bad in (["1.4.2=9.5"], ["1.4.2="], ["1.4.2=-1"], ["1.4.2=²"], ["1.0.0=1", "1.0.0=2"]):
        with pytest.raises(InvalidRequest):
            parse_shares(bad)
