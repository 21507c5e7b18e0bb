"""Usage by day, adapter and key as rows that name the day, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta

from loramux.errors import InvalidRequest
from loramux.registry.records import DailyUsage

EPOCH = date(1970, 1, 1)
DEFAULT_DAYS = 30
COLUMNS = (
    *("day", "tenant", "api_key_id", "adapter"),
    *("requests", "prompt_tokens", "output_tokens", "reused_tokens"),
)
# A spreadsheet takes a cell with one of these beginnings for a formula.
_FORMULAS = ("=", "+", "-", "@", "\t", "\r")


def days_between(since: str | None, until: str | None) -> tuple[int, int]:
    """Return first and last day, counted from 1970; by default the last 30 days, in UTC."""
    last = _day(until, "until") if until else datetime.now(UTC).date()
    first = _day(since, "since") if since else last - timedelta(days=DEFAULT_DAYS - 1)
    if first > last:
        raise InvalidRequest(f"since is {first}, after until, {last}.", param="since")
    return (first - EPOCH).days, (last - EPOCH).days


def usage_row(usage: DailyUsage) -> dict[str, str | int]:
    values = (
        *(str(EPOCH + timedelta(days=usage.day)), usage.tenant, usage.api_key_id, usage.adapter),
        *(usage.num_requests, usage.num_prompt_tokens),
        *(usage.num_output_tokens, usage.num_reused_tokens),
    )
    return dict(zip(COLUMNS, values, strict=True))


def to_csv(found: Iterable[DailyUsage]) -> str:
    """Return rows with a heading; text that a spreadsheet would compute gets a quote."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for usage in found:
        writer.writerow({name: _cell(value) for name, value in usage_row(usage).items()})
    return text.getvalue()


def _cell(value: str | int) -> str | int:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULAS) else value


def _day(text: str, param: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise InvalidRequest(
            f"{param} must be a day such as 2026-01-31, got {text[:50]!r}.", param=param
        ) from error
