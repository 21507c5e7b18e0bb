from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub_server import HubServer, hub_for_client


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    from huggingface_hub import constants, file_download

    # The client writes whole pieces of 10 MB, and waits a second before it resumes.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)
    monkeypatch.setattr(file_download.time, "sleep", lambda _: None)
    monkeypatch.setenv("LORAMUX_CACHE", str(tmp_path / "own-cache"))
    with hub_for_client(monkeypatch, tmp_path) as server:
        yield server
