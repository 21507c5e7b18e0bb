"""Serves adapters by CID on one base in this process."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from loramux.backend.host import AdapterUse
from loramux.config.engine import EngineConfig, EvictionName
from loramux.engine.codec import EngineCodec
from loramux.engine.llm import LLM
from loramux.engine.stats import adapter_uses
from loramux.errors import InvalidRequest
from loramux.types.request import RequestOutput
from loramux.types.sampling import SamplingParams

_PROMPT_KEYS = ("input", "prompt", "prompt_token_ids", "messages")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolAnswer:
    """The output of one request, and how it was served."""

    text: str
    output: RequestOutput
    serving: dict[str, Any]
    """Has base_model, adapter_cid, adapters, pool_id, cold_miss, queue_depth and latency_ms."""


class AdapterPool:
    """A base with adapters, of which at most `max_active_adapters` are in the page pool at once.

    An adapter is identified by its CID: folders with the same bytes are one adapter.
    """

    def __init__(
        self,
        base: str | Path | None = None,
        *,
        max_active_adapters: int = 64,
        eviction: EvictionName = "lru",
        pool_id: str = "local",
        **settings: Any,
    ) -> None:
        config = EngineConfig(
            max_active_adapters=max_active_adapters, eviction=eviction, **settings
        )
        self._llm = LLM(base, config=config)
        self.pool_id = pool_id

    def add(self, folder: str | Path) -> str:
        """Check a PEFT folder and return its CID."""
        return self._llm.register_adapter(folder)

    def remove(self, adapter_cid: str) -> None:
        """Frees the adapter's memory in all tiers."""
        self._llm.engine.forget_adapter(adapter_cid)

    def adapters(self) -> list[AdapterUse]:
        return adapter_uses(self._llm.engine)

    def serve(
        self,
        request: str | Mapping[str, Any],
        *,
        adapter_cid: str | None = None,
        adapters: Mapping[str, float] | None = None,
    ) -> PoolAnswer:
        """Run a request on an adapter, on the sum of several, or on the base if none is named.

        `request` is a prompt, or a mapping with one of input, prompt, prompt_token_ids and
        messages, and fields of SamplingParams. `adapters` maps CIDs to weights.
        """
        if adapter_cid is not None and adapters is not None:
            raise InvalidRequest("Give either adapter_cid or adapters.", param="adapters")
        parts = dict(adapters or {}) if adapter_cid is None else {adapter_cid: 1.0}
        prompt, params = self._read(request, self._llm.tokenizer_for(list(parts.items())))
        engine = self._llm.engine
        began = time.monotonic()
        for cid in parts:
            engine.catalog.get(cid)
        cold_miss = any(cid not in engine.residency for cid, weight in parts.items() if weight)
        queue_depth = engine.scheduler.num_waiting
        output = self._llm.answer(prompt, params, adapters=list(parts.items()))
        serving = {
            "base_model": f"{self._llm.model_name}@{self._llm.model_digest[:12]}",
            "adapter_cid": next((cid for cid, weight in parts.items() if weight), None),
            "adapters": [{"cid": cid, "weight": weight} for cid, weight in parts.items()],
            "pool_id": self.pool_id,
            "cold_miss": cold_miss,
            "queue_depth": queue_depth,
            "latency_ms": round(1000 * (time.monotonic() - began), 3),
        }
        return PoolAnswer(text=output.outputs[0].text, output=output, serving=serving)

    def _read(
        self, request: str | Mapping[str, Any], tokenizer: EngineCodec
    ) -> tuple[Any, SamplingParams]:
        if isinstance(request, str):
            return request, SamplingParams()
        found = [key for key in _PROMPT_KEYS if key in request]
        if len(found) != 1:
            raise InvalidRequest(f"Give exactly one of {', '.join(_PROMPT_KEYS)}.", param="input")
        fields = {key: value for key, value in request.items() if key != found[0]}
        unknown = fields.keys() - set(SamplingParams.__struct_fields__)
        if unknown:
            raise InvalidRequest(
                f"Unknown fields: {', '.join(sorted(unknown))}.", param=sorted(unknown)[0]
            )
        prompt = request[found[0]]
        if found[0] == "messages":
            prompt = tokenizer.apply_chat_template([dict(m) for m in prompt])
        elif found[0] == "prompt_token_ids":
            prompt = list(prompt)
        try:
            return prompt, msgspec.convert(fields, SamplingParams)
        except msgspec.ValidationError as error:
            raise InvalidRequest(str(error)) from error
