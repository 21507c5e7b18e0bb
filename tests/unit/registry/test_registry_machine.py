"""Compares any sequence of changes with a model."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from loramux.errors import AdapterNotFound, RegistryConflict
from loramux.registry.database import Database
from loramux.registry.names import highest, parse_version
from loramux.registry.registry import Registry
from tests.registry_factory import make_cid, make_content, wipe

ADAPTERS = st.sampled_from(["alice/sql", "bob/sql"])
VERSIONS = st.sampled_from(["1.0.0", "1.1.0", "1.2.0-rc.1"])
ALIASES = st.sampled_from(["prod", "canary"])
SEEDS = st.integers(0, 2)
NUM_EXAMPLES = {"sqlite": 15, "postgresql": 5}
MORE = int(os.environ.get("LORAMUX_EXAMPLES", "1"))


@dataclass
class ModelAlias:
    current: dict[str, int] = field(default_factory=dict)
    """Maps versions to weights; empty if the alias does not exist."""
    past: list[dict[str, int]] = field(default_factory=list)
    num_states: int = 0

    def move(self, targets: dict[str, int]) -> None:
        if self.current != targets or self.num_states == 0:
            if self.num_states:
                self.past.append(self.current)
            self.current = targets
            self.num_states += 1


@dataclass
class ModelAdapter:
    cids: dict[str, str] = field(default_factory=dict)
    """All versions, also removed ones."""
    live: set[str] = field(default_factory=set)
    aliases: dict[str, ModelAlias] = field(default_factory=dict)

    @property
    def latest(self) -> str:
        return str(highest([parse_version(version) for version in self.live]))


class RegistryMachine(RuleBasedStateMachine):
    def __init__(self, registry: Registry, database: Database) -> None:
        super().__init__()
        self.registry = registry
        self.database = database
        self.model: dict[str, ModelAdapter] = {}

    @initialize()
    def start(self) -> None:
        wipe(self.database)

    def find(self, adapter: str) -> ModelAdapter | None:
        """Return None if no adapter of this name is visible."""
        known = self.model.get(adapter)
        return known if known is not None and known.live else None

    @rule(adapter=ADAPTERS, version=VERSIONS, seed=SEEDS)
    def push(self, adapter: str, version: str, seed: int) -> None:
        known = self.model.setdefault(adapter, ModelAdapter())
        cid = make_cid(seed)
        if known.cids.get(version, cid) != cid:
            with pytest.raises(RegistryConflict):
                self.registry.push(f"{adapter}@{version}", make_content(seed))
            return
        _, is_new = self.registry.push(f"{adapter}@{version}", make_content(seed))
        assert is_new == (version not in known.live)
        known.cids[version] = cid
        known.live.add(version)

    @rule(adapter=ADAPTERS, alias=ALIASES, weights=st.dictionaries(VERSIONS, st.just(1)))
    def move(self, adapter: str, alias: str, weights: dict[str, int]) -> None:
        if not weights:
            return
        known = self.find(adapter)
        if known is None or not set(weights) <= known.live:
            with pytest.raises(AdapterNotFound):
                self.registry.split(adapter, weights, alias=alias)
            return
        model = known.aliases.setdefault(alias, ModelAlias())
        model.move(weights)
        state = self.registry.split(adapter, weights, alias=alias)
        assert state.revision == model.num_states

    @rule(adapter=ADAPTERS, alias=ALIASES)
    def roll_back(self, adapter: str, alias: str) -> None:
        known = self.find(adapter)
        model = ModelAlias() if known is None else known.aliases.get(alias, ModelAlias())
        if known is None or not model.past or not set(model.past[-1]) <= known.live:
            with pytest.raises((RegistryConflict, AdapterNotFound)):
                self.registry.rollback(adapter, alias=alias)
            return
        self.registry.rollback(adapter, alias=alias)
        model.current = model.past.pop()
        model.num_states += 1

    @rule(adapter=ADAPTERS, version=VERSIONS)
    def remove_version(self, adapter: str, version: str) -> None:
        known = self.find(adapter)
        used = known is not None and any(version in a.current for a in known.aliases.values())
        if known is None or version not in known.live or used:
            with pytest.raises((RegistryConflict, AdapterNotFound)):
                self.registry.remove(f"{adapter}@{version}")
            return
        self.registry.remove(f"{adapter}@{version}")
        known.live.remove(version)

    @rule(adapter=ADAPTERS, alias=ALIASES)
    def remove_alias(self, adapter: str, alias: str) -> None:
        known = self.find(adapter)
        model = ModelAlias() if known is None else known.aliases.get(alias, ModelAlias())
        if not model.current:
            with pytest.raises((RegistryConflict, AdapterNotFound)):
                self.registry.remove(f"{adapter}@{alias}")
            return
        self.registry.remove(f"{adapter}@{alias}")
        model.move({})

    @rule(adapter=ADAPTERS)
    def remove_adapter(self, adapter: str) -> None:
        known = self.find(adapter)
        if known is None:
            with pytest.raises(AdapterNotFound):
                self.registry.remove(adapter)
            return
        self.registry.remove(adapter)
        known.live.clear()
        for model in known.aliases.values():
            if model.current:
                model.move({})

    @invariant()
    def names_mean_what_the_model_says(self) -> None:
        for adapter, known in self.model.items():
            if not known.live:
                with pytest.raises(AdapterNotFound):
                    self.registry.resolve(adapter)
                continue
            assert self.registry.resolve(f"{adapter}@latest").version == known.latest
            self.check_aliases(adapter, known)

    def check_aliases(self, adapter: str, known: ModelAdapter) -> None:
        for alias in ("prod", "canary"):
            targets = known.aliases.get(alias, ModelAlias()).current
            if not targets:
                with pytest.raises(AdapterNotFound):
                    self.registry.resolve(f"{adapter}@{alias}")
                continue
            found = self.registry.resolve(f"{adapter}@{alias}", sticky_key="user")
            assert found == self.registry.resolve(f"{adapter}@{alias}", sticky_key="user")
            assert found.version in targets
            assert found.cid == known.cids[str(found.version)]
        in_production = known.aliases.get("prod", ModelAlias()).current
        expected = set(in_production) or {known.latest}
        assert self.registry.resolve(adapter).version in expected

    @invariant()
    def the_registry_is_consistent(self) -> None:
        assert self.registry.verify() == ()
        live = {known.cids[version] for known in self.model.values() for version in known.live}
        assert self.registry.cids() == live


def test_any_sequence_of_changes(database_url: str) -> None:
    database, registry = Database(database_url), Registry(database_url)
    kind = "sqlite" if database.is_sqlite else "postgresql"
    run_state_machine_as_test(
        lambda: RegistryMachine(registry, database),
        settings=settings(
            max_examples=NUM_EXAMPLES[kind] * MORE,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    registry.close()
    database.close()
