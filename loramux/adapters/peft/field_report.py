"""Says of each field of an adapter's config whether it is honoured, harmless or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from loramux.adapters.peft.fields import HARMLESS, HONOURED, NOTHING_LISTED, REFUSED

FieldStatus = Literal["honoured", "harmless", "refused"]


@dataclass(frozen=True, slots=True)
class FieldReport:
    name: str
    status: FieldStatus
    value: object
    note: str = ""
    """Why the field is harmless, or what it would change."""


def report_fields(fields: Mapping[str, object], *, is_served: bool) -> tuple[FieldReport, ...]:
    """Return one entry for each field, by name.

    `is_served`: the adapter passed all checks, so that no field of it is refused.
    """
    return tuple(
        FieldReport(name, *_classify(name, fields[name], is_served=is_served))
        for name in sorted(fields)
    )


def _classify(name: str, value: object, *, is_served: bool) -> tuple[FieldStatus, object, str]:
    if name in HONOURED:
        return "honoured", value, ""
    if name in HARMLESS:
        return "harmless", value, HARMLESS[name]
    known = REFUSED.get(name)
    is_neutral = known.is_neutral(value) if known else value in NOTHING_LISTED
    if is_neutral and (known or is_served):
        return "harmless", value, "is off"
    if is_served:
        return "honoured", value, ""
    return "refused", value, known.effect if known else "is no field of PEFT's LoraConfig"
