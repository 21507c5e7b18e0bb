"""`loramux list`, `show` and `verify`: output on a terminal and as JSON."""

from __future__ import annotations

import io

from rich.console import Console

from loramux.cli import registry_view
from loramux.cli.registry_view import (
    adapter_table,
    manifest_config,
    reference_text,
    short_cid,
    show_alias,
    targets_text,
    time_text,
)
from loramux.registry.names import AdapterName, parse_reference
from loramux.registry.records import (
    AdapterInfo,
    AliasAction,
    AliasState,
    Resolved,
    Target,
    Use,
    VersionInfo,
)
from tests.cli_factory import NAME, Shell
from tests.registry_factory import make_cid
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


def rendered(*renderables: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(*renderables)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_shares_are_shown_in_percent_whatever_their_sum() -> None:
    assert targets_text((Target("1.0.0"),)) == "1.0.0"
    assert targets_text((Target("1.0.0", 1), Target("2.0.0", 3))) == "1.0.0 25%, 2.0.0 75%"
    assert targets_text(()) == ""


def test_a_short_content_id_is_still_a_reference() -> None:
    assert str(parse_reference(short_cid(make_cid(1)))) == "cidv1:sha256:" + short_cid(make_cid(1))


def test_a_reference_contains_its_alias() -> None:
    named = Resolved(cid=make_cid(0), tenant="alice", name="x", version="1.0.0", alias="prod")
    assert reference_text(named) == "alice/x@1.0.0 (as prod)"
    assert reference_text(Resolved(cid=make_cid(0))) == short_cid(make_cid(0))


def test_times_are_in_utc() -> None:
    assert time_text(0.0) == "1970-01-01 00:00:00"


def test_a_base_name_from_a_file_cannot_steer_the_terminal() -> None:
    name = AdapterName("alice", "x")
    version = VersionInfo(
        adapter=name,
        version="1.0.0",
        cid=make_cid(0),
        size_bytes=1,
        base_model="evil\x1b[2J[red]",
        created_at=0.0,
    )
    info = AdapterInfo(adapter=name, latest="1.0.0", versions=(version,), aliases=(), revision=1)
    for shown in (rendered(adapter_table([info])), rendered_adapter(info)):
        assert "\x1b" not in shown
        assert "[red]" in shown


def rendered_adapter(info: AdapterInfo) -> str:
    console = Console(file=io.StringIO(), width=200)
    registry_view.show_adapter(info, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_an_alias_without_targets_is_shown_as_such() -> None:
    state = AliasState(
        alias="prod", revision=3, action=AliasAction.ROLLBACK, targets=(), created_at=0.0
    )
    console = Console(file=io.StringIO(), width=200)
    show_alias("alice/x", state, console)
    assert isinstance(console.file, io.StringIO)
    assert "→ nothing (revision 3)" in console.file.getvalue()


def test_only_what_a_config_sets_is_shown() -> None:
    config = {"r": 4, "bias": None, "use_dora": False, "rank_pattern": {}}
    assert manifest_config({"config": config}) == {"r": 4}
    assert manifest_config({}) == {}
