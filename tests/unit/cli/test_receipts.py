"""Receipts as a user asks for them: by adapter, tenant, time and slowness."""

from __future__ import annotations

import stat
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from loramux.cli.receipts import parse_duration_s, with_latency
from loramux.errors import InvalidRequest
from loramux.receipts.receipt import Receipt
from loramux.receipts.writer import to_record
from tests.cli_factory import NAME, Shell
from tests.receipt_factory import make_receipt


def keep(shell: Shell, receipts: Iterable[Receipt]) -> None:
    rows = [to_record(receipt) for receipt in receipts]
    shell.in_library(lambda library: library.registry.add_receipts(rows))


def ids(shell: Shell, *words: object) -> list[str]:
    return [receipt["id"] for receipt in shell.json("receipts", *words)["receipts"]]


@pytest.fixture
def filled(shell: Shell) -> Shell:
    now = time.time()
    latencies = (20.0, 500.0, 100.0)
    keep(shell, [make_receipt(i, time=now - i, latency_ms=ms) for i, ms in enumerate(latencies)])
    keep(shell, [make_receipt(3, time=now - 7200, tenant="bob", adapter_cid=None, adapters=())])
    return shell


def test_the_newest_come_first_and_the_slowest_when_asked(filled: Shell) -> None:
    assert ids(filled) == ["cmpl-0", "cmpl-1", "cmpl-2", "cmpl-3"]
    assert ids(filled, "--slow") == ["cmpl-1", "cmpl-3", "cmpl-2", "cmpl-0"]
    assert ids(filled, "--slow", "100") == ["cmpl-1", "cmpl-3", "cmpl-2"]
    assert ids(filled, "--slow", "--limit", "1") == ["cmpl-1"]
    assert ids(filled, "--since", "1h") == ["cmpl-0", "cmpl-1", "cmpl-2"]
    assert ids(filled, "--tenant", "bob") == ["cmpl-3"]


def test_an_adapters_receipts_are_found_by_name_version_and_cid(shell: Shell) -> None:
    first, second = shell.push(f"{NAME}@1.4.2", seed=1), shell.push(f"{NAME}@1.5.0", seed=2)
    keep(shell, [make_receipt(1, adapter_cid=first), make_receipt(2, adapter_cid=second)])
    keep(shell, [make_receipt(3)])
    assert ids(shell, "--adapter", NAME) == ["cmpl-2", "cmpl-1"]
    assert ids(shell, "--adapter", f"{NAME}@1.4.2") == ["cmpl-1"]
    assert ids(shell, "--adapter", second) == ["cmpl-2"]
    assert ids(shell, "--adapter", second[-64:][:12]) == ["cmpl-2"]
    shell.ok("rm", f"{NAME}@1.4.2")
    assert ids(shell, "--adapter", NAME) == ["cmpl-2", "cmpl-1"], "a removed version's are lost"
    assert ids(shell, "--adapter", first) == ["cmpl-1"]
    assert shell.run("receipts", "--adapter", "bob/none").exit_code == 1


def test_the_table_tells_why_a_request_was_slow(filled: Shell) -> None:
    table = filled.ok("receipts")
    for word in ("cmpl-1", "alice/flagger@1.4.2 (prod)", "host", "500", "17+5", "base"):
        assert word in table


def test_no_receipts_are_no_error(shell: Shell) -> None:
    assert shell.json("receipts") == {"receipts": []}
    assert "No receipts" in shell.run("receipts").stderr


def test_one_receipt_is_shown_whole(filled: Shell) -> None:
    assert filled.json("receipts", "show", "cmpl-1")["serving"]["latency_ms"] == 500.0
    shown = filled.ok("receipts", "show", "cmpl-1")
    assert "alice/flagger@1.4.2 (prod)" in shown
    assert "base_digest" in shown
    missing = filled.run("receipts", "show", "cmpl-99")
    assert missing.exit_code == 1
    assert "cmpl-99" in missing.stderr


@pytest.mark.parametrize(
    "words", [["--since", "yesterday"], ["--limit", "0"], ["--slow", "-1"], ["nonsense"]]
)
def test_wrong_usage_is_2(words: list[str], shell: Shell) -> None:
    assert shell.run_bare("receipts", "--data", shell.data, *words).exit_code == 2


def test_keygen_makes_a_private_and_a_public_file_once(shell: Shell, tmp_path: Path) -> None:
    made = shell.run_bare("receipts", "keygen", tmp_path / "key.pem")
    assert made.exit_code == 0
    assert "Key id" in made.stdout
    assert stat.S_IMODE((tmp_path / "key.pem").stat().st_mode) == 0o600
    content = (tmp_path / "key.pem").read_bytes()
    again = shell.run_bare("receipts", "keygen", tmp_path / "key.pem")
    assert again.exit_code == 2
    assert (tmp_path / "key.pem").read_bytes() == content
    nowhere = shell.run_bare("receipts", "keygen", tmp_path / "absent" / "key.pem")
    assert nowhere.exit_code == 1


def test_slow_takes_a_number_or_none() -> None:
    assert with_latency(["--slow", "--json"]) == ["--slow", "0", "--json"]
    assert with_latency(["--slow"]) == ["--slow", "0"]
    assert with_latency([]) == [], "the bare command is a traceback"
    assert with_latency(["--slow", "2.5"]) == ["--slow", "2.5"]
    assert with_latency(["show", "x"]) == ["show", "x"]


def test_durations_have_a_unit() -> None:
    assert [parse_duration_s(text) for text in ("30s", "15m", "15 min", "1.5h", "7d")] == [
        30,
        900,
        900,
        5400,
        604_800,
    ]
    for bad in ("", "1", "h", "-1h", "1y", "1h2m", "١h"):
        with pytest.raises(InvalidRequest):
            parse_duration_s(bad)
