"""One `loramux serve` process: starts it, changes its adapters while it runs, stops it."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import msgspec

from loramux.base.private_files import private_opener
from loramux.config.paths import find_data_paths
from loramux.deploy.slots import Slot
from loramux.errors import LoramuxError
from loramux.types.replica_report import ResidencyReport

_log = logging.getLogger(__name__)
API_KEY_VARIABLE = "LORAMUX_API_KEY"
_LOOK_S = 0.1
_REQUEST_S = 30.0
# A load reads and checks the adapter's files, which may come from far away.
_LOAD_S = 1800.0
_NUM_LOADS = 4
_LOG_BYTES = 4096
_PR_SET_PDEATHSIG = 1
# Loaded here, because a child that is being started must not load libraries.
_LIBC = ctypes.CDLL(None)


class ReplicaFailed(LoramuxError):
    """A server did not start, or refused a change."""


class ReplicaServer:
    def __init__(self, settings: Mapping[str, Any], *, host: str, slot: Slot) -> None:
        """Take the settings of `loramux serve`, as in its TOML file."""
        self._settings = dict(settings)
        self._host = host
        self._slot = slot
        self.url = f"http://[{host}]:{slot.port}" if ":" in host else f"http://{host}:{slot.port}"
        self.log = slot.folder / "server.log"
        self._process: asyncio.subprocess.Process | None = None
        self._adapters: dict[str, Mapping[str, Any]] = {}
        self._limits: dict[str, Mapping[str, Any]] = {}
        key = os.environ.get(API_KEY_VARIABLE)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._client = httpx2.AsyncClient(
            base_url=self.url, headers=headers, timeout=_REQUEST_S, trust_env=False
        )

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, adapters: Mapping[str, Mapping[str, Any]], *, timeout_s: float) -> None:
        """Start the server with its adapters, and return when it is ready.

        Raises ReplicaFailed with the end of the server's log.
        """
        file = self._slot.folder / "serve.toml"
        modules = {name: one["source"] for name, one in adapters.items()}
        settings = {"pool_id": self.url, **self._settings}
        settings |= {"host": self._host, "port": self._slot.port}
        if modules:
            settings["lora_modules"] = modules
        # The registry's address may have a password.
        with open(file, "w", encoding="utf-8", opener=private_opener) as output:
            output.write(toml(settings))
        with open(self.log, "wb", opener=private_opener) as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "loramux.cli.main", "serve", "--config", str(file)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # The server must not outlive a replica that is killed: its device is given away.
                preexec_fn=partial(_LIBC.prctl, _PR_SET_PDEATHSIG, signal.SIGKILL),
                start_new_session=True,
            )
        await self._wait_until_ready(timeout_s)
        self._adapters = dict(adapters)
        await self._pin({}, adapters)

    async def apply(self, adapters: Mapping[str, Mapping[str, Any]]) -> None:
        """Load, pin and unload until the server has exactly these adapters.

        Raises ReplicaFailed; the server then has those of before.
        """
        before = self._adapters
        changed = {
            name: one
            for name, one in adapters.items()
            if name not in before or before[name]["source"] != one["source"]
        }
        done: list[str] = []
        try:
            await _each(self._load(name, one["source"], done) for name, one in changed.items())
            await self._pin(before, adapters)
        except (ReplicaFailed, httpx2.HTTPError) as error:
            await self._undo(done, before)
            raise ReplicaFailed(f"{self.url}: {error}") from error
        await _each(self._unload(name) for name in before.keys() - adapters.keys())
        self._adapters = dict(adapters)

    async def set_limits(self, limits: Mapping[str, Mapping[str, int | None]]) -> None:
        """Write the limits of tenants to the registry, where they are not so yet."""
        if limits != self._limits:
            removed: dict[str, Mapping[str, int | None]] = {
                tenant: dict.fromkeys(old) for tenant, old in self._limits.items()
            }
            wanted = {
                tenant: {**removed.get(tenant, {}), **limits.get(tenant, {})}
                for tenant in {*removed, *limits}
            }
            await asyncio.to_thread(_write_limits, self._settings, wanted)
            self._limits = dict(limits)

    async def warm(self, names: Iterable[str]) -> list[str]:
        """Load adapters on the device, one after the other; return those that could be."""
        warmed = []
        for name in names:
            try:
                told = await self._client.post(
                    f"/v1/adapters/{quote(name, safe='/@')}/warm", json={}, timeout=_LOAD_S
                )
            except httpx2.HTTPError as error:
                _log.warning("%s could not be loaded: %s", name, error)
                continue
            if told.status_code == 200:
                warmed.append(name)
            else:
                _log.warning("%s could not be loaded: %s", name, told.text[:200])
        return warmed

    async def report(self) -> ResidencyReport | None:
        """Return the load; None where the server does not report it."""
        try:
            told = await self._client.get("/v1/residency", params={"since": -1})
            if told.status_code != 200:
                return None
            return msgspec.json.decode(told.content, type=ResidencyReport)
        except (httpx2.HTTPError, msgspec.DecodeError):
            return None

    async def check(self) -> None:
        """Raise ReplicaFailed if the server has ended or does not answer.

        A server that starts its engine again by itself answers.
        """
        if not self.is_running:
            status = None if self._process is None else self._process.returncode
            raise ReplicaFailed(f"{self.url} ended with status {status}:\n{last_lines(self.log)}")
        try:
            await self._client.get("/version")
        except httpx2.HTTPError as error:
            raise ReplicaFailed(f"{self.url} does not answer: {error!r}") from error

    async def stop(self) -> None:
        """End the server, which first waits for its open requests for --drain-s seconds."""
        if self._process is not None and self.is_running:
            self._process.terminate()
            await self._process.wait()
        await self._client.aclose()

    async def _wait_until_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            if not self.is_running:
                raise ReplicaFailed(f"The server did not start:\n{last_lines(self.log)}")
            try:
                if (await self._client.get("/health")).status_code == 200:
                    return
            except httpx2.HTTPError:
                pass
            if time.monotonic() > deadline:
                raise ReplicaFailed(
                    f"The server is not ready after {timeout_s:g} s:\n{last_lines(self.log)}"
                )
            await asyncio.sleep(_LOOK_S)

    async def _load(self, name: str, source: str, done: list[str]) -> None:
        body = {"lora_name": name, "lora_path": source, "load_inplace": True}
        await self._ask("POST", "/v1/load_lora_adapter", body, what=f"load {name}")
        done.append(name)

    async def _unload(self, name: str) -> None:
        body = {"lora_name": name}
        await self._ask("POST", "/v1/unload_lora_adapter", body, what=f"unload {name}")

    async def _pin(
        self, before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]
    ) -> None:
        for name, one in after.items():
            was = before.get(name)
            is_new = was is None or was["source"] != one["source"]
            if one["pinned"] != (was is not None and not is_new and was["pinned"]):
                method, path = "POST" if one["pinned"] else "DELETE", quote(name, safe="/@")
                await self._ask(method, f"/v1/adapters/{path}/pin", None, what=f"pin {name}")

    async def _undo(self, loaded: Iterable[str], before: Mapping[str, Mapping[str, Any]]) -> None:
        for name in loaded:
            try:
                if name in before:
                    await self._load(name, before[name]["source"], [])
                else:
                    await self._unload(name)
            except (ReplicaFailed, httpx2.HTTPError) as error:
                _log.warning("%s cannot be restored: %s", name, error)

    async def _ask(self, method: str, path: str, body: Any, *, what: str) -> None:
        told = await self._client.request(method, path, json=body, timeout=_LOAD_S)
        if told.status_code != 200:
            raise ReplicaFailed(f"cannot {what}: {_message(told)}")


async def _each(works: Iterable[Awaitable[None]]) -> None:
    """Do a few at a time; raise the first error when all have ended."""
    places = asyncio.Semaphore(_NUM_LOADS)

    async def one(work: Awaitable[None]) -> None:
        async with places:
            await work

    ended = await asyncio.gather(*map(one, works), return_exceptions=True)
    for error in ended:
        if error is not None:
            raise error


def toml(settings: Mapping[str, Any]) -> str:
    """Return a TOML document of settings; a table of names and values becomes an inline table."""
    return "".join(f"{_toml_value(name)} = {_toml_value(one)}\n" for name, one in settings.items())


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = (f"{_toml_value(str(key))} = {_toml_value(one)}" for key, one in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    # The text of JSON is also that of TOML but for one control character.
    return json.dumps(value).replace("\x7f", "\\u007f")


def last_lines(log: Path) -> str:
    """Return the end of a server's log."""
    try:
        return log.read_bytes()[-_LOG_BYTES:].decode("utf-8", "replace").strip()
    except OSError:
        return f"(no log: {log})"


def _message(told: httpx2.Response) -> str:
    try:
        found = told.json()
        message = (found.get("error") or found).get("message")
    except (ValueError, AttributeError):
        message = None
    return str(message) if message else f"status {told.status_code}: {told.text[:300]}"


def _write_limits(
    settings: Mapping[str, Any], limits: Mapping[str, Mapping[str, int | None]]
) -> None:
    # Imported here: most deployments have no limits, and this needs a database.
    from loramux.launch.library import open_registry
    from loramux.registry.tenants import SettingChanges

    places = find_data_paths(registry=settings.get("registry"), data=settings.get("data"))
    with open_registry(places) as registry:
        known = {one.name: one.settings.limits for one in registry.tenants.all()}
        for tenant, changes in limits.items():
            current = known.get(tenant)
            if any(getattr(current, name, None) != value for name, value in changes.items()):
                registry.tenants.set(tenant, SettingChanges(limits=changes))
