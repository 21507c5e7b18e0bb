"""Adapters with extras in the pages of a small pool, and the lists of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loramux.adapters.packed.extras import (
    EMBEDDING,
    HEAD,
    MODEL_LEVEL,
    ExtraKey,
    ExtraKind,
    ExtraSpec,
)
from loramux.adapters.packed.paged import plan_rank_blocks
from loramux.adapters.packed.writers import write_extra
from loramux.adapters.peft.parts import ExtraTensor
from loramux.kernels.gpu.extras.tables import ExtrasTables
from loramux.kernels.ops import ExtrasOps
from loramux.kernels.reference import extras as reference
from loramux.lora.device_extras import DeviceExtras
from loramux.lora.extras_step import ExtrasStep, ExtrasWork, graph_limits
from loramux.memory.records import ResidentAdapter
from loramux.types.model import ATTENTION_BLOCK, LinearSpec
from loramux.types.request import Selection

HIDDEN, INNER, VOCAB = 48, 72, 150
NUM_LAYERS = 2
PAGE_ELEMENTS = 1536
SITES = (
    LinearSpec("qkv", HIDDEN, ("q_proj", "k_proj", "v_proj"), (80, 16, 16), ATTENTION_BLOCK),
    LinearSpec("o", 80, ("o_proj",), (HIDDEN,), ATTENTION_BLOCK),
    LinearSpec("gate_up", HIDDEN, ("gate_proj", "up_proj"), (INNER, INNER)),
    LinearSpec("down", INNER, ("down_proj",), (HIDDEN,)),
)
GAIN, BIAS, WEIGHT, ROWS = ExtraKind.GAIN, ExtraKind.BIAS, ExtraKind.WEIGHT, ExtraKind.ROWS
LOW_RANK_A, LOW_RANK_B = ExtraKind.LOW_RANK_A, ExtraKind.LOW_RANK_B


def spec(
    layer: int, module: str, kind: ExtraKind, num_rows: int, width: int, *token_ids: int
) -> ExtraSpec:
    return ExtraSpec(layer, module, kind, num_rows, width, token_ids)


def replaced_rows(module: str, *token_ids: int, width: int = HIDDEN) -> ExtraSpec:
    return spec(MODEL_LEVEL, module, ROWS, len(token_ids), width, *token_ids)


def low_rank(module: str, rank: int) -> list[ExtraSpec]:
    """Low rank of the embedding or the head, which store A and B in different orientations."""
    wide, tall = (rank, HIDDEN), (VOCAB, rank)
    a, b = (tall, wide) if module == EMBEDDING else (wide, tall)
    return [spec(MODEL_LEVEL, module, LOW_RANK_A, *a), spec(MODEL_LEVEL, module, LOW_RANK_B, *b)]


def head_vectors() -> list[ExtraSpec]:
    return [spec(MODEL_LEVEL, HEAD, kind, VOCAB, 1) for kind in (GAIN, BIAS)]


ADAPTERS: dict[str, list[ExtraSpec]] = {
    "vectors": [
        spec(1, "qkv", GAIN, 1, 112),
        spec(1, "qkv", BIAS, 1, 112),
        spec(1, "mlp_norm", GAIN, 1, HIDDEN),
        spec(MODEL_LEVEL, "final_norm", GAIN, 1, HIDDEN),
        *head_vectors(),
    ],
    "bias": [spec(1, "qkv", BIAS, 1, 112)],
    "ranks": [*low_rank(EMBEDDING, 5), *low_rank(HEAD, 5), *head_vectors()],
    "more ranks": [*low_rank(EMBEDDING, 3), *low_rank(HEAD, 33)],
    "weights": [
        spec(1, "q_proj", WEIGHT, 80, HIDDEN),
        spec(1, "v_proj", WEIGHT, 16, HIDDEN),
        spec(MODEL_LEVEL, EMBEDDING, WEIGHT, VOCAB + 7, HIDDEN),
        spec(MODEL_LEVEL, HEAD, WEIGHT, VOCAB + 7, HIDDEN),
    ],
    "short head": [spec(MODEL_LEVEL, HEAD, WEIGHT, VOCAB - 40, HIDDEN)],
    "rows": [replaced_rows(EMBEDDING, 3, 4, 90, VOCAB + 2), replaced_rows(HEAD, 0, 7, 149)],
}


@dataclass
class ExtrasWorld:
    """Adapters of `specs` by name, resident in a pool whose other elements are NaN."""

    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    specs: dict[str, list[ExtraSpec]] = field(default_factory=lambda: dict(ADAPTERS))
    page_width: int = PAGE_ELEMENTS
    sites: Sequence[LinearSpec] = SITES
    num_layers: int = NUM_LAYERS
    vocab_size: int = VOCAB
    num_sms: int = 3

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        layouts = {
            name: plan_rank_blocks(self.sites, {}, self.page_width).with_extras(specs)
            for name, specs in self.specs.items()
        }
        num_pages = sum(layout.num_pages for layout in layouts.values()) + 2
        pool = torch.full((num_pages, self.page_width), float("nan"), dtype=self.dtype)
        pages = torch.randperm(num_pages, generator=generator).tolist()
        self.directory = DeviceExtras(
            self.sites,
            num_layers=self.num_layers,
            vocab_size=self.vocab_size,
            num_pages=num_pages,
            device=self.device,
            max_adapters=len(layouts) + 1,
        )
        self.values: dict[str, dict[ExtraKey, Tensor]] = {}
        self.residents: dict[str, ResidentAdapter] = {}
        for name, layout in layouts.items():
            buffer = torch.full((layout.num_elements,), float("nan"), dtype=self.dtype)
            self.values[name] = {}
            for one in self.specs[name]:
                noise = torch.randn(one.num_rows, one.width, generator=generator) / 4
                values = noise.to(self.dtype)
                write_extra(layout.extras, buffer, ExtraTensor(one.key, values))
                self.values[name][one.key] = values.to(self.device)
            page_ids = [pages.pop() for _ in range(layout.num_pages)]
            pool[page_ids] = buffer.view(-1, self.page_width)
            self.residents[name] = ResidentAdapter(name, layout, page_ids)
            self.directory.add(self.residents[name])
        self.pool = pool.to(self.device)

    def work(self, kernels: ExtrasOps = reference) -> ExtrasWork:
        return ExtrasWork(kernels, self.directory, self.sites, self.pool, self.num_sms)

    def step(
        self, selections: Sequence[Selection], kernels: ExtrasOps = reference, tile_rows: int = 16
    ) -> ExtrasStep:
        """Return a step of one row for each selection."""
        count = len(selections)
        limits = graph_limits(count + 1, count + 1, tile_rows)
        words = torch.zeros(limits.num_words, dtype=torch.int32)
        work = self.work(kernels)
        work.fill(selections, [1] * count, limits, words.numpy())
        uses = self.directory.uses(selections)
        return work.step(words.to(self.device), limits, uses)

    def tables(self, selections: Sequence[Selection], tile_rows: int = 16) -> ExtrasTables:
        return self.step(selections, tile_rows=tile_rows).tables


def one(name: str) -> Selection:
    return ((name, 1.0),)
