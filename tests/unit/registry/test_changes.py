"""Changes of names; concurrent writers are in test_registry.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from loramux.errors import AdapterNotFound, RegistryConflict
from loramux.registry.changes import Change
from loramux.registry.database import Database
from loramux.registry.names import AdapterName
from loramux.registry.records import AliasAction, AliasState, Target
from loramux.registry.rows import adapters as adapter_rows
from loramux.registry.rows import aliases as alias_rows
from tests.registry_factory import make_cid, make_content

SQL = AdapterName("alice", "sql")


@pytest.fixture
def change(database_url: str) -> Iterator[Change]:
    database = Database(database_url)
    with database.writing() as connection:
        yield Change(connection, adapter_rows.begin_change(connection), 10.0)
    database.close()


def promote(change: Change, version: str, if_revision: int | None = None) -> AliasState:
    return change.move_alias(
        SQL, "prod", (Target(version),), action=AliasAction.PROMOTE, if_revision=if_revision
    )


def aliases(change: Change) -> list[AliasState]:
    row = adapter_rows.get_adapter(change.connection, SQL)
    return alias_rows.list_aliases(change.connection, row.id)


def test_the_same_content_again_changes_nothing(change: Change) -> None:
    first, is_new = change.push(SQL, "1.0.0", make_content(1))
    again, is_new_again = change.push(SQL, "1.0.0", make_content(1, base_model="other"))
    assert (is_new, is_new_again) == (True, False)
    assert first == again


def test_without_a_number_the_next_free_one_is_taken(change: Change) -> None:
    assert change.push(SQL, None, make_content(1))[0].version == "1.0.0"
    assert change.push(SQL, None, make_content(2))[0].version == "1.0.1"
    change.push(SQL, "2.0.0-rc.1", make_content(3))
    assert change.push(SQL, None, make_content(4))[0].version == "2.0.0"


def test_without_a_number_the_latest_bytes_again_are_the_latest_version(change: Change) -> None:
    change.push(SQL, "1.0.0", make_content(1))
    version, is_new = change.push(SQL, None, make_content(1))
    assert (version.version, is_new) == ("1.0.0", False)


def test_a_removed_number_comes_back_with_its_own_bytes_only(change: Change) -> None:
    change.push(SQL, "1.0.0", make_content(1))
    change.remove_version(SQL, "1.0.0")
    with pytest.raises(RegistryConflict, match="not even removed ones"):
        change.push(SQL, "1.0.0", make_content(2))
    version, is_new = change.push(SQL, "1.0.0", make_content(1))
    assert (version.cid, is_new) == (make_cid(1), True)
    assert adapter_rows.get_adapter(change.connection, SQL).latest == "1.0.0"


def test_a_target_of_an_alias_cannot_be_removed(change: Change) -> None:
    change.push(SQL, "1.0.0", make_content(1))
    change.push(SQL, "2.0.0", make_content(2))
    promote(change, "1.0.0")
    with pytest.raises(RegistryConflict, match="a target of prod"):
        change.remove_version(SQL, "1.0.0")
    change.remove_version(SQL, "2.0.0")
    assert adapter_rows.get_adapter(change.connection, SQL).latest == "1.0.0"


def test_an_adapter_goes_with_its_versions_and_aliases(change: Change) -> None:
    change.push(SQL, "1.0.0", make_content(1))
    promote(change, "1.0.0")
    change.remove_adapter(SQL)
    with pytest.raises(AdapterNotFound):
        adapter_rows.get_adapter(change.connection, SQL)
    change.push(SQL, "1.0.0", make_content(1))
    assert aliases(change) == []


def test_the_same_target_again_is_no_new_state(change: Change) -> None:
    change.push(SQL, "1.0.0", make_content(1))
    assert promote(change, "1.0.0") == promote(change, "1.0.0")


def test_rollbacks_go_further_back_each_time_and_a_promotion_starts_anew(change: Change) -> None:
    for number in range(1, 5):
        change.push(SQL, f"{number}.0.0", make_content(number))
    for number in (1, 2, 3):
        promote(change, f"{number}.0.0")

    def roll_back() -> str:
        return change.rollback(SQL, "prod", if_revision=None).targets[0].version

    assert [roll_back(), roll_back()] == ["2.0.0", "1.0.0"]
    with pytest.raises(RegistryConflict, match="no earlier state"):
        roll_back()
    promote(change, "4.0.0")
    assert roll_back() == "1.0.0"


def test_a_rollback_to_a_removed_version_is_refused(change: Change) -> None:
    change.push(SQL, "1.0.0", make_content(1))
    change.push(SQL, "2.0.0", make_content(2))
    promote(change, "1.0.0")
    promote(change, "2.0.0")
    change.remove_version(SQL, "1.0.0")
    with pytest.raises(AdapterNotFound, match=r"no longer has version 1\.0\.0"):
        change.rollback(SQL, "prod", if_revision=None)


def test_a_removed_alias_can_be_rolled_back(change: Change) -> None:
    change.push(SQL, "1.0.0", make_content(1))
    promote(change, "1.0.0")
    change.remove_alias(SQL, "prod", if_revision=None)
    assert aliases(change) == []
    with pytest.raises(RegistryConflict, match="no alias prod"):
        change.remove_alias(SQL, "prod", if_revision=None)
    assert change.rollback(SQL, "prod", if_revision=2).targets == (Target("1.0.0"),)
    assert [state.revision for state in aliases(change)] == [3]


@pytest.mark.parametrize("act", ["promote", "rollback", "remove_alias"])
def test_a_stale_revision_cannot_move_an_alias(change: Change, act: str) -> None:
    change.push(SQL, "1.0.0", make_content(1))
    promote(change, "1.0.0", if_revision=0)
    with pytest.raises(RegistryConflict, match="moved meanwhile"):
        if act == "promote":
            promote(change, "1.0.0", if_revision=0)
        else:
            getattr(change, act)(SQL, "prod", if_revision=0)


def test_an_alias_needs_an_existing_version(change: Change) -> None:
    change.push(SQL, "1.0.0", make_content(1))
    with pytest.raises(AdapterNotFound, match=r"no version 9\.0\.0"):
        promote(change, "9.0.0")
