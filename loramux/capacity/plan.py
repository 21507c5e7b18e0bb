"""The input and output of capacity planning.

`MemoryPlan` is the JSON of `loramux plan` and POST /v1/adapters/plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from loramux.adapters.packed.dense import IMAGE_HEADER_BYTES
from loramux.adapters.packed.paged import page_bytes_of
from loramux.errors import InvalidRequest, suggest
from loramux.types.kv import DTYPE_BYTES, KVLayout
from loramux.types.model import ATTENTION_BLOCK, BaseModelInfo, PackingKind

SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
MAX_ADAPTERS = 100_000
MAX_RANK = 65_536
MAX_ZIPF = 10.0
MAX_BYTES = 2**60
# The default KV reservation of a plan, limited to half the pool.
DEFAULT_KV_TOKENS = 16_384
Tier = Literal["device", "host", "disk", "source"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBase:
    """The base model to plan for, as the engine would serve it."""

    name: str
    shapes: BaseModelInfo
    dtype: str
    block_tokens: int = 16
    packing: PackingKind = "dense"
    """The layout of adapters: dense on a CPU, paged rank blocks for the GPU kernels."""
    kv_dtype: str = ""
    """The dtype of the KV cache; empty: that of the weights."""

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of weights and adapters."""
        return DTYPE_BYTES[self.dtype]

    @property
    def kv(self) -> KVLayout:
        return self.shapes.kv_layout(self.block_tokens, self.kv_dtype or self.dtype)

    @property
    def kv_token_bytes(self) -> int:
        return self.kv.token_bytes

    @property
    def page_bytes(self) -> int:
        return page_bytes_of(self.kv.page_bytes, self.element_bytes, self.packing)

    @property
    def page_width(self) -> int:
        """Elements of an adapter in a page."""
        return self.page_bytes // self.element_bytes

    @property
    def weight_bytes(self) -> int:
        return self.shapes.num_parameters * self.element_bytes


class PartSize(Struct, kw_only=True, frozen=True):
    """All parts of one kind of an adapter."""

    kind: str
    modules: int
    bytes: int
    """The size in the pool, without padding."""
    token_bytes: int
    """Bytes that a decode step reads for a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredAdapter:
    """The size of one adapter on a base, which a plan may multiply."""

    name: str
    rank: int
    """The largest rank; 0 without low-rank weights."""
    num_bytes: int
    """In host memory: the image, with its padding."""
    parts: tuple[PartSize, ...] = ()
    num_blocks: int = 0
    """Rank blocks of a layer, the unit of the GPU's tables."""

    @property
    def token_bytes(self) -> int:
        return sum(part.token_bytes for part in self.parts)

    @property
    def disk_bytes(self) -> int:
        return self.num_bytes + IMAGE_HEADER_BYTES

    def num_pages(self, base: PlannedBase) -> int:
        return math.ceil(self.num_bytes / base.page_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The adapters to plan for."""

    num_adapters: int
    ranks: tuple[int, ...] = ()
    """The ranks, assigned in turn, beginning with the most popular adapter."""
    targets: tuple[str, ...] = ()
    """The adapted projections, from `parse_targets`."""
    measured: tuple[MeasuredAdapter, ...] = ()
    """Instead of ranks and targets: adapters whose sizes are taken in turn."""
    zipf: float = 1.0
    """The Zipf exponent: requests for the i-th most popular adapter are ~ 1 / i ** zipf."""

    def __post_init__(self) -> None:
        _require(
            1 <= self.num_adapters <= MAX_ADAPTERS,
            "adapters",
            f"between 1 and {MAX_ADAPTERS}",
            self.num_adapters,
        )
        if not self.measured:
            _require(bool(self.ranks), "rank", "one number or several", self.ranks)
        for rank in self.ranks:
            _require(1 <= rank <= MAX_RANK, "rank", f"between 1 and {MAX_RANK}", rank)
        _require(0 <= self.zipf <= MAX_ZIPF, "zipf", f"between 0 and {MAX_ZIPF:g}", self.zipf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    device_bytes: int
    """The page pool that KV cache and adapters share."""
    host_bytes: int = 0
    disk_bytes: int = 0
    kv_tokens: int | None = None
    """KV tokens reserved for running requests; None means 16384, or half the pool if less."""
    adapter_fraction: float = 1.0
    """The largest fraction of the pool that adapters may use."""

    def __post_init__(self) -> None:
        for name, value in (
            ("device_memory", self.device_bytes),
            ("host_memory", self.host_bytes),
            ("disk_space", self.disk_bytes),
            ("kv_tokens", self.kv_tokens or 0),
        ):
            _require(0 <= value < MAX_BYTES, name, "0 or more, and less than 1024 PiB", value)
        fraction = self.adapter_fraction
        _require(0 < fraction <= 1, "adapter_memory_fraction", "in (0, 1]", fraction)


def parse_targets(names: Sequence[str], base: BaseModelInfo) -> tuple[str, ...]:
    """Expand names such as q, v_proj, attention, mlp or all to projections, in layer order."""
    known = [projection.name for projection in base.projections]
    attention = {
        name
        for linear in base.linears
        if linear.block == ATTENTION_BLOCK
        for name in linear.projections
    }
    groups = {
        "all": known,
        "all-linear": known,
        "attention": [name for name in known if name in attention],
        "mlp": [name for name in known if name not in attention],
        **{name.removesuffix("_proj"): [name] for name in known},
        **{name: [name] for name in known},
    }
    wanted: set[str] = set()
    for name in names:
        if name not in groups:
            raise InvalidRequest(
                f"The base {base.name} has no target {name!r}. {suggest(name, list(groups))}",
                param="targets",
            )
        wanted.update(groups[name])
    _require(bool(wanted), "targets", "q,k,v,o or other projections", list(names))
    return tuple(name for name in known if name in wanted)


def parse_dtype(name: str, param: str = "dtype") -> str:
    full = SHORT_DTYPES.get(name, name)
    _require(full in DTYPE_BYTES, param, f"one of {', '.join(DTYPE_BYTES)}", name)
    return full


def _require(is_allowed: bool, param: str, says: str, value: object) -> None:
    if not is_allowed:
        raise InvalidRequest(f"{param} must be {says}, got {value!r}.", param=param)


class BaseSizes(Struct, kw_only=True, frozen=True):
    name: str
    dtype: str
    num_layers: int
    weight_bytes: int
    """The size of the base weights, which are not part of the pool."""
    kv_dtype: str
    kv_token_bytes: int
    block_tokens: int
    page_bytes: int
    packing: PackingKind
    quantisation: str = ""
    """Formats of the weights in the files; empty if they are in floating point."""


class GpuMemory(Struct, kw_only=True, frozen=True):
    """The memory of a GPU by use; the working memory, and with it the pool, is an estimate."""

    name: str
    total_bytes: int
    utilization: float
    """The fraction of the total that the engine uses."""
    weight_bytes: int
    augmented_bytes: int
    """The rows behind the base weights for LoRA A of the most used adapters."""
    working_bytes: int
    pool_bytes: int


class AdapterSize(Struct, kw_only=True, frozen=True):
    rank: int
    count: int
    bytes: int
    """The size in host memory."""
    disk_bytes: int
    """The size of the file on disk, with its header."""
    pages: int
    device_bytes: int
    """The size on the device, in whole pages."""
    name: str | UnsetType = UNSET
    """The adapter that was measured."""
    parts: list[PartSize] | UnsetType = UNSET
    """Its parts by kind, if they are known."""


class HitRate(Struct, kw_only=True, frozen=True):
    ideal: float
    """The hit rate with the most popular adapters in each tier."""
    lru: float
    """The hit rate of LRU eviction, by Che's approximation."""


class TierPlan(Struct, kw_only=True, frozen=True):
    tier: Tier
    budget_bytes: int | None
    """None if the tier is not limited."""
    room_bytes: int | None
    """The part of the budget for adapters; on the device, KV cache uses the rest."""
    needed_bytes: int
    """The budget that would fit all adapters."""
    used_bytes: int
    adapters: int
    """The number of adapters that fit; a slower tier also holds those of the faster ones."""
    zipf: HitRate
    """The fraction of requests that find their adapter here and in no faster tier."""
    uniform: HitRate


class Eviction(Struct, kw_only=True, frozen=True):
    """The adapters that do not fit on the device, which are the least popular ones."""

    adapters: int
    zipf_share: float
    """The fraction of requests for them; each waits for a load."""
    uniform_share: float


class EvictedNow(Struct, kw_only=True, frozen=True):
    """The adapters on the device of a running server that would be evicted."""

    adapters: int
    names: list[str]
    """The first of them to be evicted, at most twenty."""
    is_enough: bool
    """False if cached prefixes or running requests would have to be evicted too."""


class MemoryPlan(Struct, kw_only=True, frozen=True):
    base: BaseSizes
    gpu: GpuMemory | UnsetType = UNSET
    """Absent for a CPU and for a pool of a given size."""
    adapters: int
    targets: list[str]
    zipf: float
    sizes: list[AdapterSize]
    tiers: list[TierPlan]
    kv_tokens_reserved: int
    kv_tokens_left: int
    """KV tokens beside the adapters that fit; idle adapters are evicted for more."""
    evicted: Eviction
    evicted_now: EvictedNow | UnsetType = UNSET
    advice: list[str]

    def tier(self, name: str) -> TierPlan:
        return next(tier for tier in self.tiers if tier.tier == name)
