"""Models and adapters with random weights, made on their device without files or a hub."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from loramux.adapters.packed.dense import DenseLayout, plan_dense
from loramux.adapters.packed.fp12 import pack_fp12
from loramux.adapters.packed.image import AdapterImage
from loramux.adapters.packed.packing import PagedPacking
from loramux.adapters.packed.paged import OCTET, RankBlockLayout, fp12_elements
from loramux.config.engine import QUANTIZATIONS, EngineConfig, ResolvedConfig
from loramux.config.fields import AUTO
from loramux.engine.build import build_engine
from loramux.engine.engine import Engine
from loramux.kernels.linear import DENSE, LinearMethod
from loramux.memory.device import host_buffer
from loramux.memory.host_memory import total_memory_bytes
from loramux.models.architectures import base_info, parse_config
from loramux.models.decoder import Decoder
from loramux.models.dtypes import resolve_dtype
from loramux.models.eight_bit_linear import EightBitLinear
from loramux.models.four_bit_linear import FourBitLinear
from loramux.models.int8_linear import Int8Linear
from loramux.models.layers import HeadNorm, RMSNorm
from loramux.models.linear_method import quantisation_at_load
from loramux.models.loader import LoadedModel, done
from loramux.models.packed_linear import pack_linears
from loramux.runner.device_choice import choose_device, resolve_config
from loramux.types.adapter import AdapterCard
from loramux.types.model import BaseModelInfo, LinearSpec

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
HOST_BYTES = 2**50
"""A host tier without a limit: random adapters have no file to be reloaded from."""


def llama_settings(shape: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of a config.json with these shapes."""
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
    quantization: str = "none",
) -> LoadedModel:
    """Make a model whose weights depend on the seed, and on the dtype only by rounding."""
    config = parse_config(llama_settings(shape))
    kept = quantisation_at_load(quantization, torch.device(device), dtype)
    decoder = Decoder(config, dtype=dtype, device=device, quantisation=kept)
    generator = torch.Generator(device).manual_seed(seed)
    for spec, linear in decoder.linears():
        if linear.gemm_key != DENSE:
            _fill_quantised(spec, linear, generator, std)
    for module in decoder.modules():
        if isinstance(module, EightBitLinear | FourBitLinear | Int8Linear):
            continue
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
        reading=done(f"random:{seed}"),
    )


def _fill_quantised(
    spec: LinearSpec, linear: LinearMethod, generator: torch.Generator, std: float
) -> None:
    for projection in spec.members:
        shape = (projection.out_features, projection.in_features)
        noise = torch.randn(shape, device=generator.device, generator=generator) * std
        for slot in linear.slots(projection).values():
            slot.fill(projection.name, noise)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--device", type=device_of, default=AUTO, metavar="NAME")
    group.add_argument("--model", choices=SHAPES, help="shapes of the random model")
    group.add_argument("--layers", type=int, help="fewer layers than the model has")
    group.add_argument("--dtype", default="auto")
    group.add_argument("--quantization", choices=QUANTIZATIONS, default="none")
    group.add_argument("--max-batch-tokens", type=int, help="most tokens of a step")
    group.add_argument("--max-sequences", type=int, default=256)
    group.add_argument("--max-model-len", type=int, default=2048)
    group.add_argument("--device-memory", type=int, metavar="MiB", help="size of the page pool")
    group.add_argument("--prefix-cache", action=argparse.BooleanOptionalAction, default=True)


def device_of(name: str) -> str:
    """Return the device that `auto` means here; others are checked with the engine's settings."""
    return choose_device().device if name == AUTO else name


def is_gpu(arguments: argparse.Namespace) -> bool:
    return str(arguments.device).startswith("cuda")


def shape_of(arguments: argparse.Namespace) -> dict[str, Any]:
    shape = SHAPES[arguments.model]
    return shape if arguments.layers is None else {**shape, "num_hidden_layers": arguments.layers}


def dtype_of(arguments: argparse.Namespace) -> torch.dtype:
    shapes = base_info(parse_config(llama_settings(shape_of(arguments))), "random")
    return resolve_dtype(arguments.dtype, arguments.device, num_parameters=shapes.num_parameters)


def make_engine(arguments: argparse.Namespace) -> tuple[LoadedModel, Engine]:
    """Make the engine that the options describe, with random weights."""
    began = time.perf_counter()
    dtype = dtype_of(arguments)
    model = random_model(
        shape_of(arguments),
        dtype,
        std=0.02,
        device=arguments.device,
        quantization=arguments.quantization,
    )
    config = engine_config(arguments)
    if not config.is_gpu and not config.wants_device_kernels:
        pack_linears(model.decoder, byte_limit=total_memory_bytes() // 4)
    made_s = time.perf_counter() - began
    engine = build_engine(model, config)
    engine.prepare_all()
    print(
        f"{arguments.model}, {dtype}: weights in {made_s:.1f} s, engine in "
        f"{time.perf_counter() - began - made_s:.1f} s, a pool of "
        f"{engine.executor.pool_bytes / 2**30:.1f} GiB",
        flush=True,
    )
    return model, engine


def engine_config(arguments: argparse.Namespace) -> ResolvedConfig:
    memory = arguments.device_memory
    if memory is None and not is_gpu(arguments):
        memory = 1024
    max_batch_tokens: int | Literal["auto"] = arguments.max_batch_tokens or "auto"
    config, _ = resolve_config(
        EngineConfig(
            device=arguments.device,
            dtype=arguments.dtype,
            device_memory_bytes=None if memory is None else memory * 2**20,
            host_memory_bytes=HOST_BYTES,
            max_batch_tokens=max_batch_tokens,
            max_sequences=arguments.max_sequences,
            max_model_len=arguments.max_model_len,
            prefix_cache=arguments.prefix_cache,
        )
    )
    return config


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
PROJECTIONS = {"qkvo": ATTENTION, "all": (*ATTENTION, "gate_proj", "up_proj", "down_proj")}
_STD = 0.02

Kind = tuple[int, str]
"""The rank and the sites of an adapter."""


class RandomAdapters:
    """Registers random adapters, which share up to `num_images` buffers per rank in host memory.

    Each adapter has its own CID, record and pages and is loaded by itself, so the engine serves ten
    thousand adapters whose weights would not fit into the machine's memory.
    """

    def __init__(self, engine: Engine, *, num_images: int = 16) -> None:
        self._engine = engine
        self._num_images = num_images
        self._layouts: dict[Kind, DenseLayout | RankBlockLayout] = {}
        self._buffers: dict[Kind, list[torch.Tensor]] = {}
        self._numbers = count()
        self._num_made: Counter[Kind] = Counter()
        self._image_of: dict[str, tuple[Kind, int]] = {}

    def add(self, ranks: Sequence[int], sites: str) -> list[str]:
        """Register an adapter for each rank and return their CIDs."""
        return [self._add_one((rank, sites)) for rank in ranks]

    def forget(self, cids: Iterable[str]) -> None:
        for cid in cids:
            assert self._engine.forget_adapter(cid), f"{cid} is in use"
            del self._image_of[cid]

    def num_bytes(self, rank: int, sites: str) -> int:
        """Return the bytes of one adapter's pages."""
        return self._layout((rank, sites)).num_elements * self._dtype.itemsize

    def note(self, cids: Sequence[str]) -> str:
        num_images = len({self._image_of[cid] for cid in cids})
        return (
            f"{len(cids)} adapters with a CID, a record and pages each; in host memory they share "
            f"{num_images} buffers of random weights."
        )

    @property
    def _dtype(self) -> torch.dtype:
        return self._engine.executor.dtype

    def _add_one(self, kind: Kind) -> str:
        number = self._num_made[kind] % self._num_images
        self._num_made[kind] += 1
        layout, buffer = self._layout(kind), self._buffer(kind, number)
        cid = f"cidv1:sha256:{next(self._numbers):064x}"
        image = AdapterImage(cid=cid, layout=layout, buffer=buffer)
        known = AdapterCard(
            cid=cid,
            path="no-folder",
            rank=layout.max_rank,
            num_bytes=image.num_bytes,
        )
        self._engine.catalog._known[cid] = known
        host = self._engine.memory.tiers.host
        if host.used_bytes + image.num_bytes <= host.budget_bytes:
            host.reserve(cid, image.num_bytes)
            host.put(image)
        self._image_of[cid] = (kind, number)
        return cid

    def _layout(self, kind: Kind) -> DenseLayout | RankBlockLayout:
        if kind not in self._layouts:
            rank, sites = kind
            catalog = self._engine.catalog
            packing, num_layers = catalog.rules.packing, catalog.base.num_layers
            ranks = {(layer, p): rank for layer in range(num_layers) for p in PROJECTIONS[sites]}
            if isinstance(packing, PagedPacking):
                self._layouts[kind] = packing.plan(ranks)
            else:
                self._layouts[kind] = plan_dense(packing.sites, ranks)
        return self._layouts[kind]

    def _buffer(self, kind: Kind, number: int) -> torch.Tensor:
        buffers = self._buffers.setdefault(kind, [])
        if len(buffers) <= number:
            device, size = self._engine.executor.device, self._layout(kind).num_elements
            noise = torch.randn(size, dtype=self._dtype, device=device)
            buffer = host_buffer(device)(size, self._dtype).copy_(noise.mul_(_STD))
            self._fill_fp12(kind, buffer)
            buffers.append(buffer)
        return buffers[number]

    def _fill_fp12(self, kind: Kind, buffer: torch.Tensor) -> None:
        """Write valid fp12 data to A where the layout stores fp12; all rank blocks are equal."""
        layout = self._layout(kind)
        if not isinstance(layout, RankBlockLayout) or not layout.is_fp12:
            return
        sites = self._engine.catalog.rules.packing.sites
        widths = {name: site.in_features for site in sites for name in site.projections}
        octets = {width: self._octet(width) for width in set(widths.values())}
        for (_, name), blocks in layout.blocks.items():
            octet = octets[widths[name]]
            for block in blocks:
                size = fp12_elements(block.num_ranks, widths[name])
                buffer[block.a_offset : block.a_offset + size].view(-1, octet.numel()).copy_(octet)

    def _octet(self, width: int) -> torch.Tensor:
        rows = torch.randn(OCTET, width) * _STD
        return pack_fp12(rows.to(self._dtype)).view(self._dtype).flatten()


def make_adapter(  # noqa: PLR0913
    folder: Path,
    base: BaseModelInfo,
    *,
    rank: int,
    seed: int,
    projections: tuple[str, ...] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a PEFT adapter on all linear layers, or on `projections`; B is small but not zero."""
    generator = torch.Generator().manual_seed(seed)
    targets = [t for t in base.targets if projections is None or t.projection in projections]
    tensors = {}
    for target in targets:
        a = torch.randn(rank, target.in_features, generator=generator)
        b = torch.randn(target.out_features, rank, generator=generator)
        key = f"base_model.model.{target.path}"
        tensors[f"{key}.lora_A.weight"] = (a / target.in_features**0.5).to(dtype)
        tensors[f"{key}.lora_B.weight"] = (b * 0.02).to(dtype)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base.name,
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted({target.projection for target in targets}),
        "task_type": "CAUSAL_LM",
    }
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
