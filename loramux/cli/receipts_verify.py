"""`loramux receipts verify`: were these receipts signed by the key's owner, as they are?"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from loramux.cli.doctor_view import say
from loramux.cli.registry_options import (
    FAILED,
    DataFlag,
    RegistryFlag,
    open_registry,
    reporting_errors,
)
from loramux.errors import InvalidRequest, LoramuxError
from loramux.receipts.receipt import Verdict, check
from loramux.receipts.signing import read_public_key
from loramux.registry.records import ReceiptFilter

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    from loramux.registry.registry import Registry

STDIN = Path("-")
MAX_RECEIPTS = 10_000
MAX_SHOWN = 20
SSE_PREFIX = "data:"
# A body has at least one of these, even where somebody changed it.
RECEIPT_FIELDS = ("signature", "adapter_cid", "key_id")
REASONS = {
    Verdict.UNSIGNED: "is not signed.",
    Verdict.OTHER_KEY: "was signed with another key.",
    Verdict.CHANGED: "is not what was signed.",
}
Found = Iterable[tuple[str, Verdict]]


def verify(
    key: Annotated[Path, typer.Option(metavar="PUB", help="Public key, FILE.pub of keygen.")],
    receipt_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="One receipt of the registry.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            metavar="F",
            help="Receipts, answers of the server or a recorded stream, in JSON; - for stdin.",
        ),
    ] = None,
    is_all: Annotated[
        bool, typer.Option("--all", help="Those in the registry, the newest 10000.")
    ] = False,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Check signatures. Exit status 0 only if every receipt is signed by this key, unchanged."""
    with reporting_errors():
        if [receipt_id is not None, file is not None, is_all].count(True) != 1:
            raise InvalidRequest("Say what to verify: an ID, --file F, or --all.")
        public_key = read_public_key(key)
        if file is not None:
            raise typer.Exit(show_verdicts(check_file(file, public_key), Console()))
    with open_registry(registry, data) as opened:
        verdicts = list(check_stored(opened, receipt_id, public_key))
    raise typer.Exit(show_verdicts(verdicts, Console()))


def check_stored(
    registry: Registry, receipt_id: str | None, key: Ed25519PublicKey
) -> Iterator[tuple[str, Verdict]]:
    """No id: all."""
    if receipt_id is None:
        found = registry.find_receipts(ReceiptFilter(limit=MAX_RECEIPTS))
    else:
        receipt = registry.receipt(receipt_id)
        if receipt is None:
            raise LoramuxError(f"No receipt {receipt_id} is in the registry.")
        found = [receipt]
    for receipt in found:
        # Another receipt's body under this id would verify by itself.
        is_own = receipt.body.get("id") == receipt.id
        yield receipt.id, check(receipt.body, key) if is_own else Verdict.CHANGED


def check_file(file: Path, key: Ed25519PublicKey) -> list[tuple[str, Verdict]]:
    # What is no UTF-8 was never signed.
    text = sys.stdin.read() if file == STDIN else file.read_text("utf-8", errors="replace")
    bodies = [body for value in parse_values(text) for body in find_bodies(value)]
    if not bodies:
        raise InvalidRequest(f"{file} holds no receipt.")
    return [(str(body.get("id", "a receipt")), check(body, key)) for body in bodies]


def parse_values(text: str) -> list[Any]:
    """One JSON value; or one a line, also as a stream of events. Empty: it is no JSON."""
    try:
        return [json.loads(text)]
    except (ValueError, RecursionError):
        lines = [line.strip().removeprefix(SSE_PREFIX).strip() for line in text.splitlines()]
    try:
        return [json.loads(line) for line in lines if line.startswith("{")]
    except (ValueError, RecursionError):
        return []


def find_bodies(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, list):
        for item in value:
            yield from find_bodies(item)
    elif isinstance(value, dict):
        if any(name in value for name in RECEIPT_FIELDS):
            yield value
            return
        for name in ("serving", "receipts", "data"):
            if isinstance(value.get(name), dict | list):
                yield from find_bodies(value[name])


def show_verdicts(verdicts: Found, console: Console) -> int:
    """The exit status."""
    counts: Counter[Verdict] = Counter()
    for receipt_id, verdict in verdicts:
        counts[verdict] += 1
        num_bad = counts.total() - counts[Verdict.VALID]
        if verdict is not Verdict.VALID and num_bad <= MAX_SHOWN:
            say(console, f"{receipt_id} ", REASONS[verdict], style="bold red")
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])
    is_sound = counts.total() == counts[Verdict.VALID]
    say(console, "Verified " if is_sound else "FAILED   ", summary or "none", style="bold")
    return 0 if is_sound else FAILED
