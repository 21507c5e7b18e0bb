"""One cache folder for all of these tests, and the real default model in it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from loramux.models.default_model import DEFAULT_MODEL_PACKAGE, default_model_path
from loramux.models.gguf_file import converted_folder


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LORAMUX_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def smollm2_folder(cache: Path) -> Path:
    """SmolLM2-135M-Instruct, converted from its GGUF file: about ten seconds, once."""
    if importlib.util.find_spec(DEFAULT_MODEL_PACKAGE) is None:
        pytest.skip(f"{DEFAULT_MODEL_PACKAGE} is not installed")
    return converted_folder(default_model_path())
