"""The scopes that each route needs, and the middleware that checks them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from re import Pattern

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from loramux.errors import LoramuxError
from loramux.server.caller import Authenticator, Caller
from loramux.server.errors import ErrorShape, Forbidden, error_response
from loramux.types.access import ALL_SCOPES, KeyScope
from loramux.types.modality import Modality


@dataclass(frozen=True, slots=True)
class Access:
    """What a route needs of its caller."""

    scopes: frozenset[KeyScope]
    """One of these; empty: the route is open to requests without a key."""
    is_for_operators: bool = False
    """The route changes what all tenants share, or shows it: not for keys of one tenant."""
    modality: Modality | None = None
    """The model that the route needs; None: it answers for every model."""

    def check(self, caller: Caller) -> None:
        """Raises Forbidden unless the caller may use the route."""
        if not self.scopes & caller.scopes:
            needed = " or ".join(sorted(self.scopes))
            raise Forbidden(f"This route needs a key with the scope {needed}.")
        if self.is_for_operators and not caller.is_operator:
            raise Forbidden("This route needs a key that is not bound to a tenant.")


OPEN = Access(frozenset())
ANY = Access(ALL_SCOPES)
INFER = Access(frozenset({KeyScope.INFER}))
PUSH = Access(frozenset({KeyScope.PUSH, KeyScope.ADMIN}))
ADMIN = Access(frozenset({KeyScope.ADMIN}))
METRICS = Access(frozenset({KeyScope.METRICS, KeyScope.ADMIN}))
RECEIPTS = Access(frozenset({KeyScope.RECEIPTS, KeyScope.ADMIN}))
OPERATOR = Access(frozenset({KeyScope.ADMIN}), is_for_operators=True)
ENGINE = Access(frozenset({KeyScope.METRICS, KeyScope.ADMIN}), is_for_operators=True)

_SHARED: Mapping[str, Access] = {
    # Documentation of the API
    "GET /docs": OPEN,
    "GET /docs/oauth2-redirect": OPEN,
    "GET /openapi.json": OPEN,
    "GET /redoc": OPEN,
    # Status
    "GET /": OPEN,
    "GET /health": OPEN,
    "HEAD /health": OPEN,
    "POST /health": OPEN,
    "GET /ping": OPEN,
    "HEAD /ping": OPEN,
    "POST /ping": OPEN,
    "GET /live": OPEN,
    "HEAD /live": OPEN,
    "GET /version": OPEN,
    "GET /metrics": METRICS,
    "GET /v1/stats": ENGINE,
    "GET /v1/residency": ENGINE,
    "GET /v1/live": ENGINE,
    "GET /v1/caller": ANY,
    # The web page, whose files have no data
    "GET /ui": OPEN,
    "GET /ui/{path:path}": OPEN,
    # Models
    "GET /v1/models": ANY,
    "GET /v1/models/{model_id:path}": ANY,
    # Adapters and receipts
    "GET /v1/adapters": ANY,
    "GET /v1/adapters/{name:path}": ANY,
    "GET /v1/doctor/{name:path}": OPERATOR,
    "POST /v1/adapters": PUSH,
    "DELETE /v1/adapters/{name:path}": PUSH,
    "POST /v1/adapters/{name:path}/promote": PUSH,
    "POST /v1/adapters/{name:path}/rollback": PUSH,
    "POST /v1/adapters/{name:path}/split": PUSH,
    "POST /v1/adapters/{name:path}/pin": ADMIN,
    "DELETE /v1/adapters/{name:path}/pin": ADMIN,
    "POST /v1/adapters/{name:path}/warm": PUSH,
    "POST /v1/load_lora_adapter": OPERATOR,
    "POST /v1/unload_lora_adapter": OPERATOR,
    "DELETE /v1/unload_lora_adapter": OPERATOR,
    "GET /v1/receipts": RECEIPTS,
    "GET /v1/receipts/key": ANY,
    "GET /v1/usage": METRICS,
    "GET /v1/audit": OPERATOR,
    "GET /v1/keys": ADMIN,
    "POST /v1/keys": ADMIN,
    "DELETE /v1/keys/{key_id}": ADMIN,
    "POST /v1/keys/{key_id}/rotate": ADMIN,
    "GET /v1/receipts/{receipt_id}": RECEIPTS,
}
_TEXT: Mapping[str, Access] = {
    "POST /v1/chat/completions": INFER,
    "POST /v1/completions": INFER,
    "POST /v1/embeddings": INFER,
    "POST /pooling": INFER,
    "POST /score": INFER,
    "POST /v1/score": INFER,
    "POST /rerank": INFER,
    "POST /v1/rerank": INFER,
    "POST /v2/rerank": INFER,
    "POST /classify": INFER,
    "POST /v1/run": INFER,
    "POST /tokenize": INFER,
    "POST /detokenize": INFER,
    "GET /tokenizer_info": INFER,
    "POST /v1/adapters/plan": ENGINE,
    # Other servers' APIs
    "POST /v1/messages": INFER,
    "POST /v1/messages/count_tokens": INFER,
    "POST /v1/responses": INFER,
    "POST /": INFER,
    "POST /generate": INFER,
    "POST /generate_stream": INFER,
    "POST /embed": INFER,
    "GET /info": ANY,
    "GET /startup": INFER,
    "GET /get_model_info": ANY,
    "GET /model_info": ANY,
    "GET /health_generate": INFER,
    "GET /flush_cache": ADMIN,
    "POST /flush_cache": ADMIN,
    "POST /reset_prefix_cache": ADMIN,
    "GET /get_server_info": ENGINE,
    "GET /server_info": ENGINE,
    "GET /load": ENGINE,
    "POST /load_lora_adapter": OPERATOR,
    "POST /unload_lora_adapter": OPERATOR,
    "POST /invocations": INFER,
    "POST /adapters": OPERATOR,
    "DELETE /adapters/{name:path}": OPERATOR,
    "POST /completion": INFER,
    "POST /completions": INFER,
    "POST /chat/completions": INFER,
    "GET /models": ANY,
    "GET /lora-adapters": ANY,
    "POST /lora-adapters": OPERATOR,
    "GET /props": ANY,
    "GET /v1/health": OPEN,
    "POST /api/chat": INFER,
    "POST /api/generate": INFER,
    "POST /api/embed": INFER,
    "POST /api/embeddings": INFER,
    "GET /api/tags": ANY,
    "GET /api/ps": ANY,
    "POST /api/show": ANY,
    "GET /api/version": OPEN,
}
_IMAGES: Mapping[str, Access] = {
    "POST /v1/images/generations": INFER,
    "POST /v1/images/edits": INFER,
    # A1111's
    "POST /sdapi/v1/txt2img": INFER,
    "POST /sdapi/v1/img2img": INFER,
    "GET /sdapi/v1/progress": INFER,
    "GET /sdapi/v1/loras": ANY,
    "GET /sdapi/v1/sd-models": ANY,
    "GET /sdapi/v1/samplers": ANY,
    "GET /sdapi/v1/schedulers": ANY,
    "GET /sdapi/v1/options": ANY,
    "POST /sdapi/v1/options": ANY,
    # sheaf's; these match every name, and stand last
    "GET /{name}/health": OPEN,
    "GET /{name}/ready": OPEN,
    "POST /{name}/predict": INFER,
    "POST /{name}/stream": INFER,
}
ROUTE_ACCESS: Mapping[str, Access] = {
    **_SHARED,
    **{route: replace(access, modality="text") for route, access in _TEXT.items()},
    **{route: replace(access, modality="image") for route, access in _IMAGES.items()},
}
"""By method and path. GET includes HEAD."""


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
                shape = error_response if entry is None else entry.shape
                await shape(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _admit(self, scope: Scope, access: Access | None) -> None:
        state = scope.setdefault("state", {})
        try:
            caller = state["caller"] = await self._authenticator.caller(HTTPConnection(scope))
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
            access.check(caller)
