"""What an adapter really does to the base: the largest change of a logit on fixed tokens."""

from __future__ import annotations

from pathlib import Path

from loramux.config.engine import EngineConfig
from loramux.engine.build import build_engine, load_base
from loramux.engine.engine import Engine

_NUM_PROBE_TOKENS = 32
_PROBE_POOL_BYTES = 2**30


def max_logit_change(model_path: Path, adapter_folder: Path) -> float:
    # Whatever a server would compute in: rounding must not hide what a small adapter changes.
    config = EngineConfig(
        dtype="float32", device_memory_bytes=_PROBE_POOL_BYTES, pack_weights=False
    )
    return probe(build_engine(load_base(model_path, config), config), adapter_folder)


def probe(engine: Engine, adapter_folder: Path) -> float:
    cid = engine.register_adapter(adapter_folder).cid
    # Spread over the whole vocabulary, the same for every adapter of a base.
    tokens = [(i * 7919 + 1) % engine.vocab_size for i in range(_NUM_PROBE_TOKENS)]
    base, changed = engine.prompt_logits([(tokens, ()), (tokens, ((cid, 1.0),))])
    return float((changed - base).abs().max())
