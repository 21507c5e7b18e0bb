"""The one place that asks the machine about its memory (and, with a GPU, the only user of torch.cuda)."""

from __future__ import annotations

import os

_DEFAULT_POOL_LIMIT = 4 * 2**30


def total_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def default_pool_bytes() -> int:
    return min(total_memory_bytes() // 4, _DEFAULT_POOL_LIMIT)
