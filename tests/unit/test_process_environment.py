from __future__ import annotations

import os

import pytest

from loramux.base.process_environment import DEFAULTS, child_environment, set_process_environment


def test_defaults_are_set_and_the_users_values_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    monkeypatch.setenv("MIMALLOC_PURGE_DELAY", "5")
    expected = {**DEFAULTS, "GOMP_SPINCOUNT": "7", "MIMALLOC_PURGE_DELAY": "5"}
    assert {name: child_environment()[name] for name in DEFAULTS} == expected
    assert "OMP_WAIT_POLICY" not in os.environ
    set_process_environment()
    assert {name: os.environ[name] for name in DEFAULTS} == expected
