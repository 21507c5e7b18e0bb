"""An adapter is really used once, before others wait for it."""

from __future__ import annotations

import uuid

from loramux.backend import Job
from loramux.server.context import Context
from loramux.server.generation import submit
from loramux.types import SamplingParams


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
