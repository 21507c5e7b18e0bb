"""How receipts look on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from loramux.cli.doctor_view import printable
from loramux.cli.registry_view import short_cid, time_text
from loramux.registry.records import Receipt

REFUSED = "refused"
TIMES = ("load_ms", "queue_ms", "ttft_ms", "latency_ms")


def receipt_table(found: Iterable[Receipt]) -> Table:
    table = Table("time (UTC)", "id", "tenant", "adapter", "found on")
    for column in ("load", "queue", "first", "total ms", "tokens"):
        table.add_column(column, justify="right")
    for receipt in found:
        body = receipt.body
        table.add_row(
            time_text(receipt.created_at),
            Text(printable(receipt.id), overflow="fold"),
            Text(printable(receipt.tenant), overflow="fold"),
            Text(adapters_text(body), overflow="fold"),
            found_text(receipt),
            *(milliseconds(body.get(name)) for name in TIMES),
            tokens_text(body),
        )
    return table


def receipt_lines(body: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Every field, also one that a later server has added."""
    for name, value in body.items():
        if name == "adapters" and isinstance(value, list):
            for adapter in value:
                yield "adapter", adapter_text(adapter)
        elif name == "time" and isinstance(value, int | float):
            yield name, time_text(value)
        else:
            yield name, "–" if value is None else str(value)


def found_text(receipt: Receipt) -> Text:
    tier = receipt.body.get("tier_found")
    return Text(
        "–" if tier is None else printable(str(tier)), style="yellow" if receipt.is_cold else ""
    )


def adapters_text(body: Mapping[str, object]) -> str:
    if body.get("status") == REFUSED:
        return printable(f"{body.get('asked', '–')} refused: {body.get('http_status', '–')}")
    adapters = body.get("adapters")
    if not isinstance(adapters, list) or not adapters:
        cid = body.get("adapter_cid")
        return short_cid(cid) if isinstance(cid, str) else "base"
    return " + ".join(map(adapter_text, adapters))


def adapter_text(adapter: Mapping[str, Any]) -> str:
    cid, name, weight = str(adapter.get("cid")), adapter.get("name"), adapter.get("weight", 1.0)
    factor = "" if weight == 1 else f"{weight}*"
    if name is None:
        return printable(factor + short_cid(cid))
    alias = adapter.get("alias")
    via = f" ({alias})" if alias else ""
    version = adapter.get("version")
    path = f"{adapter.get('tenant')}/{name}" if adapter.get("tenant") else str(name)
    return printable(f"{factor}{path}{f'@{version}' if version else ''}{via}")


def milliseconds(value: object) -> str:
    return f"{value:.0f}" if isinstance(value, int | float) else "–"


def tokens_text(body: Mapping[str, object]) -> str:
    """17+5: of the prompt, and of the answer."""
    return f"{body.get('prompt_tokens', '–')}+{body.get('completion_tokens', '–')}"
