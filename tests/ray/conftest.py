"""All tests of this folder run in a network namespace, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.ray.namespace import enter_namespace

# For what Ray starts: workers, and the servers of replicas.
os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.pop("LORAMUX_API_KEY", None)

# Entered before a thread is started, which would stay outside.
OBSTACLE = enter_namespace()


@pytest.fixture(autouse=True, scope="session")
def isolated() -> None:
    if OBSTACLE:
        pytest.skip(f"Ray listens on all addresses, and {OBSTACLE}")
