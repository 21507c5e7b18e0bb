"""Routes that concern all replicas: lists, runtime loads, pins."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from loramux.router.answers import Whole, error_answer, json_answer
from loramux.router.asked import Asked
from loramux.router.fleet import Fleet, Replica, State
from loramux.router.relay import Relay
from loramux.types.residency import Tier

_LOADS = {"/v1/load_lora_adapter": "/v1/unload_lora_adapter"}
_UNLOADS = {unload: load for load, unload in _LOADS.items()}
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


@dataclass(frozen=True, slots=True)
class _Loaded:
    """An adapter that was loaded at run time, for replicas that join later."""

    asked: Asked


class FanOut:
    def __init__(self, fleet: Fleet, relay: Relay) -> None:
        self._fleet = fleet
        self._relay = relay
        self._loaded: dict[str, _Loaded] = {}
        self._changing = asyncio.Lock()

    def handles(self, asked: Asked) -> bool:
        if asked.method == "GET":
            return asked.path in ("/v1/models", "/v1/adapters")
        is_pin = asked.path.startswith("/v1/adapters/") and asked.path.endswith("/pin")
        return is_pin or asked.path in _LOADS or asked.path in _UNLOADS

    async def answer(self, asked: Asked) -> Whole:
        if asked.method == "GET":
            return await self._list(asked)
        async with self._changing:
            if asked.path in _LOADS:
                return await self._load(asked)
            if asked.path in _UNLOADS:
                return await self._unload(asked)
            return await self._pin(asked)

    async def repeat_on(self, replica: Replica) -> None:
        """Loads on a replica that joined what was loaded at run time on the others."""
        async with self._changing:
            for name in [name for name in self._loaded if await self._is_gone(name, replica)]:
                del self._loaded[name]
            loads = [self._relay.ask(one.asked, replica) for one in self._loaded.values()]
            await asyncio.gather(*loads)

    async def _is_gone(self, name: str, joined: Replica) -> bool:
        """Whether the other replicas have unloaded a name, as another router has asked them."""
        others = [replica for replica in self._ready() if replica is not joined]
        if not others:
            return False
        path = f"/v1/models/{quote(name, safe='')}"
        look = replace(self._loaded[name].asked, method="GET", path=path, target=path, body=b"")
        return (await self._relay.ask(look, others[0])).status == 404

    def _ready(self) -> list[Replica]:
        found = self._fleet.usable(time.monotonic())
        return [replica for replica in found if replica.state is State.READY]

    async def _ask_all(self, asked: Asked, replicas: Sequence[Replica]) -> list[Whole]:
        return await asyncio.gather(*(self._relay.ask(asked, replica) for replica in replicas))

    async def _list(self, asked: Asked) -> Whole:
        replicas = self._ready()
        answers = await self._ask_all(asked, replicas)
        good = [
            (replica, json.loads(one.body))
            for replica, one in zip(replicas, answers, strict=True)
            if one.status == 200
        ]
        if not good:
            return answers[0] if answers else error_answer(503, "No replica is ready.")
        if asked.path == "/v1/models":
            return json_answer({"object": "list", "data": _merged_models(good)})
        data = _merged_adapters(good)
        total = max(len(data), *(told.get("total", 0) for _, told in good))
        return json_answer({"object": "list", "data": data, "total": total})

    async def _load(self, asked: Asked) -> Whole:
        """Loads on all replicas or on none."""
        replicas = self._ready()
        answers = await self._ask_all(asked, replicas)
        failed = [one for one in answers if one.status != 200]
        name = _field(asked, "lora_name")
        if not failed and answers:
            self._loaded[name] = _Loaded(asked)
            return answers[0]
        done = [r for r, one in zip(replicas, answers, strict=True) if one.status == 200]
        if name not in self._loaded:
            body = json.dumps({"lora_name": name}).encode()
            undo = replace(asked, target=_LOADS[asked.path], body=body)
            await self._ask_all(undo, done)
        return failed[0] if failed else error_answer(503, "No replica is ready.")

    async def _unload(self, asked: Asked) -> Whole:
        """Unloads everywhere; a replica that does not have the name is no failure."""
        self._loaded.pop(_field(asked, "lora_name"), None)
        answers = await self._ask_all(asked, self._ready())
        if not answers:
            return error_answer(503, "No replica is ready.")
        failed = [one for one in answers if one.status not in (200, 404)]
        good = [one for one in answers if one.status == 200]
        return (failed or good or answers)[0]

    async def _pin(self, asked: Asked) -> Whole:
        """Pins on all replicas or on none."""
        replicas = self._ready()
        answers = await self._ask_all(asked, replicas)
        failed = [one for one in answers if one.status != 200]
        if answers and not failed:
            return answers[0]
        if asked.method == "POST":
            done = [r for r, one in zip(replicas, answers, strict=True) if one.status == 200]
            await self._ask_all(replace(asked, method="DELETE"), done)
        return failed[0] if failed else error_answer(503, "No replica is ready.")


def _merged_models(good: Sequence[tuple[Replica, dict[str, Any]]]) -> list[dict[str, Any]]:
    merged: dict[str, dict[str, Any]] = {}
    for _, told in good:
        for entry in told["data"]:
            merged.setdefault(entry["id"], entry)
    return list(merged.values())


def _merged_adapters(good: Sequence[tuple[Replica, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Returns each adapter once: its fastest tier, sums of its counters, its tier by replica."""
    merged: dict[str, dict[str, Any]] = {}
    for replica, told in good:
        for entry in told["data"]:
            key = entry["cid"] or entry["id"]
            known = merged.get(key)
            tier = entry["tier"]
            if known is None:
                merged[key] = entry | {"replicas": {replica.name: tier}}
                continue
            known["replicas"][replica.name] = tier
            known["names"] = list(dict.fromkeys([*known["names"], *entry["names"]]))
            known["pinned"] = known["pinned"] or entry["pinned"]
            known["tier"] = max(known["tier"], tier, key=lambda name: Tier[name.upper()])
            uses = [one for one in (known["last_use"], entry["last_use"]) if one is not None]
            known["last_use"] = max(uses, default=None)
            for counter in _SUMMED:
                known[counter] += entry[counter]
    return list(merged.values())


def _field(asked: Asked, name: str) -> str:
    try:
        found = json.loads(asked.body)[name]
    except (ValueError, KeyError, TypeError):
        return ""
    return found if isinstance(found, str) else ""
