from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.server.asgi_client import plain_app
from tests.unit.server.registry_app import Make, RegistryApp, make_registry_app


@pytest.fixture(scope="module", autouse=True)
def own_plain_app() -> None:
    """Reset the state: what one file does to the application without options is not seen by
    another.
    """
    plain_app.cache_clear()


@pytest.fixture
def registry_app(tmp_path: Path) -> Iterator[Make]:
    made: list[RegistryApp] = []

    def make(**options: Any) -> RegistryApp:
        made.append(make_registry_app(tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.registry.close()
