"""Receipts and keys for tests."""

from __future__ import annotations

from typing import Any

from loramux.receipts.receipt import Receipt, ServedAdapter
from tests.registry_factory import make_cid


def make_receipt(number: int = 0, **fields: Any) -> Receipt:
    cid = make_cid(number)
    adapter = ServedAdapter(cid=cid, tenant="alice", name="flagger", version="1.4.2", alias="prod")
    values: dict[str, Any] = {
        "id": f"cmpl-{number}",
        "time": 1_700_000_000.0 + number,
        "tenant": "alice",
        "base_model": "tiny@a1b2c3d",
        "base_digest": "sha256:a1b2c3d",
        "adapter_cid": cid,
        "adapters": (adapter,),
        "pool_id": "here",
        "tier_found": "host",
        "cold_miss": True,
        "load_ms": 12.25,
        "queue_depth": 4,
        "queue_ms": 13.0,
        "ttft_ms": 40.5,
        "latency_ms": 142.125,
        "prompt_tokens": 17,
        "completion_tokens": 5,
        "reused_tokens": 16,
        "distinct_adapters": 3,
    }
    return Receipt(**{**values, **fields})
