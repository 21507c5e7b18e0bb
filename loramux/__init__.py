"""Many LoRA adapters on one base model, mixed in one batch.

The folders, in the order in which a request meets them:

    cli/        commands: serve, chat, doctor, bench
    launch.py   config -> engine -> app -> a listening server; the only file that knows everyone
    client/     Python client of a server, sync and async
    server/     HTTP in OpenAI's shapes, over a TextBackend; knows no torch and no engine
    engine/     the step loop in its own process, its supervisor, LLM, tokenizer, text output
    scheduler/  which sequences run in the next step; no torch
    runner/     a step plan becomes tensors, one forward, sampled tokens
    models/     one decoder described by data; loaders for safetensors and GGUF
    lora/       which rows of a batch use which adapter, and what that adds
    kernels/    the arithmetic: a torch reference beside every fast twin
    memory/     equal pages shared by KV cache and adapter weights
    adapters/   PEFT folder -> checked weights and a content id
    backend.py  what a server needs of an engine
    types.py    what the layers hand to each other
    errors.py   what can go wrong on purpose
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loramux.client.async_client import AsyncClient
    from loramux.client.client import Client
    from loramux.engine.adapter_pool import AdapterPool
    from loramux.engine.llm import LLM
    from loramux.types.request import LoRARequest
    from loramux.types.sampling import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AdapterPool",
    "AsyncClient",
    "Client",
    "LoRARequest",
    "SamplingParams",
    "__version__",
]

_HOMES = {
    "LLM": "loramux.engine.llm",
    "AdapterPool": "loramux.engine.adapter_pool",
    "Client": "loramux.client.client",
    "AsyncClient": "loramux.client.async_client",
    "LoRARequest": "loramux.types.request",
    "SamplingParams": "loramux.types.sampling",
}


def __getattr__(name: str) -> object:
    """Import on first use, so that a light module such as loramux.types never loads torch."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
