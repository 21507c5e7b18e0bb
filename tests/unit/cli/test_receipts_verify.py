"""Exit status 0 only where every receipt is what the key's owner signed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loramux.base.signing import make_key_files, read_private_key
from loramux.receipts.receipt import Receipt, signed
from loramux.receipts.writer import to_record
from loramux.registry import records
from tests.cli_factory import Shell
from tests.receipt_factory import make_receipt


@pytest.fixture
def key(tmp_path: Path) -> Path:
    make_key_files(tmp_path / "key")
    return tmp_path / "key"


def make_signed(key: Path, number: int = 0) -> Receipt:
    return signed(make_receipt(number), read_private_key(key))


def keep(shell: Shell, *rows: records.Receipt) -> None:
    shell.in_library(lambda library: library.registry.add_receipts(rows))


def public(key: Path) -> list[object]:
    return ["--key", f"{key}.pub"]


def test_signed_receipts_of_the_registry_verify_one_by_one_and_all(shell: Shell, key: Path) -> None:
    keep(shell, *(to_record(make_signed(key, number)) for number in range(3)))
    assert "Verified 1 valid" in shell.ok("receipts", "verify", "cmpl-1", *public(key))
    assert "Verified 3 valid" in shell.ok("receipts", "verify", "--all", *public(key))


def test_one_changed_receipt_fails_them_all_and_is_named(shell: Shell, key: Path) -> None:
    changed = to_record(make_signed(key, 1))
    changed = replace(changed, body={**changed.body, "latency_ms": 1.0})
    keep(shell, to_record(make_signed(key, 0)), changed, to_record(make_receipt(2)))
    result = shell.run("receipts", "verify", "--all", *public(key))
    assert result.exit_code == 1
    assert "cmpl-1 is not what was signed." in result.stdout
    assert "cmpl-2 is not signed." in result.stdout
    assert "FAILED   1 valid, 1 unsigned, 1 changed" in result.stdout
    assert shell.run("receipts", "verify", "cmpl-1", *public(key)).exit_code == 1


def test_another_receipts_body_under_an_id_does_not_verify(shell: Shell, key: Path) -> None:
    keep(shell, replace(to_record(make_signed(key, 1)), id="cmpl-0"))
    assert shell.run("receipts", "verify", "cmpl-0", *public(key)).exit_code == 1


def test_another_key_is_distinguished_from_a_changed_receipt(
    shell: Shell, key: Path, tmp_path: Path
) -> None:
    make_key_files(tmp_path / "other")
    keep(shell, to_record(make_signed(key)))
    result = shell.run("receipts", "verify", "--all", *public(tmp_path / "other"))
    assert result.exit_code == 1
    assert "was signed with another key" in result.stdout


def answer(body: dict[str, Any]) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "choices": [], "serving": body}


FORMS = {
    "receipt": json.dumps,
    "answer": lambda body: json.dumps(answer(body), indent=2),
    "list": lambda body: json.dumps({"receipts": [body]}),
    "server's list": lambda body: json.dumps({"object": "list", "data": [body]}),
    "lines": lambda body: f"{json.dumps(answer(body))}\n\n",
    "stream": lambda body: (
        f'data: {{"id": "x", "choices": []}}\n\ndata: {json.dumps(answer(body))}\n\ndata: [DONE]\n'
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_files_of_every_form_are_verified(form: str, key: Path, shell: Shell) -> None:
    body = make_signed(key).body()
    file = shell.folder / "answer.json"
    words = ["receipts", "verify", "--file", file, *public(key)]
    file.write_text(FORMS[form](body))
    assert "Verified 1 valid" in shell.ok(*words)
    file.write_text(FORMS[form]({**body, "tenant": "mallory"}))
    assert shell.run(*words).exit_code == 1


def test_a_receipt_is_verified_from_standard_input(key: Path, shell: Shell) -> None:
    text = json.dumps(make_signed(key).body())
    result = shell.run("receipts", "verify", "--file", "-", *public(key), input=text)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    "text",
    ["", "hello", "[]", '{"serving": null}', "{broken\n{", "[DONE]", "[" * 100_000, "\udcff"],
)
def test_a_file_without_a_receipt_is_not_taken_for_a_valid_one(
    text: str, key: Path, shell: Shell
) -> None:
    (shell.folder / "f").write_text(text, errors="surrogateescape")
    result = shell.run("receipts", "verify", "--file", shell.folder / "f", *public(key))
    assert result.exit_code == 2


def test_exactly_one_verification_target_is_required(key: Path, shell: Shell) -> None:
    for words in ([], ["cmpl-1", "--all"], ["--file", "f", "--all"]):
        assert shell.run("receipts", "verify", *words, *public(key)).exit_code == 2
    assert shell.run("receipts", "verify", "--all").exit_code == 2, "no key"
    assert shell.run("receipts", "verify", "--all", "--key", key).exit_code == 2, "a private key"


def test_an_absent_receipt_file_or_key_is_one_sentence(key: Path, shell: Shell) -> None:
    absent = shell.folder / "absent"
    for words in (
        ["cmpl-1", *public(key)],
        ["--file", absent, *public(key)],
        ["--all", "--key", absent],
    ):
        result = shell.run("receipts", "verify", *words)
        assert result.exit_code == 1
        assert result.stderr.startswith("error: ")
