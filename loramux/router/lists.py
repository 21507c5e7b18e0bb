"""Routes that concern all replicas: lists, and pins."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from loramux.router.answers import Whole, error_answer, json_answer
from loramux.router.asked import Asked
from loramux.router.fleet import Fleet, Replica, State
from loramux.router.recently_used import RecentlyUsed
from loramux.router.relay import Relay
from loramux.types.residency import Tier

# A list of the same replicas at the same revisions is asked for once in this time.
_FRESH_S = 1.0
_MAX_LISTS = 256
# Replicas that take longer are left out of a list.
_LIST_S = 10.0
_LISTS = ("/v1/models", "/v1/adapters")
_SUMMED = (
    "hits",
    "misses",
    "running",
    "waiting",
    "cached_tokens",
    "requests",
    "prompt_tokens",
    "generation_tokens",
)


class Lists:
    """One list of all replicas for each caller, kept for a moment."""

    def __init__(self, fleet: Fleet, relay: Relay) -> None:
        self._fleet = fleet
        self._relay = relay
        self._kept: RecentlyUsed[object, tuple[float, asyncio.Task[Whole]]] = RecentlyUsed(
            _MAX_LISTS
        )
        self._revision = 0
        self._pinning = asyncio.Lock()

    def handles(self, asked: Asked) -> bool:
        if asked.method == "GET":
            return asked.path in _LISTS
        return asked.path.startswith("/v1/adapters/") and asked.path.endswith("/pin")

    def forget(self) -> None:
        """Ask the replicas again for the next list: what they have was changed."""
        self._revision += 1

    async def answer(self, asked: Asked) -> Whole:
        if asked.method != "GET":
            async with self._pinning:
                self.forget()
                return await self._pin(asked)
        now = time.monotonic()
        replicas = ready_replicas(self._fleet)
        callers = tuple(sorted(one for one in asked.headers if one[0] not in _PASSING))
        state = tuple((one.name, one.instance, one.revision) for one in replicas)
        key = (asked.target, callers, state, self._revision)
        kept = self._kept.get(key)
        if kept is None or now - kept[0] > _FRESH_S or _has_failed(kept[1]):
            kept = now, asyncio.create_task(self._list(asked, replicas))
            self._kept.put(key, kept)
        # One caller that leaves does not end the list of the others.
        return await asyncio.shield(kept[1])

    async def _ask_all(
        self, asked: Asked, replicas: Sequence[Replica], limit_s: float = _LIST_S
    ) -> list[Whole]:
        asking = (self._relay.ask(asked, replica, limit_s=limit_s) for replica in replicas)
        return await asyncio.gather(*asking)

    async def _list(self, asked: Asked, replicas: Sequence[Replica]) -> Whole:
        answers = await self._ask_all(asked, replicas)
        good = []
        for replica, one in zip(replicas, answers, strict=True):
            told = _decoded(one)
            if told is not None:
                good.append((replica, told))
        if not good:
            return answers[0] if answers else error_answer(503, "No replica is ready.")
        if asked.path == "/v1/models":
            return json_answer({"object": "list", "data": _merged_models(good)})
        data = _merged_adapters(good)
        total = max(len(data), *(told.get("total", 0) for _, told in good))
        return json_answer({"object": "list", "data": data, "total": total})

    async def _pin(self, asked: Asked) -> Whole:
        """Pins on all replicas or on none."""
        replicas = ready_replicas(self._fleet)
        answers = await self._ask_all(asked, replicas)
        failed = [one for one in answers if one.status != 200]
        if answers and not failed:
            return answers[0]
        if asked.method == "POST":
            done = [r for r, one in zip(replicas, answers, strict=True) if one.status == 200]
            await self._ask_all(replace(asked, method="DELETE"), done)
        return failed[0] if failed else error_answer(503, "No replica is ready.")


# Headers that differ from request to request, and on which no list depends.
_PASSING = frozenset(
    ("x-request-id", "x-forwarded-for", "user-agent", "accept", "accept-encoding", "traceparent")
)


def ready_replicas(fleet: Fleet) -> list[Replica]:
    found = fleet.usable(time.monotonic())
    return [replica for replica in found if replica.state is State.READY]


def _has_failed(task: asyncio.Task[Whole]) -> bool:
    if not task.done():
        return False
    return task.cancelled() or task.exception() is not None or task.result().status != 200


def _decoded(answer: Whole) -> dict[str, Any] | None:
    """Return the list of an answer; None for one that is no list."""
    if answer.status != 200:
        return None
    try:
        told = json.loads(answer.body)
    except ValueError:
        return None
    is_list = isinstance(told, dict) and isinstance(told.get("data"), list)
    return told if is_list else None


def _merged_models(good: Sequence[tuple[Replica, dict[str, Any]]]) -> list[dict[str, Any]]:
    merged: dict[str, dict[str, Any]] = {}
    for _, told in good:
        for entry in told["data"]:
            merged.setdefault(entry["id"], entry)
    return list(merged.values())


def _merged_adapters(good: Sequence[tuple[Replica, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return each adapter once: its fastest tier, sums of its counters, its tier by replica."""
    merged: dict[str, dict[str, Any]] = {}
    for replica, told in good:
        for entry in told["data"]:
            key = entry["cid"] or entry["id"]
            known = merged.get(key)
            tier = entry["tier"]
            if known is None:
                merged[key] = entry | {"replicas": {replica.id: tier}}
                continue
            known["replicas"][replica.id] = tier
            known["names"] = list(dict.fromkeys([*known["names"], *entry["names"]]))
            known["pinned"] = known["pinned"] or entry["pinned"]
            known["tier"] = max(known["tier"], tier, key=lambda name: Tier[name.upper()])
            uses = [one for one in (known["last_use"], entry["last_use"]) if one is not None]
            known["last_use"] = max(uses, default=None)
            for counter in _SUMMED:
                known[counter] += entry[counter]
    return list(merged.values())
