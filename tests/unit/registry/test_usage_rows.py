from __future__ import annotations

import threading

from loramux.registry.records import Usage, Use
from loramux.registry.registry import Registry
from tests.registry_factory import make_cid


def test_uses_add_up_within_a_batch_and_across(registry: Registry) -> None:
    cid = make_cid(1)
    registry.add_uses(
        [
            Use(cid=cid, num_prompt_tokens=10, num_output_tokens=5, at=50.0),
            Use(cid=cid, num_prompt_tokens=1, num_output_tokens=2, at=40.0),
        ]
    )
    registry.add_uses([Use(cid=cid, num_requests=3, at=45.0)])
    assert registry.usage(cid) == Usage(
        cid=cid, num_requests=5, num_prompt_tokens=11, num_output_tokens=7, last_used_at=50.0
    )
    assert registry.usage(make_cid(2)) is None


def test_an_empty_batch_is_nothing(registry: Registry) -> None:
    registry.add_uses([])
    assert registry.most_used(limit=5) == []


def test_the_most_used_recent_adapters_come_first(registry: Registry) -> None:
    for number, (count, at) in enumerate([(5, 100.0), (9, 10.0), (7, 90.0), (5, 110.0)]):
        registry.add_uses([Use(cid=make_cid(number), num_requests=count, at=at)])
    most = [usage.cid for usage in registry.most_used(limit=3, since=50.0)]
    assert most == [make_cid(2), make_cid(3), make_cid(0)]
    assert registry.used_since(100.0) == {make_cid(0), make_cid(3)}


def test_servers_that_count_at_once_lose_nothing_and_do_not_lock_up(registry: Registry) -> None:
    cids = [make_cid(number) for number in range(4)]

    def count(order: list[str]) -> None:
        for _ in range(10):
            registry.add_uses([Use(cid=cid, at=1.0) for cid in order])

    threads = [threading.Thread(target=count, args=(o,)) for o in (cids, cids[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [usage.num_requests for usage in registry.most_used(limit=9)] == [20] * 4
