"""What a new replica loads before it takes requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from loramux.router.fleet import Fleet, Replica, State


def busiest_adapters(listed: Iterable[Mapping[str, Any]], count: int) -> list[tuple[str, str]]:
    """Return name and CID of the adapters with the most requests, busiest first.

    `listed`: entries of a router's GET /v1/adapters.
    """
    used = [one for one in listed if one.get("cid") and one.get("names") and one["requests"]]
    used.sort(key=lambda one: -int(one["requests"]))
    return [(one["names"][0], one["cid"]) for one in used[:count]]


def own_adapters(
    adapters: Sequence[tuple[str, str]], *, own: str, members: Iterable[str]
) -> list[str]:
    """Return the names of adapters that a router's hash places on `own`, in their order.

    `members`: URLs of the replicas with which the new one shares them.
    """
    urls = {*members, own}
    fleet = Fleet(Replica(name=url, url=url, state=State.READY) for url in urls)
    found = []
    for name, cid in adapters:
        fleet.learn(name, cid)
        (home,) = fleet.homes(name, now=0.0, count=1)
        if home.name == own:
            found.append(name)
    return found
