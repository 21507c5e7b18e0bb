"""Changes of names; each is one transaction, and all changes are serialized."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from sqlalchemy import Connection

from loramux.adapters.recipe import CombinationOptions
from loramux.errors import RegistryConflict
from loramux.registry.audit import Actor, Event
from loramux.registry.names import AdapterName
from loramux.registry.quota import check_limits
from loramux.registry.recipes import Term, make_content
from loramux.registry.records import AliasAction, AliasState, Content, Target, VersionInfo
from loramux.registry.rows import access as access_rows
from loramux.registry.rows import adapters as adapter_rows
from loramux.registry.rows import aliases as alias_rows
from loramux.registry.rows import recipes as recipe_rows


@dataclass(frozen=True, slots=True)
class Change:
    """A transaction with the exclusive right to change names."""

    connection: Connection
    revision: int
    now: float
    actor: Actor = Actor()

    def push(
        self,
        adapter: AdapterName,
        version: str | None,
        content: Content,
        part_ids: Sequence[int] = (),
    ) -> tuple[VersionInfo, bool]:
        """Add a version, by default the next free one; return it and whether it is new.

        `part_ids`: the versions that a recipe combines. Raises QuotaExceeded for a new version over
        a limit of its tenant or key.
        """
        connection = self.connection
        row = adapter_rows.make_adapter(connection, adapter, revision=self.revision, now=self.now)
        if version is None:
            version = self._name_for(row, content)
        found = adapter_rows.find_version(connection, row.id, version)
        is_new = found is None or found.removed_at is not None
        if is_new:
            check_limits(connection, adapter, content, self.actor.key_id)
            content = replace(content, pushed_by=self.actor.key_id or None)
        if found is None:
            adapter_rows.add_version(connection, row, version, content, now=self.now)
        else:
            adapter_rows.refuse_other_content(adapter, found, content)
            adapter_rows.set_removed(connection, [found.id], None)
            adapter_rows.set_provenance(connection, found.id, content)
        if is_new:
            self._note(row.id)
        found = adapter_rows.find_version(connection, row.id, version)
        assert found is not None
        if is_new:
            recipe_rows.set_parts(connection, found.id, part_ids)
        recipe = recipe_rows.recipe_of(connection, found.id)
        info = adapter_rows.version_info(connection, adapter, found, content.size_bytes, recipe)
        return info, is_new

    def push_recipe(
        self,
        adapter: AdapterName,
        version: str | None,
        terms: Sequence[Term],
        options: CombinationOptions,
        *,
        any_base: bool = False,
    ) -> tuple[VersionInfo, bool]:
        """Add a version that is made of other versions and has no files of its own."""
        content, part_ids = make_content(self.connection, terms, options, any_base=any_base)
        return self.push(adapter, version, content, part_ids)

    def _name_for(self, row: adapter_rows.AdapterRow, content: Content) -> str:
        if row.latest is not None:
            latest = adapter_rows.find_version(self.connection, row.id, row.latest)
            if latest is not None and latest.cid == content.cid:
                return str(row.latest)
        return str(adapter_rows.next_version(self.connection, row.id))

    def remove_version(self, adapter: AdapterName, version: str) -> None:
        row = adapter_rows.get_adapter(self.connection, adapter)
        found = adapter_rows.get_version(self.connection, row, adapter, version)
        users = [
            state.alias
            for state in alias_rows.list_aliases(self.connection, row.id)
            if any(target.version == version for target in state.targets)
        ]
        if users:
            raise RegistryConflict(
                f"{adapter}@{version} is a target of {', '.join(users)}. Promote another version "
                "first, or remove the alias."
            )
        adapter_rows.set_removed(self.connection, [found.id], self.now)
        recipe_rows.refuse_broken(self.connection)
        self._note(row.id)

    def remove_adapter(self, adapter: AdapterName) -> None:
        row = adapter_rows.get_adapter(self.connection, adapter)
        for state in alias_rows.list_aliases(self.connection, row.id):
            self.remove_alias(adapter, state.alias, if_revision=None)
        for version in adapter_rows.live_versions(self.connection, row.id):
            found = adapter_rows.get_version(self.connection, row, adapter, str(version))
            adapter_rows.set_removed(self.connection, [found.id], self.now)
        recipe_rows.refuse_broken(self.connection)
        if access_rows.remove_shares_of(self.connection, row.id):
            access_rows.note_change(self.connection, self.revision)
        self._note(row.id)

    def move_alias(
        self,
        adapter: AdapterName,
        alias: str,
        targets: tuple[Target, ...],
        *,
        action: AliasAction,
        if_revision: int | None,
    ) -> AliasState:
        row = adapter_rows.get_adapter(self.connection, adapter)
        for target in targets:
            adapter_rows.get_version(self.connection, row, adapter, target.version)
        current = alias_rows.current_row(self.connection, row.id, alias)
        alias_rows.refuse_stale(adapter, alias, current, if_revision)
        if current is not None and alias_rows.read_targets(current.targets) == targets:
            return alias_rows.alias_state(current)
        parent = None if current is None else current.revision
        return self._add(row.id, alias, targets, action=action, parent_revision=parent)

    def remove_alias(self, adapter: AdapterName, alias: str, *, if_revision: int | None) -> None:
        row = adapter_rows.get_adapter(self.connection, adapter)
        current = alias_rows.current_row(self.connection, row.id, alias)
        alias_rows.refuse_stale(adapter, alias, current, if_revision)
        if current is None or not current.targets:
            raise RegistryConflict(f"{adapter} has no alias {alias}.")
        self._add(row.id, alias, (), action=AliasAction.REMOVE, parent_revision=current.revision)

    def rollback(self, adapter: AdapterName, alias: str, *, if_revision: int | None) -> AliasState:
        """Move the alias to its parent state; each call goes one state further back."""
        row = adapter_rows.get_adapter(self.connection, adapter)
        current = alias_rows.current_row(self.connection, row.id, alias)
        alias_rows.refuse_stale(adapter, alias, current, if_revision)
        _, parent = alias_rows.current_and_previous(self.connection, adapter, row.id, alias)
        targets = alias_rows.read_targets(parent.targets)
        for target in targets:
            adapter_rows.get_version(self.connection, row, adapter, target.version)
        return self._add(
            row.id,
            alias,
            targets,
            action=AliasAction.ROLLBACK,
            parent_revision=parent.parent_revision,
        )

    def _add(
        self,
        adapter_id: int,
        alias: str,
        targets: tuple[Target, ...],
        *,
        action: AliasAction,
        parent_revision: int | None,
    ) -> AliasState:
        current = alias_rows.current_row(self.connection, adapter_id, alias)
        state = AliasState(
            alias=alias,
            revision=1 if current is None else current.revision + 1,
            action=action,
            targets=targets,
            created_at=self.now,
        )
        alias_rows.add_state(
            self.connection,
            current,
            adapter_id=adapter_id,
            parent_revision=parent_revision,
            state=state,
        )
        self._note(adapter_id)
        return state

    def _note(self, adapter_id: int) -> None:
        adapter_rows.touch_adapter(self.connection, adapter_id, revision=self.revision)
        access_rows.notify(self.connection)

    def note_access(self) -> None:
        """Tells servers that limits, keys or shares have changed."""
        access_rows.note_change(self.connection, self.revision)


Changing = Callable[[Event], AbstractContextManager[Change]]
"""Begins a change; the event is recorded in its transaction."""
