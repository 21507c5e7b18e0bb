"""Adapters that are brought up before others wait for them."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable

from loramux.backend import Backend, Job
from loramux.errors import AdapterNotFound, LoramuxError
from loramux.registry.records import Resolved
from loramux.server.context import Context
from loramux.server.generation import submit
from loramux.server.naming import full_name
from loramux.server.registry_adapters import RegistryAdapters
from loramux.types.sampling import SamplingParams

_log = logging.getLogger(__name__)


async def warm_up(context: Context, adapter: str) -> None:
    """Generates a token with it, by the engine's name; it is on the device afterwards."""
    context.require_ready()
    job = Job(
        request_id=f"warm-{uuid.uuid4().hex}",
        prompt_token_ids=(1,),
        params=SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
        adapter=adapter,
        timeout_s=context.options.probe_timeout_s,
    )
    async for _ in submit(context.backend, job, context.restore):
        pass


def find_prewarmed(registry: RegistryAdapters | None, names: Iterable[str]) -> list[Resolved]:
    """What the registry means by the names; raises AdapterNotFound. Queries."""
    found = []
    for name in names:
        if registry is None:
            raise AdapterNotFound(
                f"--prewarm-adapters names {name!r}, which is not among --lora-modules, and this "
                "server has no registry."
            )
        try:
            found += registry.find_all(name)
        except LoramuxError as error:
            raise AdapterNotFound(
                f"--prewarm-adapters names {name!r}, which is not among --lora-modules, and the "
                f"registry does not have it either: {error}"
            ) from error
    return found


async def prewarm(
    backend: Backend, registry: RegistryAdapters, adapters: Iterable[Resolved]
) -> None:
    """Those of the registry, one after another; one that cannot be had is said in the log."""
    for resolved in adapters:
        try:
            await registry.make_known(backend, resolved)
            await backend.prewarm([resolved.cid])
        except (LoramuxError, OSError) as error:
            _log.warning("%s is not pre-warmed: %s", full_name(resolved), error)
