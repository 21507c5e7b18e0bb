"""Models of known shapes with random weights, made where they run: no files, no hub."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from loramux.config.engine import EngineConfig
from loramux.engine.build import build_engine
from loramux.engine.engine import Engine
from loramux.memory.device import total_memory_bytes
from loramux.models.architectures import base_info, parse_config
from loramux.models.decoder import Decoder
from loramux.models.dtypes import resolve_dtype
from loramux.models.layers import HeadNorm, RMSNorm
from loramux.models.loader import LoadedModel
from loramux.models.packed_linear import pack_linears

SHAPES: dict[str, dict[str, Any]] = {
    "small": {
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
    },
    "smollm2-135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    },
}
# More than any machine has: generated adapters have no file to come back from.
HOST_BYTES = 2**50


def llama_settings(shape: dict[str, Any]) -> dict[str, Any]:
    """As in a config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        **shape,
    }


def random_model(
    shape: dict[str, Any],
    dtype: torch.dtype,
    *,
    std: float,
    device: str = "cuda",
    seed: int = 0,
) -> LoadedModel:
    """The same values for one seed, whatever the dtype, but for their rounding."""
    config = parse_config(llama_settings(shape))
    decoder = Decoder(config, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for module in decoder.modules():
        is_norm = isinstance(module, RMSNorm | HeadNorm)
        for parameter in module.parameters(recurse=False):
            noise = torch.randn(parameter.shape, device=device, generator=generator)
            parameter.data.copy_((noise * 0.1 + 1 if is_norm else noise * std).bfloat16())
    return LoadedModel(
        decoder=decoder.eval(),
        config=config,
        name="random",
        tokenizer_folder=Path(),
        eos_token_ids=(),
        digest=f"random:{seed}",
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    group.add_argument("--device", default=default)
    group.add_argument("--model", choices=SHAPES, help="shapes; the weights are random")
    group.add_argument("--layers", type=int, help="fewer layers than the model has")
    group.add_argument("--dtype", default="auto")
    group.add_argument("--max-batch-tokens", type=int, help="rows of one step")
    group.add_argument("--max-sequences", type=int, default=256)
    group.add_argument("--max-model-len", type=int, default=2048)
    group.add_argument("--device-memory", type=int, metavar="MiB", help="of the page pool")
    group.add_argument("--prefix-cache", action=argparse.BooleanOptionalAction, default=True)


def is_gpu(arguments: argparse.Namespace) -> bool:
    return str(arguments.device).startswith("cuda")


def shape_of(arguments: argparse.Namespace) -> dict[str, Any]:
    shape = SHAPES[arguments.model]
    return shape if arguments.layers is None else {**shape, "num_hidden_layers": arguments.layers}


def dtype_of(arguments: argparse.Namespace) -> torch.dtype:
    shapes = base_info(parse_config(llama_settings(shape_of(arguments))), "random")
    return resolve_dtype(arguments.dtype, arguments.device, num_parameters=shapes.num_parameters)


def make_engine(arguments: argparse.Namespace) -> tuple[LoadedModel, Engine]:
    """The engine that the options describe, on random weights."""
    began = time.perf_counter()
    dtype = dtype_of(arguments)
    model = random_model(shape_of(arguments), dtype, std=0.02, device=arguments.device)
    config = engine_config(arguments)
    if not config.is_gpu and not config.wants_device_kernels:
        pack_linears(model.decoder, byte_limit=total_memory_bytes() // 4)
    made_s = time.perf_counter() - began
    engine = build_engine(model, config)
    print(
        f"{arguments.model}, {dtype}: weights in {made_s:.1f} s, engine in "
        f"{time.perf_counter() - began - made_s:.1f} s, a pool of "
        f"{engine.memory.pool.storage.nbytes / 2**30:.1f} GiB",
        flush=True,
    )
    return model, engine


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    memory = arguments.device_memory
    if memory is None and not is_gpu(arguments):
        memory = 1024
    return EngineConfig(
        device=arguments.device,
        dtype=arguments.dtype,
        device_memory_bytes=None if memory is None else memory * 2**20,
        host_memory_bytes=HOST_BYTES,
        max_batch_tokens=arguments.max_batch_tokens or (2048 if is_gpu(arguments) else 512),
        max_sequences=arguments.max_sequences,
        max_model_len=arguments.max_model_len,
        prefix_cache=arguments.prefix_cache,
    )
