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
    VersionInfo,
)
from tests.registry_factory import make_cid


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
