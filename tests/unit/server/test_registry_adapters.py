"""References to the registry: resolved from a cache that follows changes."""

from __future__ import annotations

import threading

import pytest

from loramux.server.naming.registry_adapters import RegistryAdapters
from loramux.server.naming.view import WHOLE_VIEW
from tests.unit.server.asgi_client import run
from tests.unit.server.registry_app import Make


def test_a_resolved_reference_is_cached(
    registry_app: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = registry_app()
    cid = served.push("acme/sql@1.0.0", 1)
    threads: list[str] = []
    real = served.registry.route
    monkeypatch.setattr(
        served.registry,
        "route",
        lambda reference: (threads.append(threading.current_thread().name), real(reference))[1],
    )

    async def work() -> None:
        for _ in range(3):
            assert (await served.adapters.resolve("acme/sql")).cid == cid

    run(work())
    assert len(threads) == 1 and threads[0] != threading.main_thread().name


def test_a_change_by_another_process_is_followed(registry_app: Make) -> None:
    served = registry_app()
    first, second = served.push("acme/sql@1.0.0", 1), served.push("acme/sql@1.1.0", 2)
    served.registry.promote("acme/sql", "1.0.0", alias="prod")
    heard = threading.Event()
    adapters = RegistryAdapters(served.library)
    forget = adapters.forget
    adapters.forget = lambda names: (forget(names), heard.set())[0]  # type: ignore[method-assign]
    adapters.start(poll_s=0.01)
    try:
        assert run(adapters.resolve("acme/sql")).cid == first
        served.registry.promote("acme/sql", "1.1.0", alias="prod")
        assert heard.wait(10)
        assert run(adapters.resolve("acme/sql")).cid == second
    finally:
        adapters.close()


def test_the_list_is_bounded_and_shows_what_a_bare_name_means(registry_app: Make) -> None:
    served = registry_app()
    cids = [served.push(f"acme/n{i}@1.0.0", i) for i in range(3)]
    assert [one.cid for one in served.adapters.list_current(WHOLE_VIEW, limit=2)] == cids[:2]
