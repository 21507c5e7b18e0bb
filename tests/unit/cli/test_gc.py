from __future__ import annotations

from uuid import uuid4

import pytest

from loramux.cli.gc import parse_duration
from loramux.errors import InvalidRequest
from loramux.receipts.writer import to_record
from loramux.store.library import AdapterLibrary
from tests.cli_factory import NAME, Shell
from tests.receipt_factory import make_receipt
from tests.s3_server import S3Server


@pytest.fixture
def remote(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_access_key)
    return ["--remote-store", f"s3://{s3_server.bucket}/{uuid4().hex}"]


@pytest.fixture
def pushed(shell: Shell, remote: list[str]) -> Shell:
    """Two versions in the bucket; the second was removed."""
    for seed, version in enumerate(("1.4.2", "1.5.0")):
        shell.ok("push", shell.adapter(seed), f"{NAME}@{version}", *remote)
    shell.ok("rm", f"{NAME}@1.5.0")
    return shell


@pytest.mark.parametrize(
    ("text", "seconds"), [("24h", 86_400), ("30m", 1800), ("1.5d", 129_600), ("90s", 90), ("0", 0)]
)
def test_times_have_units(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "-1h", "24 weeks", "1e9h", "²h"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="24h"):
        parse_duration(text)


def test_a_dry_run_shows_what_a_run_removes(pushed: Shell, remote: list[str]) -> None:
    gc = ["gc", "--remote", *remote]
    assert "Removed  0 adapters, 0 files" in pushed.ok(*gc), "a day of grace"
    shown = pushed.ok(*gc, "--older-than", "0", "--dry-run")
    assert "Would go 1 adapters, 1 files" in shown
    assert shown.count("records/") == 1 and shown.count("blobs/") == 1 and "UTC" in shown
    assert "Removed  1 adapters, 1 files" in pushed.ok(*gc, "--older-than", "0")
    assert "Removed  0 adapters, 0 files" in pushed.ok(*gc, "--older-than", "0")
    assert pushed.json("verify", *remote)["is_sound"]


def test_adapters_of_stored_receipts_are_not_collected(pushed: Shell, remote: list[str]) -> None:
    def removed(library: AdapterLibrary) -> str:
        [cid] = library.registry.cids_of(NAME) - library.registry.cids()
        return cid

    cid = pushed.in_library(removed)
    receipt = to_record(make_receipt(adapter_cid=cid))
    pushed.in_library(lambda library: library.registry.add_receipts([receipt]))
    assert "Removed  0 adapters" in pushed.ok("gc", "--remote", "--older-than", "0", *remote)


def test_remote_gc_with_another_registry_is_refused(pushed: Shell, remote: list[str]) -> None:
    wrong = ["--registry", pushed.folder / "wrong.db", *remote, "--older-than", "0"]
    refused = pushed.run("gc", "--remote", *wrong)
    assert refused.exit_code == 1 and "--all" in refused.stderr
    assert "Removed  2 adapters, 3 files" in pushed.ok("gc", "--remote", "--all", *wrong)


@pytest.mark.parametrize(
    "words",
    [["--dry-run"], ["--older-than", "1h"], ["--remote"], ["--remote", "--older-than", "soon"]],
)
def test_wrong_usage(words: list[str], shell: Shell) -> None:
    assert shell.run("gc", *words).exit_code == 2
