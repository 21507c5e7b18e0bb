"""Measures the effect of an adapter: the largest change of a logit on fixed tokens."""

from __future__ import annotations

from pathlib import Path

import torch

from loramux.adapters.peft.parts import BaseWeights
from loramux.config.engine import EngineConfig
from loramux.engine.build import build_engine, load_base
from loramux.engine.engine import Engine
from loramux.models.architectures import DecoderConfig
from loramux.models.base_weights import DecoderWeights
from loramux.models.dtypes import resolve_dtype
from loramux.models.loader import load_model
from loramux.runner.device_choice import resolve_config
from loramux.types.model import BaseModelInfo

_NUM_PROBE_TOKENS = 32
_PROBE_POOL_BYTES = 2**30


def max_logit_change(model_path: Path, adapter_folder: Path) -> float:
    """Load base and adapter, and return the largest absolute change of a logit.

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
    """Return the largest absolute change of a logit by the adapter."""
    cid = engine.register_adapter(adapter_folder).cid
    # The tokens are spread over the vocabulary, and equal for all adapters of a base.
    tokens = [(i * 7919 + 1) % engine.vocab_size for i in range(_NUM_PROBE_TOKENS)]
    base, changed = engine.prompt_logits([(tokens, ()), (tokens, ((cid, 1.0),))])
    # Tokens that the adapter adds or lacks are -inf on one side.
    shared = (base != -torch.inf) & (changed != -torch.inf)
    return float((changed - base)[shared].abs().max())


def load_weights(model_path: Path, base: BaseModelInfo) -> BaseWeights:
    """Load the weights that parts of adapters are computed from."""

    def dtype(sizes: DecoderConfig) -> torch.dtype:
        return resolve_dtype("auto", num_parameters=base.num_parameters)

    model = load_model(model_path, dtype=dtype)
    return DecoderWeights(model.decoder, model.reading.result)
