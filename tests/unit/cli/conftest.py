from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli_factory import Shell


@pytest.fixture(autouse=True)
def reference_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that run a model use the reference kernels: nothing is compiled."""
    monkeypatch.setenv("LORAMUX_KERNELS", "torch")


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)
