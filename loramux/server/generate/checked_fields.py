"""Checks the fields of bodies that a route does not have, and warns of those that no API has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from loramux.errors import InvalidRequest
from loramux.server.context import HostContext
from loramux.server.generate.foreign_fields import UnsupportedFields, unsupported_in
from loramux.server.http.body import decode, read_body
from loramux.server.http.call import Call

BodyT = TypeVar("BodyT", bound=msgspec.Struct)

MAX_NAMED = 8
"""Unknown fields that a warning names."""
MAX_NAME_CHARACTERS = 64


async def read_fields(
    context: HostContext, http: Call, kind: type[BodyT], *, generates: bool = True
) -> BodyT:
    """Decode the body; refuses fields that would change the answer and are not known."""
    raw = await read_body(http, context.options.max_body_bytes)
    http.facts.body = raw
    body = decode(raw, kind)
    check_fields(context, http, kind, raw, generates=generates)
    return body


def read_inner(
    context: HostContext,
    http: Call,
    place: str,
    fields: Mapping[str, Any] | None,
    kind: type[BodyT],
) -> BodyT:
    """Decode the object in the field `place` of a body, under the rules of the body itself."""
    raw = msgspec.json.encode(fields or {})
    check_fields(context, http, kind, raw, place=place)
    return decode(raw, kind)


def check_fields(  # noqa: PLR0913  (what differs between the routes)
    context: HostContext,
    http: Call,
    kind: type[msgspec.Struct],
    raw: bytes,
    *,
    generates: bool = True,
    num_choices: int = 1,
    place: str = "",
) -> None:
    """Raise InvalidRequest for a field that must not be ignored; what becomes of unknown fields is
    a setting.

    `place`: the field of the body that the bytes are.
    """
    table = unsupported_in(kind, generates=generates)
    unknown = table.check(raw, num_choices=num_choices)
    if not unknown or context.options.unknown_fields == "ignore":
        return
    inside = f"{place}." if place else ""
    if context.options.unknown_fields == "refuse":
        raise _refusal(table, unknown[0], inside)
    shown = ", ".join(inside + name[:MAX_NAME_CHARACTERS] for name in unknown[:MAX_NAMED])
    rest = len(unknown) - MAX_NAMED
    more = f" and {rest} more" if rest > 0 else ""
    http.warn(f"unknown fields were ignored: {shown}{more}")


def _refusal(table: UnsupportedFields, name: str, inside: str) -> InvalidRequest:
    near = [f"{inside}{one}" for one in table.nearest(name)]
    shown = f"{inside}{name[:MAX_NAME_CHARACTERS]}"
    hint = f"Did you mean {' or '.join(near)}?" if near else "Leave it out."
    return InvalidRequest(f"{shown} is no field of this route. {hint}", param=shown)
