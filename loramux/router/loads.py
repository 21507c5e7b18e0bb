"""Loads and unloads at run time: on all replicas or undone, and recorded before they are told."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from loramux.errors import LoramuxError
from loramux.router.answers import Whole, error_answer
from loramux.router.asked import Asked
from loramux.router.fleet import Fleet, Replica
from loramux.router.lists import Lists, ready_replicas
from loramux.router.reconcile import LOAD, SILENT, UNLOAD, Reconciler, undone
from loramux.router.relay import Relay
from loramux.types.access import KeyScope
from loramux.types.desired import DesiredAdapter, DesiredConflict, DesiredState

_log = logging.getLogger(__name__)
# SGLang's routes take the same fields.
_LOADS = frozenset((LOAD, "/load_lora_adapter"))
_UNLOADS = frozenset((UNLOAD, "/unload_lora_adapter"))
_CALLER = "/v1/caller"
_CALLER_S = 10.0
_IS_BUSY = "The adapter is being changed now, perhaps through another router. Try again."


class _Fields(msgspec.Struct):
    lora_name: str
    lora_path: str = ""
    load_inplace: bool = False


class _Caller(msgspec.Struct):
    scopes: list[str]
    is_operator: bool


@dataclass(frozen=True, slots=True)
class _Before:
    """What a name was on the replicas before a load."""

    source: str = ""
    cid: str = ""
    is_there: bool = False


@dataclass(slots=True)
class _Change:
    """A load under way."""

    adapter: DesiredAdapter
    """As it is recorded."""
    cids: set[str] = field(default_factory=set)
    """What the servers have read."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Loads:
    def __init__(self, fleet: Fleet, relay: Relay, reconciler: Reconciler, lists: Lists) -> None:
        self._fleet = fleet
        self._relay = relay
        self._reconciler = reconciler
        self._lists = lists
        self._changing: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._open: set[asyncio.Task[Whole]] = set()

    def handles(self, asked: Asked) -> bool:
        return asked.path in _LOADS | _UNLOADS and asked.method in ("POST", "DELETE")

    async def answer(self, asked: Asked) -> Whole:
        # A change goes on when its client leaves.
        task = asyncio.create_task(self._answer(asked))
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        return await asyncio.shield(task)

    async def finish(self) -> None:
        """Wait for the changes that are under way."""
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _answer(self, asked: Asked) -> Whole:
        replicas = ready_replicas(self._fleet)
        if not replicas:
            return error_answer(503, "No replica is ready.")
        try:
            fields = msgspec.json.decode(asked.body, type=_Fields)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            fields = None
        is_load = asked.path in _LOADS
        if fields is None or not fields.lora_name or (is_load and not fields.lora_path):
            # A replica says what is wrong, in its words.
            return await self._relay.ask(asked, replicas[0])
        refusal = await self._check_caller(asked, replicas[0])
        if refusal is not None:
            return refusal
        try:
            async with self._changing[fields.lora_name]:
                await self._reconciler.refresh()
                if is_load:
                    return await self._load(fields, replicas)
                return await self._unload(fields.lora_name, replicas)
        except DesiredConflict:
            return error_answer(409, _IS_BUSY)
        except (LoramuxError, OSError) as error:
            _log.warning("the desired adapters cannot be written: %s", error)
            text = "The router cannot record the change now, and nothing was changed."
            return error_answer(503, text)
        finally:
            self._lists.forget()

    async def _check_caller(self, asked: Asked, replica: Replica) -> Whole | None:
        """Return the refusal of a caller who may not change adapters."""
        look = replace(asked, method="GET", path=_CALLER, target=_CALLER, body=b"")
        told = await self._relay.ask(look, replica, limit_s=_CALLER_S)
        if told.status != 200:
            return told
        try:
            caller = msgspec.json.decode(told.body, type=_Caller)
        except msgspec.DecodeError:
            return error_answer(502, f"The server {replica.id} does not tell what the key may do.")
        if caller.is_operator and KeyScope.ADMIN in caller.scopes:
            return None
        return error_answer(
            403, "This route needs a key with the scope admin that is not bound to a tenant."
        )

    async def _load(self, fields: _Fields, replicas: Sequence[Replica]) -> Whole:
        name, current = fields.lora_name, self._reconciler.desired.adapters.get(fields.lora_name)
        if current is not None and current.state is DesiredState.CHANGING:
            return error_answer(409, _IS_BUSY)
        before = await self._before(name, current, replicas[0])
        if before.is_there and not fields.load_inplace:
            return _already_loaded(name)
        if before.is_there and not before.source:
            text = f"It is not known from where '{name}' was loaded: unload it first."
            return error_answer(400, text)
        changing = DesiredAdapter(
            name=name,
            state=DesiredState.CHANGING,
            source=fields.lora_path,
            previous_source=before.source,
            previous_cid=before.cid,
        )
        revision = 0 if current is None else current.revision
        changing = await self._reconciler.write(changing, if_revision=revision)
        change = _Change(changing)
        try:
            answers = await asyncio.gather(*(self._load_one(change, one) for one in replicas))
        except BaseException:
            await self._undo(change.adapter, replicas)
            raise
        failed = next((one for one in answers if one.status != 200), None)
        if failed is None and (len(change.cids) > 1 or not change.adapter.cid):
            failed = error_answer(502, "The servers read different files of the adapter.")
        if failed is not None:
            # The loops wait for those that do not answer.
            followed = [
                replica
                for replica, one in zip(replicas, answers, strict=True)
                if one.status not in SILENT
            ]
            await self._undo(change.adapter, followed)
            return _told(failed)
        wanted = replace(
            change.adapter, state=DesiredState.WANTED, previous_source="", previous_cid=""
        )
        await self._reconciler.write(wanted, if_revision=wanted.revision)
        if before.is_there:
            await self._reconciler.settled()
        return answers[0]

    async def _load_one(self, change: _Change, replica: Replica) -> Whole:
        """Load on one server, and record the content as soon as the first has told it."""
        one = change.adapter
        told = await self._reconciler.load(replica, one.name, one.source)
        if told.status != 200:
            return told
        cid = await self._reconciler.cid_of(replica, one.name) or ""
        async with change.lock:
            change.cids.add(cid)
            if cid and not change.adapter.cid:
                # Requests may be answered by the new version where it is already.
                known = replace(change.adapter, cid=cid)
                change.adapter = await self._reconciler.write(known, if_revision=known.revision)
        return told

    async def _before(self, name: str, current: DesiredAdapter | None, replica: Replica) -> _Before:
        if current is not None and current.state is DesiredState.WANTED:
            return _Before(current.source, current.cid, is_there=True)
        cid = await self._reconciler.cid_of(replica, name)
        if cid is None:
            return _Before()
        source = await self._reconciler.source_of(replica, name)
        return _Before(source, cid, is_there=True)

    async def _undo(self, changing: DesiredAdapter, replicas: Sequence[Replica]) -> None:
        """Want again what was before; the loops go on where a replica does not follow in time."""
        back = await self._reconciler.write(undone(changing), if_revision=changing.revision)
        try:
            async with asyncio.timeout(self._reconciler.load_s):
                await asyncio.gather(
                    self._reconciler.settled(),
                    *(self._reconciler.bring(one) for one in replicas),
                )
        except TimeoutError:
            _log.warning("not all servers have undone the load of %s yet", back.name)

    async def _unload(self, name: str, replicas: Sequence[Replica]) -> Whole:
        """Record that a name is gone, and unload it everywhere."""
        current = self._reconciler.desired.adapters.get(name)
        if current is not None and current.state is DesiredState.CHANGING:
            return error_answer(409, _IS_BUSY)
        gone = DesiredAdapter(name=name, state=DesiredState.GONE)
        revision = 0 if current is None else current.revision
        is_known = current is not None and current.state is DesiredState.WANTED
        if not is_known and await self._reconciler.cid_of(replicas[0], name) is None:
            # In the words of the server, which does not have it.
            return _told(await self._reconciler.unload(replicas[0], name))
        await self._reconciler.write(gone, if_revision=revision)
        answers, _ = await asyncio.gather(
            asyncio.gather(*(self._reconciler.unload(one, name) for one in replicas)),
            self._reconciler.settled(),
        )
        failed = [one for one in answers if one.status not in (200, 404)]
        if failed:
            return _told(failed[0])
        text = f"Success: LoRA adapter '{name}' removed successfully."
        return Whole(200, [(b"content-type", b"text/plain; charset=utf-8")], text.encode())


def _told(answer: Whole) -> Whole:
    """Return an answer to the router's own key as one for its client."""
    if answer.status not in (401, 403):
        return answer
    return error_answer(
        503, "The router's own key (LORAMUX_API_KEY) needs the scope admin on the servers."
    )


def _already_loaded(name: str) -> Whole:
    message = (
        f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in "
        "place, set 'load_inplace' to True."
    )
    info = {"message": message, "type": "InvalidUserInput", "param": None, "code": 400}
    body = json.dumps({**info, "error": info}).encode()
    return Whole(400, [(b"content-type", b"application/json")], body)
