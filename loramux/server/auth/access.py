"""The middleware that checks what each route needs of its caller."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from loramux.errors import LoramuxError
from loramux.server.auth.authentication import Authenticator, with_expected
from loramux.server.errors import Forbidden
from loramux.server.http.call import CallFacts, facts_of
from loramux.server.http.error_handlers import MissingRoutes
from loramux.server.http.table import RouteTable
from loramux.types.caller import Caller
from loramux.types.routes import Access


def check_access(access: Access, caller: Caller) -> None:
    """Raise Forbidden unless the caller may use a route."""
    if not access.scopes & caller.scopes:
        needed = " or ".join(sorted(access.scopes))
        raise Forbidden(f"This route needs a key with the scope {needed}.")
    if access.is_for_operators and not caller.is_operator:
        raise Forbidden("This route needs a key that is not bound to a tenant.")


class CallerMiddleware:
    """Finds the route and the caller of every HTTP request, and checks what the route needs."""

    def __init__(
        self,
        app: ASGIApp,
        authenticator: Authenticator,
        table: RouteTable,
        missing: MissingRoutes,
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._table = table
        self._missing = missing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            facts = facts_of(scope)
            entry = facts.entry = self._table.find(scope["method"], scope["path"])
            try:
                await self._admit(scope, facts, None if entry is None else entry.access)
            except (LoramuxError, HTTPException) as error:
                missing = self._missing
                shape = missing.shape_of(scope["path"]) if entry is None else entry.shape
                if isinstance(error, HTTPException):
                    error = missing.explain(scope, error)
                await shape(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _admit(self, scope: Scope, facts: CallFacts, access: Access | None) -> None:
        try:
            http = HTTPConnection(scope)
            caller = with_expected(await self._authenticator.caller(http), http.headers)
            facts.caller = caller
        except LoramuxError as error:
            if access is None or access.scopes:
                raise
            # Raised by Call.caller: open routes answer all the same.
            facts.caller = error
            return
        if access is None and not caller.is_operator:
            # What is not in the table does not exist for a key of a tenant.
            raise HTTPException(404)
        if access is not None and access.scopes:
            check_access(access, caller)
