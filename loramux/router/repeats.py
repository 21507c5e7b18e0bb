"""Which requests may be tried again on another replica, and how often."""

from __future__ import annotations

import re
from functools import lru_cache

from loramux.types.access import KeyScope
from loramux.types.routes import ROUTE_ACCESS, UNSAFE_GETS

MAX_TRIES = 3
BUDGET_SHARE = 0.2
"""Tries beyond the first, as a share of requests."""
_RESERVE, _MAX_SAVED = 20.0, 200.0


def _pattern(path: str) -> re.Pattern[str]:
    parts = re.split(r"(\{[^}]*\})", path)
    found = [
        (".+" if ":path" in part else "[^/]+") if part.startswith("{") else re.escape(part)
        for part in parts
    ]
    return re.compile("".join(found))


def _inference_routes() -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    infer = frozenset({KeyScope.INFER})
    paths = [
        route.partition(" ")[2]
        for route, access in ROUTE_ACCESS.items()
        if route.startswith("POST ") and access.scopes == infer
    ]
    exact = frozenset(path for path in paths if "{" not in path)
    return exact, tuple(_pattern(path) for path in paths if "{" in path)


_EXACT, _PATTERNS = _inference_routes()
# A pattern of inference may match the path of a route that changes something.
_OTHERS = frozenset(
    route.partition(" ")[2]
    for route, access in ROUTE_ACCESS.items()
    if route.startswith("POST ") and access.scopes != frozenset({KeyScope.INFER})
)


@lru_cache(maxsize=4096)
def is_inference(method: str, path: str) -> bool:
    """Whether the table of routes has a route of the scope infer for it."""
    if method != "POST":
        return False
    if path in _EXACT:
        return True
    return path not in _OTHERS and any(one.fullmatch(path) for one in _PATTERNS)


def is_repeatable(method: str, path: str) -> bool:
    """Whether a second execution has no effect beside its answer: inference, and safe GETs."""
    if method in ("GET", "HEAD"):
        return not path.endswith(UNSAFE_GETS)
    return is_inference(method, path)


class RetryBudget:
    """Tries beyond the first: a share of the requests, saved up to a limit.

    It keeps a fleet that refuses everything from getting each request several times.
    """

    def __init__(self) -> None:
        self._saved = _RESERVE

    def request(self) -> None:
        self._saved = min(_MAX_SAVED, self._saved + BUDGET_SHARE)

    def take(self) -> bool:
        if self._saved < 1:
            return False
        self._saved -= 1
        return True
