from __future__ import annotations

from pathlib import Path

from loramux.backend import Backend
from loramux.config import EngineConfig
from loramux.engine.async_engine import AsyncEngine, AsyncEngineOptions


def test_the_engine_offers_all_that_a_server_asks_for() -> None:
    engine = AsyncEngine(AsyncEngineOptions(model=Path("model"), config=EngineConfig()))
    asked = {name for name in vars(Backend) if not name.startswith("_")}
    assert asked <= set(dir(engine)), asked - set(dir(engine))
