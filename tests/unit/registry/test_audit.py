"""The audit log on both databases: every change is in it, and every manipulation is found."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import delete, insert, select, update

from loramux.errors import (
    AdapterNotFound,
    InvalidRequest,
    LoramuxError,
    RegistryConflict,
    RegistryUnavailable,
)
from loramux.registry import audit
from loramux.registry.audit import Action, Actor, Event, Head, Signer, read_anchor
from loramux.registry.registry import Registry
from loramux.registry.schema import audit_entries, audit_head
from loramux.registry.tenants import SettingChanges
from tests.registry_factory import FakeClock, make_cid, make_content

ACTOR = Actor("acme", "k1", "192.0.2.7")
KEY = Ed25519PrivateKey.generate()
PUBLIC = KEY.public_key()


@pytest.fixture
def signing(database_url: str, clock: FakeClock) -> Any:
    with Registry(database_url, clock=clock, signer=Signer(KEY)) as registry:
        yield registry.acting(ACTOR)


def change_names(registry: Registry) -> None:
    registry.push("acme/sql@1.0.0", make_content(1))
    registry.push("acme/sql@1.1.0", make_content(2))
    registry.promote("acme/sql", "1.0.0", alias="prod")
    registry.split("acme/sql", {"1.0.0": 90, "1.1.0": 10}, alias="prod")
    registry.rollback("acme/sql", alias="prod")
    registry.remove("acme/sql@1.1.0")


def faults(registry: Registry, **given: Any) -> tuple[str, ...]:
    return registry.audit.verify(keys=[PUBLIC], **given).faults


def write(registry: Registry, *statements: Any) -> None:
    """Change the database as an attacker with its password could."""
    with registry._database.writing() as one:
        for statement in statements:
            one.execute(statement)


def test_every_change_has_an_entry_with_actor_target_and_result(signing: Registry) -> None:
    change_names(signing)
    found = [one.entry for one in signing.audit.all_entries()]
    assert [(one.number, one.action, one.target) for one in found] == [
        (1, "push", "acme/sql@1.0.0"),
        (2, "push", "acme/sql@1.1.0"),
        (3, "promote", "acme/sql@prod"),
        (4, "split", "acme/sql@prod"),
        (5, "rollback", "acme/sql@prod"),
        (6, "delete", "acme/sql@1.1.0"),
    ]
    assert {(one.actor, one.tenant, one.result, one.reason) for one in found} == {
        (ACTOR, "acme", "ok", "")
    }
    assert found[0].details["cid"] == make_cid(1)
    assert found[3].details["targets"] == {"1.0.0": 90, "1.1.0": 10}
    report = signing.audit.verify(keys=[PUBLIC])
    assert (report.num_entries, report.num_signed, report.faults) == (6, 6, ())


def test_a_refused_change_has_an_entry_with_its_reason(signing: Registry) -> None:
    signing.push("acme/sql@1.0.0", make_content(1))
    with pytest.raises(RegistryConflict):
        signing.push("acme/sql@1.0.0", make_content(2))
    with pytest.raises(AdapterNotFound):
        signing.remove("acme/none")
    refused = [one.entry for one in signing.audit.entries() if one.entry.result == "refused"]
    assert [(one.action, one.target) for one in refused] == [
        ("delete", "acme/none"),
        ("push", "acme/sql@1.0.0"),
    ]
    assert "other content" in refused[1].reason
    assert not faults(signing)


def test_an_error_that_passes_several_layers_is_recorded_once(signing: Registry) -> None:
    with pytest.raises(AdapterNotFound) as raised:
        signing.remove("acme/none")
    event = Event(Action.DELETE, "acme", "acme/none")
    signing.audit.record_refusal(ACTOR, event, raised.value)
    assert len(signing.audit.entries()) == 1


def test_refusals_are_limited_and_counted(signing: Registry) -> None:
    for _ in range(audit.REFUSALS_AT_ONCE + 10):
        with pytest.raises(LoramuxError):
            signing.remove("acme/none")
    assert signing.audit.head().number == audit.REFUSALS_AT_ONCE
    signing.audit._refusals.take(-1)
    with pytest.raises(LoramuxError):
        signing.remove("acme/none")
    assert signing.audit.entries(limit=1)[0].entry.details == {"not_recorded": 10}


def test_a_change_and_its_entry_are_one_transaction(
    signing: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit.rows, "add_entry", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        signing.push("acme/sql@1.0.0", make_content())
    monkeypatch.undo()
    assert signing.adapters() == [] and signing.audit.head() == Head(0, "")


@pytest.mark.parametrize(
    "values",
    [
        {"target": "acme/other@1.0.0"},
        {"actor_key": "k2"},
        {"address": "192.0.2.8"},
        {"created_at": 1.0},
        {"result": "refused"},
        {"reason": "x"},
        {"details": {}},
        {"tenant": "globex"},
        {"key_id": ""},
        {"digest": "0" * 64},
        {"details": {"cid": 2**60}},
    ],
    ids=lambda values: next(iter(values)),
)
def test_an_edit_is_found(signing: Registry, values: dict[str, Any]) -> None:
    change_names(signing)
    write(signing, update(audit_entries).where(audit_entries.c.number == 3).values(**values))
    assert any("3" in fault for fault in faults(signing))


def test_a_forged_signature_is_found(signing: Registry) -> None:
    change_names(signing)
    write(signing, update(audit_entries).where(audit_entries.c.number == 3).values(signature="AA"))
    assert faults(signing) == ("The signature of entry 3 is not valid.",)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [((1,), "Before entry 2, 1 is"), ((3,), "Before entry 4, 3 is"), ((3, 4), "5, 3 to 4 is")],
)
def test_a_deletion_in_the_middle_is_found(
    signing: Registry, numbers: tuple[int, ...], text: str
) -> None:
    change_names(signing)
    write(signing, delete(audit_entries).where(audit_entries.c.number.in_(numbers)))
    assert any(text in fault for fault in faults(signing))


def test_a_truncation_is_found_by_the_recorded_end(signing: Registry) -> None:
    change_names(signing)
    write(signing, delete(audit_entries).where(audit_entries.c.number > 4))
    assert any("cut off" in fault for fault in faults(signing))
    write(signing, delete(audit_entries), delete(audit_head))
    assert any("cut off" in fault for fault in faults(signing))
    with pytest.raises(RegistryUnavailable, match="end of the audit log is missing"):
        signing.push("acme/sql@3.0.0", make_content(3))
    assert len(signing.show("acme/sql").versions) == 1


def test_a_truncation_with_the_recorded_end_is_found_by_an_anchor(
    signing: Registry, tmp_path: Path
) -> None:
    change_names(signing)
    path = tmp_path / "anchor.json"
    path.write_text(signing.audit.head().to_json())
    digest = select(audit_entries.c.digest).where(audit_entries.c.number == 4).scalar_subquery()
    write(
        signing,
        update(audit_head).values(number=4, digest=digest),
        delete(audit_entries).where(audit_entries.c.number > 4),
    )
    assert not faults(signing), "nothing in the database tells"
    assert "entry 6, which is missing" in faults(signing, anchors=[read_anchor(path)])[0]
    change_names_again = [signing.push(f"acme/new@{n}.0.0", make_content(n)) for n in (1, 2)]
    assert len(change_names_again) == 2
    assert faults(signing, anchors=[read_anchor(path)]) == (
        "Entry 6 is not the one of the anchor.",
    )


def test_entries_written_anew_without_the_key_are_found(
    signing: Registry, open_registry: Callable[[], Registry]
) -> None:
    """An attacker may compute all digests anew, but not the signatures."""
    change_names(signing)
    rewritten, previous = [], ""
    for one in signing.audit.all_entries():
        target = "acme/forged@1.0.0" if one.entry.number == 1 else one.entry.target
        entry = audit.replace(one.entry, target=target, previous=previous)
        previous = entry.digest()
        rewritten.append(audit._values(entry, previous, one.signature))
    write(
        signing,
        delete(audit_entries),
        insert(audit_entries).values(rewritten),
        update(audit_head).values(digest=previous),
    )
    unsigned = open_registry()
    assert unsigned.audit.verify().faults == (), "digests alone do not tell"
    assert len(faults(signing)) == 6
    other = Ed25519PrivateKey.generate().public_key()
    assert "another key" in signing.audit.verify(keys=[other]).faults[0]


def test_several_servers_write_one_chain(
    database_url: str, clock: FakeClock, open_registry: Callable[[], Registry]
) -> None:
    registries = [open_registry() for _ in range(3)]

    def change(number: int) -> None:
        registry = registries[number % 3].acting(Actor(f"t{number}", "", ""))
        registry.push(f"t{number}/a", make_content(number))
        registry.audit.record(ACTOR, Event(Action.PIN, "acme", f"a{number}"))

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(change, range(18)))
    report = registries[0].audit.verify()
    assert (report.num_entries, report.faults) == (36, ())


def test_the_anchor_file_follows_each_change(
    database_url: str, clock: FakeClock, tmp_path: Path
) -> None:
    path = tmp_path / "audit-head.json"
    with Registry(database_url, clock=clock, anchor=path) as registry:
        change_names(registry)
        assert read_anchor(path) == registry.audit.head()
        assert path.stat().st_mode & 0o077 == 0
        registry.audit.record(ACTOR, Event(Action.PIN, "acme", "acme/sql"))
        assert read_anchor(path).number == 7


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "x"}', '{"format": 1, "number": 1}'])
def test_a_broken_anchor_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "anchor").write_text(text)
    with pytest.raises(InvalidRequest, match="no anchor"):
        read_anchor(tmp_path / "anchor")


def test_hostile_text_is_stored_and_verified(signing: Registry) -> None:
    target = "a\0b\n\x1b[31m\ud800" + "x" * 1000
    event = Event(Action.LOAD, "t" * 500, target, {"path": "\0", "none": None})
    signing.audit.record(Actor("\ud800", "k", "y" * 999), event)
    entry = signing.audit.entries()[0].entry
    assert entry.target.startswith("a�b��[31m�xxx") and len(entry.target) == audit.MAX_TARGET
    assert entry.details == {"path": "�"}
    assert not faults(signing)


def test_entries_are_found_by_tenant_action_and_page(signing: Registry) -> None:
    change_names(signing)
    signing.push("globex/a", make_content(9))
    log = signing.audit

    def numbers(**given: Any) -> list[int]:
        return [one.entry.number for one in log.entries(**given)]

    assert numbers(tenant="globex") == [7]
    assert numbers(action="push") == [7, 2, 1]
    assert numbers(limit=2) == [7, 6]
    assert numbers(limit=2, before=6) == [5, 4]
    with pytest.raises(InvalidRequest):
        log.entries(limit=0)


def test_changes_of_tenants_are_recorded(signing: Registry) -> None:
    signing.tenants.set("acme", SettingChanges(limits={"adapters": 3, "max_rank": None}, share=2))
    entry = signing.audit.entries()[0].entry
    assert (entry.action, entry.target) == ("tenant.set", "acme")
    assert entry.details == {"adapters": 3, "max_rank": "none", "share": 2}


def test_a_log_of_several_batches_is_verified(
    signing: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "BATCH", 2)
    change_names(signing)
    assert signing.audit.verify(keys=[PUBLIC]).num_entries == 6
