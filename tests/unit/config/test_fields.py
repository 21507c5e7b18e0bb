"""Parsers of single values."""

from __future__ import annotations

from pathlib import Path

import pytest

from loramux.config.fields import PARSERS, Kind, LoraModule, parse_lora_module
from loramux.errors import InvalidRequest, suggest


@pytest.mark.parametrize(
    ("text", "module"),
    [
        ("sql=/adapters/sql", LoraModule("sql", "/adapters/sql")),
        ("sql=/a=b", LoraModule("sql", "/a=b")),
        ('{"name": "sql", "path": "/x"}', LoraModule("sql", "/x")),
        (
            ' {"name": "sql", "path": "/x", "base_model_name": "llama"}',
            LoraModule("sql", "/x", "llama"),
        ),
        ('{"name": "sql", "path": "/x", "base_model_name": null}', LoraModule("sql", "/x")),
    ],
)
def test_an_adapter_has_vllms_two_forms(text: str, module: LoraModule) -> None:
    assert parse_lora_module(text) == module


@pytest.mark.parametrize("text", ["", "sql", "sql=", "=path", " = ", "{}", "[]", '{"name": ""}'])
def test_an_incomplete_adapter_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_lora_module(text)


def test_a_module_made_directly_is_checked_too() -> None:
    with pytest.raises(InvalidRequest, match="no path"):
        LoraModule("sql", "")


def test_relative_paths_start_at_the_folder_and_home_is_expanded() -> None:
    assert parse_lora_module("a=b/c", Path("/etc")).path == "/etc/b/c"
    assert parse_lora_module("a=~/c", Path("/etc")).path == str(Path.home() / "c")


def test_a_suggestion_names_the_nearest_values_or_all() -> None:
    assert suggest("prot", ["port", "host"]) == "Did you mean port?"
    assert suggest("zzz", ["port", "host"]) == "Valid values: port, host."


def test_a_url_is_kept_and_a_path_starts_at_the_files_folder(tmp_path: Path) -> None:
    parse = PARSERS[Kind.URL_OR_PATH]
    url = "postgresql://user@host/loramux"
    assert parse(url, tmp_path) == url
    assert parse("registry.db", tmp_path) == str(tmp_path / "registry.db")
    with pytest.raises(InvalidRequest):
        parse(5, tmp_path)
