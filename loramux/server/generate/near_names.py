"""What to say of a name that means no adapter: names like it, and that it was unloaded.

A caller reads of names in its own view alone.
"""

from __future__ import annotations

import asyncio
import difflib
import os.path
from collections.abc import Iterable
from datetime import UTC, datetime

from loramux.base.threads import QUERIES
from loramux.server.context import HostContext
from loramux.server.naming.view import View

MAX_LISTED = 1000
"""Adapters of the registry in a list of models; requests may name the others too."""
MAX_NAMES = 10_000
"""Names that are compared with the one of a request."""
MAX_CHARACTERS = 200
MAX_SHOWN = 3
_MAX_LOOSE = 200
"""Names among which also those are found that differ in several places."""


async def hint_for(context: HostContext, view: View, text: str) -> str:
    """Return sentences for an error message, each with a space before it; empty: there are none."""
    hints = []
    unloaded_s = context.names.unloaded_s(text) if view.sees_given(text) else None
    if unloaded_s is not None:
        when = datetime.fromtimestamp(unloaded_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        hints.append(f" It was unloaded at {when}: load it again.")
    if len(text) <= MAX_CHARACTERS:
        known = await _known(context, view)
        near = await asyncio.to_thread(nearest, text, known)
        if near:
            hints.append(f" Did you mean {' or '.join(near)}?")
    return "".join(hints)


def nearest(text: str, known: Iterable[str]) -> list[str]:
    """Return the names that are one slip away or equal but for their tenant, version or case.

    Among few names, also those that are alike.
    """
    known = list(dict.fromkeys(known))
    plain = _plain(text)
    found = [name for name in known if name != text and _is_near(plain, _plain(name))]
    if not found and len(known) <= _MAX_LOOSE:
        found = difflib.get_close_matches(text, known, n=MAX_SHOWN)
    return found[:MAX_SHOWN]


async def _known(context: HostContext, view: View) -> list[str]:
    names = list(context.base_names) if view.caller.may_use_base else []
    for given in context.names.given()[:MAX_NAMES]:
        if view.sees_given(given.name):
            names.append(given.name)
    if context.registry is not None:
        found = await QUERIES.run(context.registry.names_in, view, limit=MAX_LISTED)
        names += [str(adapter) for adapter in found]
    return names


def _plain(name: str) -> str:
    """Return the last part of a name, without version or tag, in lower case."""
    return name.rpartition("/")[2].partition("@")[0].partition(":")[0].lower()


def _is_near(one: str, other: str) -> bool:
    """Whether two texts are equal, or one letter was changed, left out, added or swapped."""
    longest = max(len(one), len(other))
    if longest - min(len(one), len(other)) > 1:
        return False
    if one == other:
        return bool(one)
    start = len(os.path.commonprefix((one, other)))
    end = len(os.path.commonprefix((one[start:][::-1], other[start:][::-1])))
    left, right = one[start : len(one) - end], other[start : len(other) - end]
    is_swapped = len(left) == 2 and left == right[::-1]
    return longest > 2 and (max(len(left), len(right)) <= 1 or is_swapped)
