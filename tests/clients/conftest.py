"""One server for all clients of a session."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.clients.live import Live, live_server


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """LORAMUX_URL names a server that runs already, for work on a single test."""
    if running := os.environ.get("LORAMUX_URL"):
        yield Live(running)
        return
    with live_server(tmp_path_factory.mktemp("server")) as started:
        yield started
