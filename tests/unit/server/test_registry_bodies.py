"""Bodies of the registry's routes."""

from __future__ import annotations

from loramux.registry.names import AdapterName
from loramux.registry.records import AdapterInfo, AliasAction, AliasState, Target, VersionInfo
from loramux.server.registry_bodies import registry_entry


def test_an_adapter_is_shown_with_its_versions_and_shares() -> None:
    name = AdapterName("acme", "sql")
    version = VersionInfo(
        adapter=name, version="1.0.0", cid="c", size_bytes=5, base_model="b", created_at=1.0
    )
    state = AliasState(
        alias="prod",
        revision=2,
        action=AliasAction.SPLIT,
        targets=(Target("1.0.0", 90), Target("1.1.0", 10)),
        created_at=2.0,
    )
    info = AdapterInfo(
        adapter=name, latest="1.0.0", versions=(version,), aliases=(state,), revision=3
    )
    entry = registry_entry(info)
    assert entry.id == "acme/sql" and entry.versions[0].bytes == 5
    assert entry.aliases[0].targets == {"1.0.0": 90, "1.1.0": 10}
    assert entry.aliases[0].action == "split"
