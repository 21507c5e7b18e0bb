"""Names that the router resolves, and those that it passes as they came."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loramux.registry.keys import KeyRights
from loramux.registry.names import AdapterName
from loramux.registry.registry import Registry
from loramux.router.app import RouterApp
from loramux.router.resolve import RegistryNames
from loramux.types.residency import key_of_cid
from tests.registry_factory import make_content
from tests.unit.router.fake_replica import FakeReplica, ask, run, running_router

OLD, NEW, FOREIGN = make_content("old"), make_content("new"), make_content("foreign")


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry(tmp_path / "registry.db") as registry:
        registry.push("acme/sql@1.0.0", OLD)
        registry.push("acme/sql@2.0.0", NEW)
        registry.promote("acme/sql", "1.0.0", alias="prod")
        registry.push("globex/json@1.0.0", FOREIGN)
        yield registry


def sent(
    path: Path, body: Any, *, headers: dict[str, str] | None = None, **options: Any
) -> tuple[Any, RouterApp]:
    """Return the body that the replica gets, and the router."""

    async def work() -> tuple[Any, RouterApp]:
        replica = FakeReplica("0")
        names = RegistryNames(Registry(path / "registry.db"), **options)
        async with running_router(replica, names=names) as app:
            await ask(app, body=body, headers=headers)
            return replica.requests[0].body, app

    content, app = run(work())
    return json.loads(content), app


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


@pytest.mark.parametrize("name", ["acme/sql", "acme/sql@prod"])
def test_an_alias_is_sent_on_as_its_version(registry: Registry, tmp_path: Path, name: str) -> None:
    body, app = sent(tmp_path, {"model": name, "prompt": "x", "seed": 12345678901234567890})
    assert body == {"model": "acme/sql@1.0.0", "prompt": "x", "seed": 12345678901234567890}
    assert app.fleet.keys_of("acme/sql@1.0.0") == (key_of_cid(OLD.cid),)


def test_every_part_of_a_list_is_resolved(registry: Registry, tmp_path: Path) -> None:
    asked = {"model": "base", "adapters": ["acme/sql", "globex/json@1.0.0", "own"]}
    body, _ = sent(tmp_path, asked)
    assert body == {"model": "base", "adapters": ["acme/sql@1.0.0", *asked["adapters"][1:]]}


@pytest.mark.parametrize("name", ["sql", "acme/sql@1.0.0", "acme/none", "a/b/c", "", 5, None])
def test_other_names_are_passed_as_they_came(registry: Registry, tmp_path: Path, name: Any) -> None:
    assert sent(tmp_path, {"model": name})[0] == {"model": name}


def test_the_replicas_choose_a_version_of_a_split_alias(registry: Registry, tmp_path: Path) -> None:
    registry.split("acme/sql", {"1.0.0": 90, "2.0.0": 10}, alias="prod")
    assert sent(tmp_path, {"model": "acme/sql"})[0] == {"model": "acme/sql"}


def test_names_that_a_caller_may_not_use_are_not_resolved(
    registry: Registry, tmp_path: Path
) -> None:
    """A version in the answer to a foreign name would tell that it exists."""
    keys = {
        tenant: registry.access.create_key(KeyRights(tenant=tenant)).text
        for tenant in ("acme", "globex", None)
    }
    limited = registry.access.create_key(KeyRights(tenant="acme", adapters=("x-*",))).text
    exact, asked = {"model": "acme/sql@1.0.0"}, {"model": "acme/sql"}
    for key in (keys["acme"], keys[None], "the router's own"):
        body, _ = sent(tmp_path, asked, headers=bearer(key), api_key="the router's own")
        assert body == exact, key
    wrong = keys["acme"][:-1] + ("A" if keys["acme"][-1] != "A" else "B")
    for key in (keys["globex"], limited, wrong, "some-key", "a.b.c"):
        assert sent(tmp_path, asked, headers=bearer(key))[0] == asked, key
    of_gateway = {"x-team": "acme"}
    assert sent(tmp_path, asked, headers=of_gateway, tenant_header="X-Team")[0] == asked
    registry.access.share(AdapterName("acme", "sql"), "globex")
    assert sent(tmp_path, asked, headers=bearer(keys["globex"]))[0] == exact
    one_version = registry.access.create_key(KeyRights(tenant="third")).text
    registry.access.share(AdapterName("acme", "sql"), "third", "1.0.0")
    assert sent(tmp_path, asked, headers=bearer(one_version))[0] == asked


def test_changes_of_the_registry_are_followed(registry: Registry, tmp_path: Path) -> None:
    async def work() -> None:
        replica = FakeReplica("0")
        names = RegistryNames(Registry(tmp_path / "registry.db"), poll_s=0.05)
        async with running_router(replica, names=names) as app:
            await ask(app, body={"model": "acme/sql"})
            assert replica.requests[-1].json == {"model": "acme/sql@1.0.0"}
            before = names.revision
            registry.promote("acme/sql", "2.0.0", alias="prod")
            while names.revision == before:
                await asyncio.sleep(0.02)
            await ask(app, body={"model": "acme/sql"})
            assert replica.requests[-1].json == {"model": "acme/sql@2.0.0"}
            # Changes of names are the servers' alone.
            pushed = {"reference": "acme/sql", "model": "acme/sql"}
            await ask(app, "/v1/adapters", pushed)
            assert replica.requests[-1].json == pushed

    run(work())
