"""Measures the effect of an adapter: the largest change of a logit on fixed tokens."""

from __future__ import annotations

from pathlib import Path

from loramux.config.engine import EngineConfig
from loramux.engine.build import build_engine, load_base
from loramux.engine.device_choice import resolve_config
from loramux.engine.engine import Engine

_NUM_PROBE_TOKENS = 32
_PROBE_POOL_BYTES = 2**30


def max_logit_change(model_path: Path, adapter_folder: Path) -> float:
    """Loads base and adapter, and returns the largest absolute change of a logit.

    It computes on the CPU in float32, so that rounding does not hide the effect of a small adapter.
    """
    config, _ = resolve_config(
        EngineConfig(
            device="cpu",
            dtype="float32",
            device_memory_bytes=_PROBE_POOL_BYTES,
            pack_weights=False,
        )
    )
    return probe(build_engine(load_base(model_path, config), config), adapter_folder)


def probe(engine: Engine, adapter_folder: Path) -> float:
    """Returns the largest absolute change of a logit by the adapter."""
    cid = engine.register_adapter(adapter_folder).cid
    # The tokens are spread over the vocabulary, and equal for all adapters of a base.
    tokens = [(i * 7919 + 1) % engine.vocab_size for i in range(_NUM_PROBE_TOKENS)]
    base, changed = engine.prompt_logits([(tokens, ()), (tokens, ((cid, 1.0),))])
    return float((changed - base).abs().max())
