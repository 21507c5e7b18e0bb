"""Adapters without files: random images in the kernels' own layout, put into the host tier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path

import torch

from loramux.adapters.catalog import KnownAdapter
from loramux.adapters.packed.dense import DenseLayout, plan_dense
from loramux.adapters.packed.fp12 import OCTET, fp12_elements, pack_fp12
from loramux.adapters.packed.image import AdapterImage
from loramux.adapters.packed.packing import PagedPacking
from loramux.adapters.packed.paged import RankBlockLayout
from loramux.engine.engine import Engine
from loramux.memory.device import host_buffer

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
PROJECTIONS = {"qkvo": ATTENTION, "all": (*ATTENTION, "gate_proj", "up_proj", "down_proj")}
_STD = 0.02

Kind = tuple[int, str]
"""(rank, sites)"""


class RandomAdapters:
    """Adapters of one kind share up to `num_images` buffers in host memory; nothing else.

    Each has its own id, record and pages, and is moved by itself: ten thousand are ten thousand to
    the engine, and their weights need not fit into the machine's memory at once.
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
        """Registers an adapter for each rank; returns their ids."""
        return [self._add_one((rank, sites)) for rank in ranks]

    def forget(self, cids: Iterable[str]) -> None:
        for cid in cids:
            assert self._engine.forget_adapter(cid), f"{cid} is in use"
            del self._image_of[cid]

    def num_bytes(self, rank: int, sites: str) -> int:
        """Of the weights of one adapter, with what its pages leave empty."""
        return self._layout((rank, sites)).num_elements * self._dtype.itemsize

    def note(self, cids: Sequence[str]) -> str:
        num_images = len({self._image_of[cid] for cid in cids})
        return (
            f"{len(cids)} adapters with an id, a record and pages each; in host memory they share "
            f"{num_images} byte images of random weights."
        )

    @property
    def _dtype(self) -> torch.dtype:
        return self._engine.memory.pool.storage.dtype

    def _add_one(self, kind: Kind) -> str:
        number = self._num_made[kind] % self._num_images
        self._num_made[kind] += 1
        layout, buffer = self._layout(kind), self._buffer(kind, number)
        cid = f"cidv1:sha256:{next(self._numbers):064x}"
        image = AdapterImage(cid=cid, layout=layout, buffer=buffer)
        known = KnownAdapter(
            cid=cid,
            folder=Path("no-folder"),
            num_elements=layout.num_elements,
            num_bytes=image.num_bytes,
            max_rank=layout.max_rank,
            warnings=(),
        )
        self._engine.catalog._known[cid] = known
        self._engine.memory.tiers.host.offer(image)
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
            device, size = self._engine.memory.pool.device, self._layout(kind).num_elements
            noise = torch.randn(size, dtype=self._dtype, device=device)
            buffer = host_buffer(device)(size, self._dtype).copy_(noise.mul_(_STD))
            self._shorten(kind, buffer)
            buffers.append(buffer)
        return buffers[number]

    def _shorten(self, kind: Kind, buffer: torch.Tensor) -> None:
        """A in twelve bits where kernels want it so; ranks share a few octets of rows."""
        layout = self._layout(kind)
        if not isinstance(layout, RankBlockLayout) or not layout.is_fp12:
            return
        sites = self._engine.catalog.rules.packing.sites
        widths = {name: site.in_features for site in sites for name in site.projections}
        octets = {width: self._octet(width) for width in set(widths.values())}
        for (_, name), groups in layout.blocks.items():
            octet = octets[widths[name]]
            for group in groups:
                size = fp12_elements(group.num_ranks, widths[name])
                buffer[group.a_offset : group.a_offset + size].view(-1, octet.numel()).copy_(octet)

    def _octet(self, width: int) -> torch.Tensor:
        rows = torch.randn(OCTET, width) * _STD
        return pack_fp12(rows.to(self._dtype)).view(self._dtype).flatten()
