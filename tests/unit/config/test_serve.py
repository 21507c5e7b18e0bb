"""The settings as a whole: how they are declared, and how they reach the two config classes."""

from __future__ import annotations

from pathlib import Path

import pytest

from loramux.config.engine import EngineConfig
from loramux.config.fields import PARSERS, LoraModule, flag
from loramux.config.file import load_serve_config
from loramux.config.serve import SETTINGS, ServeConfig, serve_config
from loramux.errors import InvalidRequest

AT_LEAST_ONE = (
    *("max_lora_rank", "max_loras", "max_cpu_loras", "max_queue_tokens", "max_model_len"),
    *("max_batch_tokens", "max_sequences", "device_memory", "receipt_retention_days"),
    *("store_space", "max_adapter_size", "fetch_workers"),
)


def test_every_setting_has_help_and_a_parser_and_a_valid_default() -> None:
    for name, setting in SETTINGS.items():
        assert setting.help.endswith("."), name
        assert setting.kind in PARSERS
        setting.check(setting.default)


def test_settings_of_the_engine_reach_its_config() -> None:
    config = load_serve_config(
        {
            "dtype": "float32",
            "device_memory": "1G",
            "max_lora_rank": 8,
            "max_sequences": 2,
            "no_prefix_cache": True,
            "port": 1,
        }
    )
    assert config == ServeConfig(
        port=1,
        engine=EngineConfig(
            dtype="float32",
            device_memory_bytes=2**30,
            max_rank=8,
            max_sequences=2,
            prefix_cache=False,
        ),
    )
    assert serve_config({}) == ServeConfig() and ServeConfig().engine == EngineConfig()


@pytest.mark.parametrize("name", ["max_batch_tokens", "max_sequences", "host_memory", "device"])
def test_auto_is_a_value_of_settings_that_follow_the_device(name: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(f'{name} = "auto"\n')
    assert load_serve_config({name: "auto"}) == load_serve_config({}, file) == ServeConfig()
    with pytest.raises(InvalidRequest):
        load_serve_config({"eviction": "auto"})


@pytest.mark.parametrize("name", AT_LEAST_ONE)
def test_zero_is_refused_by_flag(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{flag(name)}: must be 1 or more") as caught:
        load_serve_config({name: 0})
    assert caught.value.param == name


def test_a_config_made_directly_is_checked_too() -> None:
    with pytest.raises(InvalidRequest, match="port must be between 0 and 65535"):
        ServeConfig(port=-1)


def test_a_name_of_two_models_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'a' is given to two models"):
        ServeConfig(served_model_name=("a",), lora_modules=(LoraModule("a", "folder"),))


@pytest.mark.parametrize(
    ("former", "name", "value"),
    [
        ("tenant_weights", "tenant_shares", ["acme=2"]),
        ("adapter_weights", "adapter_shares", ["sql=3"]),
    ],
)
def test_a_former_name_sets_the_same_field(former: str, name: str, value: list[str]) -> None:
    config = load_serve_config({former: value})
    assert config == load_serve_config({name: value}) != ServeConfig()
    with pytest.raises(InvalidRequest, match="twice"):
        load_serve_config({name: value, former: value})
