"""`loramux receipts`: list, show and verify receipts of served requests."""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from loramux.adapters.identity import CID_PREFIX, is_digest
from loramux.base.signing import make_key_files, public_key_path, read_public_key
from loramux.cli.console import printable, say, show_error
from loramux.cli.registry_options import (
    FAILED,
    DataFlag,
    JsonFlag,
    RegistryFlag,
    open_registry,
    reporting_errors,
)
from loramux.cli.registry_view import short_cid, time_text
from loramux.errors import InvalidRequest, LoramuxError
from loramux.receipts.claims import ANSWERS, PROMPTS, is_signed, replies_of
from loramux.receipts.receipt import Verdict, check
from loramux.registry.names import CidReference, NameReference
from loramux.registry.records import ReceiptFilter, StoredReceipt

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    from loramux.registry.registry import Registry

REFUSED = "refused"
TIMES = ("load_ms", "queue_ms", "ttft_ms", "latency_ms")


def receipt_table(found: Iterable[StoredReceipt]) -> Table:
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
    """Yield the fields of a receipt as text, including fields unknown to this version."""
    for name, value in body.items():
        if name == "adapters" and isinstance(value, list):
            for adapter in value:
                yield "adapter", adapter_text(adapter)
        elif name == "time" and isinstance(value, int | float):
            yield name, time_text(value)
        else:
            yield name, "–" if value is None else str(value)


def found_text(receipt: StoredReceipt) -> Text:
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
    """Prompt and completion tokens: 17+5."""
    return f"{body.get('prompt_tokens', '–')}+{body.get('completion_tokens', '–')}"


STDIN = Path("-")
MAX_RECEIPTS = 10_000
MAX_SHOWN = 20
SSE_PREFIX = "data:"
# A receipt has at least one of these fields, even a manipulated one.
RECEIPT_FIELDS = ("signature", "adapter_cid", "key_id")
REASONS = {
    Verdict.UNSIGNED: "is not signed.",
    Verdict.OTHER_KEY: "was signed with another key.",
    Verdict.CHANGED: "is not what was signed.",
    Verdict.OTHER_TOKENS: "signs other tokens than these.",
}
Found = Iterable[tuple[str, Verdict]]
Bodies = list[tuple[Mapping[str, Any], Verdict]]


def verify(  # noqa: PLR0913  (one for each flag)
    key: Annotated[Path, typer.Option(metavar="PUB", help="Public key, FILE.pub of keygen.")],
    receipt_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="One receipt of the registry.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            metavar="F",
            help="JSON file with receipts, replies or a recorded stream; - for stdin.",
        ),
    ] = None,
    is_all: Annotated[
        bool, typer.Option("--all", help="The newest 10000 receipts of the registry.")
    ] = False,
    prompt: Annotated[
        Path | None,
        typer.Option(metavar="F", help="File with the token ids of a prompt (JSON), or its text."),
    ] = None,
    answer: Annotated[
        Path | None,
        typer.Option(metavar="F", help="File with the token ids of an answer, or its text."),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="The model's folder, for texts instead of token ids."),
    ] = None,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Verify signatures, and that prompts and answers are the signed ones.

    The exit status is 0 only if this key signed every receipt unchanged. Replies in F with
    return_token_ids are compared with their receipts; --prompt and --answer with the one receipt.
    """
    with reporting_errors():
        if [receipt_id is not None, file is not None, is_all].count(True) != 1:
            raise InvalidRequest("Give an ID, --file F, or --all.")
        public_key = read_public_key(key)
        if file is not None:
            checked = check_file(file, public_key)
    if file is None:
        with open_registry(registry, data) as opened:
            checked = list(check_stored(opened, receipt_id, public_key))
    with reporting_errors():
        checked = with_claims(checked, {PROMPTS: prompt, ANSWERS: answer}, tokenizer)
    verdicts = [(str(body.get("id", "a receipt")), verdict) for body, verdict in checked]
    raise typer.Exit(show_verdicts(verdicts, Console()))


def with_claims(
    checked: Bodies, claims: Mapping[str, Path | None], tokenizer: Path | None
) -> Bodies:
    """Compare the one receipt with the files of a prompt and an answer, where given."""
    given = {name: path for name, path in claims.items() if path is not None}
    if not given:
        return checked
    if len(checked) != 1:
        raise InvalidRequest("--prompt and --answer are compared with one receipt. Give its ID.")
    codec = None
    if tokenizer is not None:
        # Imported here: it takes seconds.
        from loramux.engine.tokenizer import Tokenizer

        codec = Tokenizer(tokenizer)
    ((body, verdict),) = checked
    for name, path in given.items():
        if verdict is Verdict.VALID and not is_signed(body, name, path.read_text("utf-8"), codec):
            verdict = Verdict.OTHER_TOKENS
    return [(body, verdict)]


def check_stored(
    registry: Registry, receipt_id: str | None, key: Ed25519PublicKey
) -> Iterator[tuple[Mapping[str, Any], Verdict]]:
    """Verify one stored receipt, or all of them without an id."""
    if receipt_id is None:
        found = registry.find_receipts(ReceiptFilter(limit=MAX_RECEIPTS))
    else:
        receipt = registry.receipt(receipt_id)
        if receipt is None:
            raise LoramuxError(f"No receipt {receipt_id} is in the registry.")
        found = [receipt]
    for receipt in found:
        # The body of another receipt stored under this id would verify, too.
        is_own = receipt.body.get("id") == receipt.id
        verdict = check(receipt.body, key) if is_own else Verdict.CHANGED
        yield {**receipt.body, "id": receipt.id}, verdict


def check_file(file: Path, key: Ed25519PublicKey) -> Bodies:
    # Bytes that are not UTF-8 were never signed.
    text = sys.stdin.read() if file == STDIN else file.read_text("utf-8", errors="replace")
    values = parse_values(text)
    bodies = [body for value in values for body in find_bodies(value)]
    if not bodies:
        raise InvalidRequest(f"{file} contains no receipt.")
    checked = [(body, check(body, key)) for body in bodies]
    other = [reply.serving for reply in replies_of(values) if not reply.fits()]
    return [
        (body, Verdict.OTHER_TOKENS if verdict is Verdict.VALID and body in other else verdict)
        for body, verdict in checked
    ]


def parse_values(text: str) -> list[Any]:
    """Parse one JSON value, or one per line or per server-sent event; empty if it is no JSON."""
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
    """Print the verdicts, and return the exit status."""
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


SLOW = "--slow"
ANY_LATENCY = "0"
NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)", re.ASCII)
UNIT_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


class ReceiptsGroup(TyperGroup):
    """A command group whose --slow flag may have no value."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        return super().parse_args(ctx, with_latency(args))


def with_latency(args: list[str]) -> list[str]:
    """Replace --slow without a number by --slow 0."""
    expanded: list[str] = []
    for arg, following in zip(args, [*args, ""][1:], strict=True):
        is_bare = arg == SLOW and not NUMBER.fullmatch(following)
        expanded += [arg, ANY_LATENCY] if is_bare else [arg]
    return expanded


app = typer.Typer(cls=ReceiptsGroup, invoke_without_command=True)
app.command("verify")(verify)


@app.callback()
def receipts(  # noqa: PLR0913  (one for each flag)
    context: typer.Context,
    adapter: Annotated[
        str | None,
        typer.Option(
            metavar="REF",
            help="Only receipts of this adapter: tenant/name, tenant/name@prod or cidv1:sha256:….",
        ),
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Only requests of this tenant.")] = None,
    slow: Annotated[
        float | None,
        typer.Option(
            SLOW, min=0, metavar="[MS]", help="Slowest first, only latencies of MS or more."
        ),
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only the last 30s, 15m, 1h or 7d.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of receipts.")] = 50,
    as_json: JsonFlag = False,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """List receipts, newest first or slowest first.

    [bold]Examples[/bold]

    loramux receipts --adapter alice/refund-flagger --slow 500 --since 1h

    loramux receipts verify --all --key receipts.pem.pub
    """
    if context.invoked_subcommand is not None:
        return
    with open_registry(registry, data) as opened:
        wanted = ReceiptFilter(
            tenant=tenant,
            cids=None if adapter is None else find_cids(opened, adapter),
            since=None if since is None else time.time() - parse_duration_s(since),
            min_latency_ms=slow,
            slowest_first=slow is not None,
            limit=limit,
        )
        found = opened.find_receipts(wanted)
    if as_json:
        typer.echo(json.dumps({"receipts": [dict(receipt.body) for receipt in found]}, indent=2))
    elif found:
        Console().print(receipt_table(found))
    else:
        Console(stderr=True).print("No receipts.")


@app.command("show")
def show(
    receipt_id: Annotated[
        str, typer.Argument(metavar="ID", help="Id from the x-loramux-receipt header.")
    ],
    as_json: JsonFlag = False,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Show all fields of one receipt."""
    with open_registry(registry, data) as opened:
        receipt = opened.receipt(receipt_id)
    if receipt is None:
        message = f"No receipt {receipt_id} is in the registry; it may have expired."
        show_error(Console(stderr=True), message)
        raise typer.Exit(FAILED)
    if as_json:
        typer.echo(json.dumps({"serving": dict(receipt.body)}, indent=2))
        return
    for label, value in receipt_lines(receipt.body):
        say(Console(), f"{label:<18}", value, style="bold")


@app.command("keygen")
def keygen(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File of the private key.")],
) -> None:
    """Create a signing key: FILE for the server, FILE.pub for verification."""
    with reporting_errors():
        key_id = make_key_files(file)
    say(Console(), "Private key  ", f"{file} (keep it secret)", style="bold")
    say(Console(), "Public key   ", str(public_key_path(file)), style="bold")
    say(Console(), "Key id       ", key_id, style="bold")


def find_cids(registry: Registry, adapter: str) -> tuple[str, ...]:
    """CIDs of an adapter; a name or a full CID includes removed versions."""
    parsed = registry.parse(adapter)
    if isinstance(parsed, CidReference) and is_digest(parsed.digest_start):
        return (CID_PREFIX + parsed.digest_start,)
    if isinstance(parsed, NameReference) and parsed == NameReference(parsed.adapter):
        return tuple(sorted(registry.cids_of(adapter)))
    return tuple(choice.resolved.cid for choice in registry.route(parsed).choices)


def parse_duration_s(text: str) -> float:
    match = DURATION.fullmatch(text.strip())
    if match is None:
        raise InvalidRequest(f"{text!r} is not a duration. Write it like 30s, 15m, 1h or 7d.")
    return float(match[1]) * UNIT_S[match[2]]
