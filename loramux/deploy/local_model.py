"""One model of this machine: its process, the router before it, and the change to another spec."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable

import httpx2

from loramux.deploy.guarded import GuardedApp
from loramux.deploy.replica import API_KEY_VARIABLE, ReplicaServer
from loramux.deploy.serve_config import engine_args, user_config
from loramux.deploy.slots import Slot, take_slot
from loramux.errors import InvalidRequest, LoramuxError
from loramux.launch.specs import ModelSpec
from loramux.router.app import RouterApp, RouterOptions

_log = logging.getLogger(__name__)
_HOST = "127.0.0.1"
# The router hears of a process that leaves by then, and sends nothing more to it.
_LEAVE_S = 1.0
_LOOK_S = 0.5
_MAX_PAUSE_S = 30.0


class LocalMembers:
    """The process that a router sends requests to."""

    def __init__(self) -> None:
        self._urls: dict[str, str] = {}
        self._changed = asyncio.Event()

    def set(self, *urls: str) -> None:
        self._urls = {url: url for url in urls}
        self._changed.set()

    async def current(self) -> dict[str, str]:
        self._changed.clear()
        return self._urls

    async def changed(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)


class _Process:
    """A server, and the port that it holds."""

    def __init__(self, server: ReplicaServer, slot: Slot) -> None:
        self.server = server
        self._slot: Slot | None = slot

    async def stop(self) -> None:
        """Finish open streams, and end the process; a second call does nothing."""
        slot, self._slot = self._slot, None
        if slot is not None:
            try:
                await self.server.stop()
            finally:
                slot.free()


class LocalModel:
    """A model that runs, changes and stops; all methods run in one event loop."""

    def __init__(self, spec: ModelSpec, on_progress: Callable[[str], None]) -> None:
        self._spec = spec
        self._on_progress = on_progress
        self._members = LocalMembers()
        router = RouterApp(self._members, RouterOptions(api_key=os.environ.get(API_KEY_VARIABLE)))
        self.app = GuardedApp(router, runtime_loads=spec.fleet.runtime_loads)
        self._process: _Process | None = None
        self._lock = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None

    @property
    def is_text(self) -> bool:
        return self._spec.is_text

    @property
    def adapter_names(self) -> frozenset[str]:
        lora = self._spec.lora
        return frozenset(() if lora is None else lora.adapters)

    async def start(self) -> None:
        """Start the process, and return when it is ready; raise LoramuxError."""
        self._process = await self._started(self._spec)
        self._members.set(self._process.server.url)
        self._watching = asyncio.create_task(self._watch())

    async def update(self, spec: ModelSpec) -> None:
        """Change the running process where that is possible, else replace it."""
        async with self._lock:
            if spec.is_text != self._spec.is_text:
                raise InvalidRequest("The type of a running model cannot change.", param="name")
            if self._process is None:
                raise LoramuxError(f"{spec.name} does not run.")
            if engine_args(spec) == engine_args(self._spec):
                config = user_config(spec)
                await self._process.server.set_limits(config["limits"])
                await self._process.server.apply(config["adapters"])
            elif spec.fleet.surge_percent:
                new = await self._started(spec)
                await self._replace(new)
            else:
                await self._stop_process()
                try:
                    await self._replace(await self._started(spec))
                except BaseException:
                    self._on_progress(f"{spec.name}: back to the spec of before")
                    await self._replace(await self._started(self._spec))
                    raise
            self._spec = spec
            self._on_progress(f"{spec.name}: updated")

    async def stop(self) -> None:
        """Finish open streams, and end the process."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        async with self._lock:
            await self._stop_process()

    async def check_exposure(self, host: str) -> None:
        """Refuse other machines where no key is needed, as `loramux serve` does."""
        assert self._process is not None
        if self._spec.settings.get("insecure_no_auth"):
            return
        async with httpx2.AsyncClient(trust_env=False) as client:
            answer = await client.get(f"{self._process.server.url}/v1/models")
        if answer.status_code == 200:
            raise InvalidRequest(
                f"Other machines can reach {host}, and {self._spec.name} needs no key. Set "
                f"{API_KEY_VARIABLE} or settings.api_key, or accept it with "
                "settings.insecure_no_auth.",
                param="host",
            )

    async def _started(self, spec: ModelSpec) -> _Process:
        self._on_progress(f"{spec.name}: starting")
        args, config = engine_args(spec), user_config(spec)
        slot = await asyncio.to_thread(take_slot, _HOST, spec.fleet.engine_port)
        process = _Process(ReplicaServer(args["settings"], host=_HOST, slot=slot), slot)
        try:
            await process.server.set_limits(config["limits"])
            await process.server.start(config["adapters"], timeout_s=spec.fleet.start_s)
        except BaseException:
            await process.stop()
            raise
        self._on_progress(f"{spec.name}: ready")
        return process

    async def _replace(self, new: _Process) -> None:
        old, self._process = self._process, new
        self._members.set(new.server.url)
        if old is not None:
            await asyncio.sleep(_LEAVE_S)
            await old.stop()

    async def _stop_process(self) -> None:
        process, self._process = self._process, None
        self._members.set()
        if process is not None:
            await process.stop()

    async def _watch(self) -> None:
        """Start the process again where it has ended by itself."""
        pause_s = _LOOK_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = _LOOK_S
            async with self._lock:
                if self._process is None or self._process.server.is_running:
                    continue
                _log.error("the process of %s has ended: it is started again", self._spec.name)
                await self._process.stop()
                try:
                    await self._replace(await self._started(self._spec))
                except LoramuxError as error:
                    _log.error("%s", error)
                    pause_s = _MAX_PAUSE_S
