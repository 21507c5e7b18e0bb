"""The table of all routes: finds the route of a request, and calls its handler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from re import Pattern

import msgspec
from starlette.datastructures import URL
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response
from starlette.routing import Router, compile_path
from starlette.types import Receive, Scope, Send

from loramux.errors import InvalidRequest
from loramux.server.errors import METHOD_NOT_ALLOWED, ErrorShape
from loramux.server.http.body import read_body, yield_after
from loramux.server.http.call import Call, facts_of
from loramux.server.http.routes import OWN, Route
from loramux.types.routes import ROUTE_ACCESS, Access


class UnlistedRoute(Exception):
    """A route of the application has no entry in ROUTE_ACCESS."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The routes of one path and method: of several APIs, the body tells which one is meant."""

    routes: Sequence[Route]
    access: Access

    @property
    def shape(self) -> ErrorShape:
        """The shape of errors before a body is read."""
        return self.routes[0].shape

    async def answer(self, call: Call, max_bytes: int) -> Response:
        route: Route | None = self.routes[0]
        if len(self.routes) == 1:
            call.facts.shape = self.routes[0].shape
        # Other servers' handlers find the body read.
        if call.method == "POST" and any(one.family != OWN for one in self.routes):
            any_type = any(one.any_type for one in self.routes)
            call.facts.body = await read_body(call, max_bytes, any_type=any_type)
            route = await self._recognise(call.facts.body)
        if route is None:
            keys = sorted(key for one in self.routes for key in one.keys)
            raise InvalidRequest(f"The body has none of {', '.join(keys)}.", param=keys[0])
        call.facts.shape = route.shape
        return await route.handler(call)

    async def _recognise(self, body: bytes) -> Route | None:
        rest = next((one for one in self.routes if not one.keys), None)
        if len(self.routes) == 1 and rest is not None:
            return rest
        try:
            given = msgspec.json.decode(body, type=dict[str, msgspec.Raw]).keys()
        except (ValueError, RecursionError):
            return rest
        await yield_after(len(body))
        return next((one for one in self.routes if one.keys & given), rest)


class RouteTable:
    """Finds routes by method and path; of several patterns, the first that matches."""

    def __init__(self, routes: Iterable[Route]) -> None:
        """Raise UnlistedRoute, so that a route without an entry ends the start of the server."""
        self.routes = tuple(routes)
        self._exact: dict[tuple[str, str], Entry] = {}
        self._patterns: list[tuple[str, Pattern[str], Entry]] = []
        groups: defaultdict[tuple[str, str], list[Route]] = defaultdict(list)
        for route in self.routes:
            for method in methods_of(route):
                groups[method, route.path].append(route)
        for (method, path), group in groups.items():
            self._add(method, path, group)

    def find(self, method: str, path: str) -> Entry | None:
        found = self._exact.get((method, path))
        return self._match(method, path)[0] if found is None else found

    def parameters(self, method: str, path: str) -> dict[str, str]:
        """Return the parts of a path that its pattern names."""
        if (method, path) in self._exact:
            return {}
        return self._match(method, path)[1]

    def methods(self, path: str) -> list[str]:
        """Return the methods of all routes that match the path."""
        exact = {method for method, known in self._exact if known == path}
        patterns = {method for method, pattern, _ in self._patterns if pattern.match(path)}
        return sorted(exact | patterns)

    def _match(self, method: str, path: str) -> tuple[Entry | None, dict[str, str]]:
        for wanted, pattern, entry in self._patterns:
            if wanted == method and (found := pattern.match(path)):
                return entry, found.groupdict()
        return None, {}

    def _add(self, method: str, path: str, group: Sequence[Route]) -> None:
        key = f"{method} {path}"
        listed = key if key in ROUTE_ACCESS or method != "HEAD" else f"GET {path}"
        if listed not in ROUTE_ACCESS:
            raise UnlistedRoute(f"{key} has no entry in ROUTE_ACCESS.")
        entry = Entry(group, ROUTE_ACCESS[listed])
        if "{" in path:
            self._patterns.append((method, compile_path(path)[0], entry))
        elif self.find(method, path) is None:
            self._exact[method, path] = entry


def methods_of(route: Route) -> tuple[str, ...]:
    """Return the methods of a route; other servers answer HEAD where they answer GET."""
    adds_head = route.family != OWN and "GET" in route.methods and "HEAD" not in route.methods
    return (*route.methods, "HEAD") if adds_head else route.methods


class TableRouter(Router):
    """Calls the handler of the entry that middleware has found."""

    def __init__(self, table: RouteTable, max_bytes: int) -> None:
        """`max_bytes`: the maximum size of a body."""
        super().__init__()
        self._table = table
        self._max_bytes = max_bytes

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().app(scope, receive, send)
            return
        entry = facts_of(scope).entry
        if entry is None:
            await self._missing(scope)(scope, receive, send)
            return
        scope["path_params"] = self._table.parameters(scope["method"], scope["path"])
        call = Call(scope, receive, send)
        response = await entry.answer(call, self._max_bytes)
        await response(scope, receive, send)

    def _missing(self, scope: Scope) -> Response:
        path = scope["path"]
        if self._table.methods(path):
            raise HTTPException(METHOD_NOT_ALLOWED)
        other = path.rstrip("/") if path.endswith("/") else f"{path}/"
        if path != "/" and self._table.methods(other):
            return RedirectResponse(str(URL(scope={**scope, "path": other})))
        raise HTTPException(404)
