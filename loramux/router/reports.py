"""Residency reports at the boundary: what a router cannot use never reaches its choice."""

from __future__ import annotations

import math
import re

import msgspec

from loramux.types.replica_report import ResidencyReport
from loramux.types.residency import Tier

MAX_REPORT_BYTES = 64 * 2**20
_MAX_SECONDS = 86_400.0
_MAX_COUNT = 2**40
_REPORTS = msgspec.json.Decoder(ResidencyReport)
_KEY = re.compile(r"[0-9a-f]{16}")
_STATES = frozenset(("starting", "ready", "restarting", "draining", "stopped"))
_COUNTS = ("generation", "revision", "open", "waiting", "waiting_tokens", "slots")
_SECONDS = ("step_s", "token_s")


class UnusableReport(ValueError):
    """A report that this router does not understand."""


def is_key(text: str) -> bool:
    return _KEY.fullmatch(text) is not None


def read_report(body: bytes) -> ResidencyReport:
    """Decode a report and check its values; raises UnusableReport.

    Fields and tiers of newer servers are accepted: a faster tier than the known ones counts as the
    device.
    """
    try:
        report = _REPORTS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnusableReport(str(error)) from error
    if report.state not in _STATES:
        raise UnusableReport(f"the state {report.state[:40]!r} is unknown")
    _check_load(report)
    report.tier_s = report.tier_s[: len(Tier)]
    for key, tier in report.moves.items():
        if not is_key(key) or tier < 0:
            raise UnusableReport(f"the move of {key[:40]!r} to tier {tier} is none")
        if tier > Tier.DEVICE:
            report.moves[key] = Tier.DEVICE
    return report


def _check_load(report: ResidencyReport) -> None:
    for name in _COUNTS:
        _check_amount(name, getattr(report, name), _MAX_COUNT)
    if not -1 <= report.since <= _MAX_COUNT:
        raise UnusableReport(f"since is {report.since}")
    for name in _SECONDS:
        _check_amount(name, getattr(report, name), _MAX_SECONDS)
    _check_amount("answer_tokens", report.answer_tokens, _MAX_COUNT)
    if len(report.tier_s) < len(Tier):
        raise UnusableReport(f"tier_s has {len(report.tier_s)} of {len(Tier)} numbers")
    for number, seconds in enumerate(report.tier_s):
        _check_amount(f"tier_s[{number}]", seconds, _MAX_SECONDS)


def _check_amount(name: str, value: float, most: float) -> None:
    if not (math.isfinite(value) and 0 <= value <= most):
        raise UnusableReport(f"{name} is {value}")
