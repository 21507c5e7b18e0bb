"""The settings themselves; files and flags are in test_serve_file.py."""

from __future__ import annotations

from loramux.config.engine import EngineConfig
from loramux.config.fields import CHECKS, flag
from loramux.config.file import load_serve_config
from loramux.config.serve import SETTINGS, ServeConfig


def test_every_setting_has_help_and_a_check() -> None:
    for name, setting in SETTINGS.items():
        assert setting.metadata["help"].endswith("."), name
        assert setting.metadata["kind"] in CHECKS
        assert flag(name).startswith("--")


def test_the_engine_gets_what_was_set() -> None:
    config = load_serve_config(
        {"dtype": "float32", "device_memory": "1G", "max_lora_rank": 8, "max_sequences": 2}
    )
    assert config.engine_config() == EngineConfig(
        dtype="float32", device_memory_bytes=2**30, max_rank=8, max_sequences=2
    )
    assert ServeConfig().engine_config() == EngineConfig()
