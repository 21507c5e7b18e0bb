"""The middleware that checks what each route needs of its caller."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from re import Pattern

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from loramux.errors import LoramuxError
from loramux.server.auth.caller import Authenticator, Caller, with_expected
from loramux.server.errors import ErrorShape, Forbidden, error_response
from loramux.types.routes import ROUTE_ACCESS, Access


def check_access(access: Access, caller: Caller) -> None:
    """Raise Forbidden unless the caller may use a route."""
    if not access.scopes & caller.scopes:
        needed = " or ".join(sorted(access.scopes))
        raise Forbidden(f"This route needs a key with the scope {needed}.")
    if access.is_for_operators and not caller.is_operator:
        raise Forbidden("This route needs a key that is not bound to a tenant.")


class UnlistedRoute(Exception):
    """A route of the application has no entry in ROUTE_ACCESS."""


@dataclass(frozen=True, slots=True)
class _Entry:
    access: Access
    shape: ErrorShape


class RouteTable:
    """Finds the access of a request as the router finds its route."""

    def __init__(
        self,
        routes: Iterable[Route],
        shapes: Mapping[str, ErrorShape],
    ) -> None:
        """`shapes`: the shape of errors by method and path; the own API's for all others.

        Raises UnlistedRoute, so that a route without an entry ends the start of the server.
        """
        self._exact: dict[tuple[str, str], _Entry] = {}
        self._patterns: list[tuple[str, Pattern[str], _Entry]] = []
        for route in routes:
            for method in sorted(route.methods or ()):
                self._add(method, route, shapes)

    def find(self, method: str, path: str) -> _Entry | None:
        found = self._exact.get((method, path))
        if found is not None:
            return found
        return next(
            (
                entry
                for wanted, pattern, entry in self._patterns
                if wanted == method and pattern.match(path)
            ),
            None,
        )

    def _add(self, method: str, route: Route, shapes: Mapping[str, ErrorShape]) -> None:
        key = f"{method} {route.path}"
        listed = key if key in ROUTE_ACCESS or method != "HEAD" else f"GET {route.path}"
        if listed not in ROUTE_ACCESS:
            raise UnlistedRoute(f"{key} has no entry in ROUTE_ACCESS.")
        entry = _Entry(ROUTE_ACCESS[listed], shapes.get(listed, error_response))
        if "{" in route.path:
            self._patterns.append((method, route.path_regex, entry))
        elif self.find(method, route.path) is None:
            # The router takes the first route that matches.
            self._exact[method, route.path] = entry


class CallerMiddleware:
    """Puts the caller of every HTTP request into its state, and checks what the route needs."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator, table: RouteTable) -> None:
        self._app = app
        self._authenticator = authenticator
        self._table = table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            entry = self._table.find(scope["method"], scope["path"])
            try:
                await self._admit(scope, None if entry is None else entry.access)
            except (LoramuxError, HTTPException) as error:
                missing = scope["app"].state.missing
                shape = missing.shape_of(scope["path"]) if entry is None else entry.shape
                if isinstance(error, HTTPException):
                    error = missing.explain(scope, error)
                await shape(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _admit(self, scope: Scope, access: Access | None) -> None:
        state = scope.setdefault("state", {})
        try:
            http = HTTPConnection(scope)
            caller = await self._authenticator.caller(http)
            caller = state["caller"] = with_expected(caller, http.headers)
        except LoramuxError as error:
            if access is None or access.scopes:
                raise
            # Raised by caller_of: open routes answer all the same.
            state["caller"] = error
            return
        if access is None and not caller.is_operator:
            # What is not in the table does not exist for a key of a tenant.
            raise HTTPException(404)
        if access is not None and access.scopes:
            check_access(access, caller)
