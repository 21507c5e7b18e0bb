"""How many replicas there should be."""

from __future__ import annotations

import math
from typing import Any


def replicas_by_load(context: Any) -> tuple[int, dict[str, Any]]:
    """Return the replicas for which each has the load that it should have.

    Bounds and delays are Ray's; without reports the number stays.
    """
    loads = (context.aggregated_metrics or {}).get("load", {})
    if not loads:
        return context.target_num_replicas, {}
    # A replica that has just started has no load yet.
    return max(1, math.ceil(round(sum(loads.values()), 3))), {}
