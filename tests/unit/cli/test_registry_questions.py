from __future__ import annotations

from loramux.registry.records import Use
from tests.cli_factory import NAME, Shell
from tests.store_factory import damage


def test_the_list_has_every_adapter_or_those_of_one_tenant(shell: Shell) -> None:
    shell.push(f"{NAME}@1.4.2", seed=1)
    shell.push(f"{NAME}@1.5.0", seed=2)
    shell.push("bob/sorter@0.1.0", seed=1)
    shell.ok("split", NAME, "1.4.2=90", "1.5.0=10")
    table = shell.ok("list")
    assert NAME in table
    assert "prod → 1.4.2 90%, 1.5.0 10%" in table
    found = shell.json("list")["adapters"]
    assert [adapter["adapter"] for adapter in found] == [NAME, "bob/sorter"]
    assert [version["version"] for version in found[0]["versions"]] == ["1.5.0", "1.4.2"]
    assert found[0]["aliases"][0]["targets"][0] == {"version": "1.4.2", "weight": 90}
    assert [adapter["name"] for adapter in shell.json("list", "bob")["adapters"]] == ["sorter"]


def test_an_empty_registry_is_no_error(shell: Shell) -> None:
    assert shell.json("list") == {"adapters": []}
    result = shell.run("list")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "loramux push" in result.stderr
    assert shell.json("verify")["is_sound"]


def test_a_version_is_shown_with_its_details(shell: Shell) -> None:
    cid = shell.push(f"{NAME}@1.4.2")
    shell.push("bob/same@1.0.0")
    shell.in_library(lambda found: found.registry.add_uses([Use(cid=cid, at=1_700_000_000.0)]))
    [version] = shell.json("show", f"{NAME}@1.4.2")["versions"]
    assert version["cid"] == cid
    assert version["names"] == [f"{NAME}@1.4.2", "bob/same@1.0.0"]
    assert version["base_model"] == "tiny-llama"
    assert version["is_stored"] is True
    assert version["usage"]["num_requests"] == 1
    assert version["manifest"]["config"]["r"] == 4
    by_cid = shell.ok("show", cid[-64:][:12])
    assert cid in by_cid
    assert "bob/same@1.0.0" in by_cid
    assert "2023-11-14" in by_cid


def test_a_split_alias_shows_both_sides(shell: Shell) -> None:
    shell.push(f"{NAME}@1.4.2", seed=1)
    shell.push(f"{NAME}@1.5.0", seed=2)
    shell.ok("split", NAME, "1.4.2=90", "1.5.0=10")
    versions = shell.json("show", f"{NAME}@prod")["versions"]
    assert [(version["version"], version["share"]) for version in versions] == [
        ("1.4.2", 90),
        ("1.5.0", 10),
    ]


def test_an_adapter_is_shown_with_versions_and_aliases(shell: Shell) -> None:
    cid = shell.push(f"{NAME}@1.4.2")
    shell.ok("promote", f"{NAME}@1.4.2", "--alias", "canary")
    output = shell.ok("show", NAME)
    assert "canary   1.4.2 (revision 1)" in output
    assert cid[-64:][:12] in output


def test_unknown_is_1_and_impossible_is_2(shell: Shell) -> None:
    shell.push(f"{NAME}@1.4.2")
    for words in (["show", "bob/none"], ["show", f"{NAME}@9.9.9"], ["show", "0" * 12]):
        assert shell.run(*words).exit_code == 1, words
    for words in (["show", "../../etc"], ["list", "no/tenant"], ["show"]):
        assert shell.run(*words).exit_code == 2, words


def test_verify_finds_a_damaged_file(shell: Shell) -> None:
    shell.push(f"{NAME}@1.4.2")
    assert "Sound    1 adapters, 2 files" in shell.ok("verify")
    blob = shell.blobs()[0]
    damage(blob)
    result = shell.run("verify")
    assert result.exit_code == 1
    assert blob.name in result.stdout
    reported = shell.run("verify", "--json")
    assert reported.exit_code == 1
    assert '"is_sound": false' in reported.stdout
