"""The contents that a router expects behind the names of a request, as a header."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from urllib.parse import quote, unquote

EXPECT_HEADER = "x-loramux-expect"
"""`name=cid|cid,name=`: percent-encoded names; a name without CIDs must not be seen."""

OTHER_CONTENT_STATUS = 412
"""The status of a server where a name means another content; it has done no work."""

Expected = Mapping[str, frozenset[str]]
"""Name -> CIDs of which one must answer; empty: the name must mean no loaded adapter."""


def expected_text(expected: Expected) -> str:
    """Return the value of the header."""
    return ",".join(
        f"{quote(name, safe='')}={'|'.join(sorted(cids))}" for name, cids in expected.items()
    )


def read_expected(values: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return the contents that all values of the header allow; raises ValueError."""
    found: dict[str, frozenset[str]] = {}
    for value in values:
        for entry in value.split(","):
            name, equals, cids = entry.strip().partition("=")
            if not name or not equals:
                raise ValueError(f"{entry[:80]!r} is not name=cid")
            allowed = frozenset(filter(None, cids.split("|")))
            known = unquote(name)
            found[known] = found.get(known, allowed) & allowed
    return found
