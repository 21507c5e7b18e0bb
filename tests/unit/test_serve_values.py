"""Values by themselves; files and flags are in test_serve_file.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from loramux.config.fields import CHECKS, Kind, LoraModule, nearest, parse_lora_module
from loramux.errors import InvalidRequest


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
def test_an_adapter_is_written_as_for_vllm(text: str, module: LoraModule) -> None:
    assert parse_lora_module(text) == module


@pytest.mark.parametrize("text", ["", "sql", "sql=", "=path", " = ", "{}", "[]", '{"name": ""}'])
def test_half_an_adapter_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_lora_module(text)


def test_a_module_made_by_hand_is_checked_too() -> None:
    with pytest.raises(InvalidRequest, match="no path"):
        LoraModule("sql", "")


def test_relative_paths_start_at_the_folder_and_home_is_known() -> None:
    assert parse_lora_module("a=b/c", Path("/etc")).path == "/etc/b/c"
    assert parse_lora_module("a=~/c", Path("/etc")).path == str(Path.home() / "c")


def test_suggestions_name_the_nearest_or_all() -> None:
    assert nearest("prot", ["port", "host"]) == "Did you mean port?"
    assert nearest("zzz", ["port", "host"]) == "Known are: port, host."


def test_a_registrys_url_is_kept_and_its_path_starts_at_the_files_folder(tmp_path: Path) -> None:
    check = CHECKS[Kind.URL_OR_PATH]
    url = "postgresql://user@host/loramux"
    assert check(url, tmp_path) == url
    assert check("registry.db", tmp_path) == str(tmp_path / "registry.db")
    with pytest.raises(InvalidRequest):
        check(5, tmp_path)
