"""The memory of one rank: pages of KV cache and of adapters, each with a dtype of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from loramux.adapters.packed.image import AdapterImage
from loramux.memory.pool import PagePool, PageView
from loramux.models.dtypes import DTYPES
from loramux.types.kv import KVLayout


class RankMemory:
    """The part of an executor that owns its pages: see `ExecutorMemory`."""

    def __init__(self, pool: PagePool, kv: KVLayout, *, adapter_dtype: torch.dtype) -> None:
        self.pool = pool
        self._kv = kv
        self.kv_pages: Tensor = pool.view(DTYPES[kv.dtype]).storage
        """[pages, elements] in the dtype of the KV cache."""
        self.adapter_pages: PageView = pool.view(adapter_dtype)

    @property
    def device(self) -> torch.device:
        return self.pool.device

    @property
    def pool_bytes(self) -> int:
        return self.pool.num_bytes

    @property
    def num_pages(self) -> int:
        return self.pool.num_pages

    @property
    def page_bytes(self) -> int:
        return self.pool.page_bytes

    @property
    def kv(self) -> KVLayout:
        """The layout of a page of KV cache."""
        return self._kv

    def write_adapter(self, page_ids: list[int], image: AdapterImage) -> None:
        """Copy a packed adapter into pages, in order; any thread may call it."""
        self.pool.write(page_ids, image.buffer)

    def write_slice(self, page_ids: list[int], start: int, data: memoryview) -> None:
        """Copy a part of a packed adapter into pages, from byte `start` on (CPU only)."""
        self.pool.write_slice(page_ids, start, data)

    def fence(self, page_ids: list[int]) -> None:
        """Make the next write of these pages wait for the steps launched so far."""
        self.pool.fence(page_ids)

    def clear(self, page_ids: list[int]) -> None:
        """Zero pages, so that no data of an earlier owner can reach a new one."""
        self.pool.clear(page_ids)
