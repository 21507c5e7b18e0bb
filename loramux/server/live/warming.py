"""Loads adapters before requests need them."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable

from loramux.backend.host import AdapterHost
from loramux.errors import AdapterNotFound, LoramuxError
from loramux.registry.records import Resolved
from loramux.server.context import Context, HostContext
from loramux.server.generate.generation import submit
from loramux.server.images.context import ImageContext
from loramux.server.images.drawing import draw_smallest
from loramux.server.naming.combinations import Combinations
from loramux.server.naming.names import AdapterNames, full_name
from loramux.server.naming.recipes import open_version
from loramux.server.naming.registry_adapters import RegistryAdapters
from loramux.types.request import Request, Selection
from loramux.types.sampling import SamplingParams

_log = logging.getLogger(__name__)


async def warm_up(context: HostContext, selection: Selection) -> None:
    """Generate a token or an image with the adapters, which are on the device afterwards."""
    context.require_ready()
    if isinstance(context, ImageContext):
        await draw_smallest(context, selection)
    elif isinstance(context, Context):
        await _generate_token(context, selection)


async def _generate_token(context: Context, selection: Selection) -> None:
    request = Request(
        request_id=f"warm-{uuid.uuid4().hex}",
        prompt_token_ids=(1,),
        params=SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
        selection=selection,
        timeout_s=context.options.probe_timeout_s,
    )
    async for _ in submit(context.backend, context.names, request):
        pass


def find_prewarmed(registry: RegistryAdapters | None, names: Iterable[str]) -> list[Resolved]:
    """Resolve the names of --prewarm-adapters in the registry; raise AdapterNotFound.

    It queries the database.
    """
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
    host: AdapterHost,
    names: AdapterNames,
    *,
    given: Iterable[str] = (),
    adapters: Iterable[Resolved] = (),
    combinations: Combinations | None = None,
) -> None:
    """Load given names and adapters of the registry one after another; failures are logged."""
    for name in given:
        try:
            found = await names.identify(name)
            if found is not None and found.cid is not None:
                await host.prewarm([found.cid])
        except (LoramuxError, OSError) as error:
            _log.warning("%s is not pre-warmed: %s", name, error)
    for resolved in adapters:
        try:
            opened = await open_version(names, combinations, resolved, full_name(resolved))
            await host.prewarm([one.cid for one in opened])
        except (LoramuxError, OSError) as error:
            _log.warning("%s is not pre-warmed: %s", full_name(resolved), error)
