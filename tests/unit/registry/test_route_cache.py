from __future__ import annotations

import pytest

from loramux.errors import AdapterNotFound
from loramux.registry.names import AdapterName
from loramux.registry.registry import Registry, RouteCache
from loramux.registry.resolve import Route
from tests.registry_factory import make_cid, make_content

SQL = AdapterName("a", "sql")


class CountingRegistry(Registry):
    num_queries = 0
    during_query = staticmethod(lambda: None)

    def route(self, reference: object) -> Route:
        self.num_queries += 1
        route = super().route(reference)  # type: ignore[arg-type]
        self.during_query()
        return route


@pytest.fixture
def counting(database_url: str) -> CountingRegistry:
    registry = CountingRegistry(database_url)
    registry.push("a/sql@1.0.0", make_content(1))
    registry.push("a/chat@1.0.0", make_content(2))
    return registry


def test_a_name_is_queried_once_until_its_adapter_changes(counting: CountingRegistry) -> None:
    cache = RouteCache(counting)
    for _ in range(3):
        assert cache.resolve("a/sql").version == "1.0.0"
        assert cache.resolve("a/chat").cid == make_cid(2)
    assert counting.num_queries == 2
    counting.push("a/sql@2.0.0", make_content(3))
    cache.forget([SQL])
    assert cache.resolve("a/sql").version == "2.0.0"
    cache.resolve("a/chat")
    assert counting.num_queries == 3
    counting.close()


def test_a_cid_is_queried_again_after_any_change(counting: CountingRegistry) -> None:
    cache = RouteCache(counting)
    assert cache.resolve(make_cid(1)).cid == make_cid(1)
    counting.remove("a/sql")
    cache.forget([SQL])
    with pytest.raises(AdapterNotFound):
        cache.resolve(make_cid(1))
    counting.close()


def test_failed_lookups_are_not_cached(counting: CountingRegistry) -> None:
    cache = RouteCache(counting)
    with pytest.raises(AdapterNotFound):
        cache.resolve("a/new")
    counting.push("a/new@1.0.0", make_content(4))
    assert cache.resolve("a/new").version == "1.0.0"
    counting.close()


def test_a_route_read_before_a_change_is_not_cached(counting: CountingRegistry) -> None:
    cache = RouteCache(counting)

    def change() -> None:
        counting.push("a/sql@2.0.0", make_content(3))
        cache.forget([SQL])

    counting.during_query = change  # type: ignore[assignment]
    assert cache.resolve("a/sql").version == "1.0.0"
    counting.during_query = lambda: None  # type: ignore[assignment]
    assert cache.resolve("a/sql").version == "2.0.0"
    counting.close()


def test_a_cached_split_follows_the_sticky_key(counting: CountingRegistry) -> None:
    cache = RouteCache(counting)
    counting.push("a/sql@2.0.0", make_content(3))
    counting.split("a/sql", {"1.0.0": 1, "2.0.0": 1}, alias="prod")
    for key in map(str, range(20)):
        assert cache.resolve("a/sql", sticky_key=key) == counting.resolve("a/sql", sticky_key=key)
    counting.close()
