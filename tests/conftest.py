"""Settings of all tests, made before torch or a tokenizer is imported; servers per session."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import signal
import sys
import time
import zlib
from pathlib import Path

import pytest

from tests import interpreter
from tests.postgres_server import postgres_server as postgres_server
from tests.redis_server import redis_url as redis_url
from tests.s3_server import s3_server as s3_server

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Where there is no GPU, Triton kernels run in its interpreter; triton asks once, when it is
# imported, and torch may import it long before a kernel's test does.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell ignores ctrl-c for what it starts in the background, and programs inherit that: tests that
# press it would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The engine's own tests also run where hypothesis is not installed.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    # No deadline: on a shared machine the first example may take seconds. A CI run uses the same
    # examples each time, so that a failure there can be repeated.
    is_ci = bool(os.environ.get("CI"))
    settings.register_profile(
        "quick", deadline=None, derandomize=is_ci, max_examples=15, stateful_step_count=30
    )
    settings.register_profile(
        "full", deadline=None, derandomize=is_ci, max_examples=150, stateful_step_count=50
    )
    settings.load_profile(os.environ.get("LORAMUX_HYPOTHESIS", "quick"))


# Most that an import makes stays: collections would look at it again and again.
gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest tests first, so that the processes end at about the same time."""
    items.sort(
        key=lambda item: "integration" not in item.path.parts and item.path.stem != "test_docs"
    )


def pytest_collection_finish() -> None:
    """Take what is imported out of garbage collections, whose time tests pay otherwise."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip after the deadline; seed the random numbers by the test's name."""
    deadline = float(os.environ.get("LORAMUX_TEST_DEADLINE", "inf"))
    if time.time() > deadline:
        pytest.skip("the time limit of this run is over (LORAMUX_TEST_DEADLINE)")
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        # torch.manual_seed() takes a hundred times as long, to ask for devices that are not used.
        torch = sys.modules["torch"]
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)
        # What a test compares with is computed in this process.
        torch.zeros(1).cos()
    interpreter.quicken()
