"""Fetches for a moment: nothing stays but what the next try can go on with."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from loramux.errors import SourceFailed
from loramux.sources.config import SourceConfig
from loramux.sources.fetch import ABANDONED_S, Fetcher, fetched, held, sweep
from loramux.sources.parse import parse_source
from tests.fault_server import Fault, FaultServer
from tests.unit.sources.source_factory import WEIGHTS, WEIGHTS_NAME, FakeTime, entries


def test_the_files_are_there_as_long_as_they_are_wanted(
    web: FaultServer, web_config: SourceConfig, tmp_path: Path
) -> None:
    source = parse_source(f"{web.url}/pirate", web_config)
    fetcher = Fetcher(web_config)
    with fetched(fetcher, source, tmp_path) as folder:
        assert (folder / WEIGHTS_NAME).read_bytes() == WEIGHTS
        with fetched(fetcher, source, tmp_path) as other:
            assert other != folder and (other / WEIGHTS_NAME).read_bytes() == WEIGHTS
    assert entries(tmp_path) == []


def test_what_broke_off_is_gone_on_with(
    web: FaultServer, web_config: SourceConfig, tmp_path: Path
) -> None:
    once = replace(web_config, limits=replace(web_config.limits, max_attempts=1))
    source = parse_source(f"{web.url}/pirate", once)
    fetcher = Fetcher(once, timing=FakeTime().timing)
    web.faults = [Fault(path_end=WEIGHTS_NAME, cut_at=3000)]
    with pytest.raises(SourceFailed), fetched(fetcher, source, tmp_path):
        pass
    assert entries(tmp_path), "nothing was kept"
    seen: list[int] = []
    with fetched(fetcher, source, tmp_path, progress=lambda p: seen.append(p.received_bytes)):
        pass
    assert max(seen) >= len(WEIGHTS) and entries(tmp_path) == []


def test_what_nobody_came_back_for_is_swept(tmp_path: Path) -> None:
    old, new, used = (tmp_path / name for name in ("old", "new", "used"))
    for place in (old, new, used):
        place.mkdir()
    for place in (old, used):
        os.utime(place, (0, 0))
    with held(used):
        os.utime(used, (0, 0))
        sweep(tmp_path, older_than=ABANDONED_S)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "used"]
