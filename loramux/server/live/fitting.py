"""How many adapters of the usual size fit on the device, as gateways want to know it."""

from __future__ import annotations

from loramux.backend.host import Health
from loramux.backend.text import ModelCard, TextBackend
from loramux.capacity.plan import Budgets, Fleet, PlannedBase
from loramux.capacity.planner import plan_memory
from loramux.errors import InvalidRequest, LoramuxError

_RANK = 16
_MAX_COUNTED = 4096


def planned_base(card: ModelCard) -> PlannedBase:
    if card.shapes is None:
        raise LoramuxError("The engine did not report the shapes of its base model.")
    return PlannedBase(
        name=card.name,
        shapes=card.shapes,
        dtype=card.dtype,
        kv_dtype=card.kv_cache_dtype,
        block_tokens=card.block_tokens,
        packing=card.packing,
    )


class CachedFit:
    """Counts once per model card."""

    def __init__(self, backend: TextBackend) -> None:
        self._backend = backend
        self._counted: tuple[ModelCard, int] | None = None

    def max_adapters(self) -> int:
        """Return the adapters of rank 16 that fit beside the usual KV cache; at least 1."""
        if self._backend.health is Health.STARTING:
            return 1
        card = self._backend.card
        if self._counted is None or self._counted[0] is not card:
            self._counted = (card, _count(card))
        return self._counted[1]


def _count(card: ModelCard) -> int:
    limits = [limit for limit in (card.max_loras, card.max_resident) if limit is not None]
    if card.shapes is not None:
        fleet = Fleet(num_adapters=_MAX_COUNTED, ranks=(_RANK,))
        budgets = Budgets(
            device_bytes=card.pool_bytes,
            host_bytes=card.host_memory_bytes,
            disk_bytes=card.disk_space_bytes,
            adapter_fraction=card.adapter_memory_fraction,
        )
        try:
            plan = plan_memory(planned_base(card), fleet, budgets)
            limits.append(plan.tier("device").adapters)
        except InvalidRequest:
            # The pool has no room for an adapter of this size.
            limits.append(1)
    return max(1, min(limits, default=1))
