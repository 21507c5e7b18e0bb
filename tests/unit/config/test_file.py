from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loramux.config.engine import EngineConfig
from loramux.config.fields import LoraModule
from loramux.config.file import load_serve_config
from loramux.config.serve import ServeConfig
from loramux.errors import InvalidRequest


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    return file


def refusal(flags: dict[str, Any], file: Path | None = None) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        load_serve_config(flags, file)
    return caught.value


def test_defaults_hold_without_flags_and_file() -> None:
    assert load_serve_config({}) == ServeConfig()
    assert ServeConfig().port == 8000


def test_keys_may_be_written_both_ways_and_flags_win(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        'max-model-len = 1024\nmax_batch_tokens = 64\nport = 9000\nhost = "0.0.0.0"\n'
        'device-memory = "2GiB"\nhost_memory = 1048576\ndrain_s = 5\nstrict-base = true\n'
        'served-model-name = "base"\ndtype = "float32"\n',
    )
    config = load_serve_config({"port": 1234, "strict_base": False}, file)
    assert config == ServeConfig(
        port=1234,
        host="0.0.0.0",
        drain_s=5.0,
        served_model_name=("base",),
        engine=EngineConfig(
            max_model_len=1024,
            max_batch_tokens=64,
            device_memory_bytes=2 * 2**30,
            host_memory_bytes=2**20,
            strict_base=False,
            dtype="float32",
        ),
    )


def test_former_keys_are_accepted_in_a_file(tmp_path: Path) -> None:
    file = write(tmp_path, 'adapter-weights = ["sql=2"]\ntenant_weights = {acme = 3}')
    expected = ServeConfig(adapter_shares=(("sql", 2.0),), tenant_shares=(("acme", 3.0),))
    assert load_serve_config({}, file) == expected


ADAPTERS = {
    "texts": 'lora-modules = ["a=one", "b=/two"]',
    "tables": '[[lora-modules]]\nname = "a"\npath = "one"\n[[lora-modules]]\nname="b"\npath="/two"',
    "one table": '[lora-modules]\na = "one"\nb = "/two"',
    "JSON in texts": 'lora_modules = [\'{"name": "a", "path": "one"}\', "b=/two"]',
}


@pytest.mark.parametrize("form", ADAPTERS)
def test_adapters_in_a_file_have_every_form_and_start_at_its_folder(
    form: str, tmp_path: Path
) -> None:
    config = load_serve_config({}, write(tmp_path, ADAPTERS[form]))
    assert config.lora_modules == (LoraModule("a", str(tmp_path / "one")), LoraModule("b", "/two"))


def test_paths_of_flags_start_at_the_working_folder(tmp_path: Path) -> None:
    file = write(tmp_path, 'model = "./models/base"')
    assert load_serve_config({}, file).model == str(tmp_path / "models" / "base")
    config = load_serve_config({"model": "../base", "lora_modules": ["a=one"]}, file)
    assert config.model == "../base"
    assert config.lora_modules == (LoraModule("a", "one"),)
    assert load_serve_config({"model": "~/base"}).model == str(Path.home() / "base")


def test_a_model_of_the_hub_is_not_a_path_unless_there_is_one(tmp_path: Path) -> None:
    file = write(tmp_path, 'model = "models/base"')
    assert load_serve_config({}, file).model == "models/base"
    (tmp_path / "models" / "base").mkdir(parents=True)
    assert load_serve_config({}, file).model == str(tmp_path / "models" / "base")
    for name in ("hf:models/base", "acme/base@v1:tiny.gguf"):
        assert load_serve_config({"model": name}, file).model == name


def test_lists_of_paths_are_resolved_like_single_paths(
    tmp_path: Path,
) -> None:
    file = write(tmp_path, 'allowed-roots = ["adapters", "/srv/more", "~/own"]')
    expected = (str(tmp_path / "adapters"), "/srv/more", str(Path.home() / "own"))
    assert load_serve_config({}, file).allowed_roots == expected
    assert load_serve_config({"allowed_roots": ["adapters"]}, file).allowed_roots == ("adapters",)
    assert load_serve_config({}, write(tmp_path, 'registry = "none"')).registry == "none"


@pytest.mark.parametrize(
    ("text", "param", "words"),
    [
        ("prot = 1", "prot", "port"),
        ("max-modle-len = 1", "max-modle-len", "max-model-len"),
        ("lora_module = []", "lora_module", "lora-modules"),
        ("zzz = 1", "zzz", "Valid values: model"),
        ("[server]\nport = 1", "server", "Valid values"),
        ('port = "8000"', "port", "port in .*serve.toml: must be a whole number, got '8000'"),
        ("port = true", "port", "whole number"),
        ("port = 80.5", "port", "whole number"),
        ("port = 70000", "port", "between 0 and 65535"),
        ("max-queue = -1", "max_queue", "0 or more"),
        ("fetch-timeout-s = 0", "fetch_timeout_s", "over 0 seconds"),
        ("allowed-roots = [1]", "allowed_roots", "list of texts"),
        ("max-sequences = 0", "max_sequences", "1 or more"),
        ("drain-s = nan", "drain_s", "0 or more seconds"),
        ('drain-s = "30"', "drain_s", "number of seconds"),
        ('strict-base = "yes"', "strict_base", "true or false"),
        ("model = 1", "model", "a path in quotes"),
        ("host = 1", "host", "text in quotes"),
        ('host = ""', "host", "an address"),
        ('dtype = "int8"', "dtype", "one of auto, bfloat16"),
        ('log-level = "loud"', "log_level", "one of critical"),
        ('device-memory = "2 elephants"', "device_memory", "Write it like 512MiB"),
        ("device-memory = 0", "device_memory", "1 or more"),
        ("device-memory = true", "device_memory", "a size"),
        ('served-model-name = ["a", 1]', "served_model_name", "list of texts"),
        ("lora-modules = 3", "lora_modules", "a list such as"),
        ("lora-modules = [3]", "lora_modules", "name=folder"),
        ('lora-modules = ["pirate"]', "lora_modules", "Write name=folder"),
        ('lora-modules = ["=x"]', "lora_modules", "Write name=folder"),
        ('lora-modules = [{name = "a"}]', "lora_modules", "has no path"),
        ('lora-modules = [{name = "a", path = "b", rank = 1}]', "lora_modules", "field 'rank'"),
        ('lora-modules = [{nmae = "a", path = "b"}]', "lora_modules", "Did you mean name"),
        ('lora-modules = [{name = 1, path = "b"}]', "lora_modules", "name must be text"),
        ("lora-modules = ['{\"name\": ']", "lora_modules", "not valid JSON"),
        ('lora-modules = ["a=x", "a=y"]', "lora_modules", "'a' is given to two models"),
        ('served-model-name="a"\nlora-modules=["a=x"]', "lora_modules", "two models"),
        ("max-lora-rank = 1\nmax_lora_rank = 2", "max_lora_rank", "twice"),
        ("port = ", "config", "not valid TOML"),
    ],
)
def test_an_invalid_file_is_refused_with_the_key_and_the_fix(
    text: str, param: str, words: str, tmp_path: Path
) -> None:
    error = refusal({}, write(tmp_path, text))
    assert error.param == param
    with pytest.raises(InvalidRequest, match=words):
        raise error


def test_an_invalid_flag_is_named_as_it_was_typed() -> None:
    assert str(refusal({"device_memory": "lots"})).startswith("--device-memory: ")
    assert str(refusal({"port": -1})).startswith("--port: must be")
    assert refusal({"prot": 1}).param == "prot"


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    assert "missing.toml" in str(refusal({}, tmp_path / "missing.toml"))
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    assert "binary.toml" in str(refusal({}, binary))
