from __future__ import annotations

import io

from rich.console import Console

from loramux.cli.receipts import (
    adapter_text,
    adapters_text,
    milliseconds,
    receipt_lines,
    receipt_table,
)
from loramux.receipts.writer import to_record
from loramux.registry.records import StoredReceipt
from tests.receipt_factory import make_receipt
from tests.registry_factory import make_cid


def rendered(receipt: StoredReceipt) -> str:
    console = Console(file=io.StringIO(), width=240)
    console.print(receipt_table([receipt]))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_adapters_are_named_as_the_request_reached_them() -> None:
    cid = make_cid(1)
    digits = cid[-64:][:12]
    assert adapter_text({"cid": cid}) == digits
    assert adapter_text({"cid": cid, "weight": 0.5}) == f"0.5*{digits}"
    assert adapter_text({"cid": cid, "name": "sql"}) == "sql"
    named = {"cid": cid, "tenant": "a", "name": "b", "version": "1.0.0", "weight": 1}
    assert adapter_text(named) == "a/b@1.0.0"
    assert adapters_text({"adapters": [named, {"cid": cid}]}) == f"a/b@1.0.0 + {digits}"
    assert adapters_text({"adapter_cid": None}) == "base"
    assert adapters_text({"adapter_cid": cid}) == digits


def test_a_receipt_of_another_server_is_shown_as_far_as_it_goes() -> None:
    receipt = StoredReceipt(
        id="r", created_at=0.0, tenant="t", cid=None, latency_ms=1.0, is_cold=False, body={"new": 1}
    )
    assert "–" in rendered(receipt)
    assert list(receipt_lines(receipt.body)) == [("new", "1")]


def test_text_of_a_receipt_cannot_steer_the_terminal() -> None:
    evil = make_receipt(id="evil\x1b[2J", tenant="[red]\x07", tier_found="\x1b")
    shown = rendered(to_record(evil))
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "[red]" in shown


def test_every_field_of_a_receipt_is_listed() -> None:
    body = make_receipt().body()
    labels = [label for label, _ in receipt_lines(body)]
    assert set(labels) == {"adapter" if name == "adapters" else name for name in body}
    assert dict(receipt_lines(body))["time"] == "2023-11-14 22:13:20"


def test_absent_times_are_a_dash() -> None:
    assert (milliseconds(None), milliseconds(12.6), milliseconds(0)) == ("–", "13", "0")
