"""Routes of every API: path, handler, errors, and the description in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.responses import Response

from loramux.server.errors import ErrorShape, error_response
from loramux.server.http.call import Call

Handler = Callable[[Call], Awaitable[Response]]
HandlerT = TypeVar("HandlerT", bound=Handler)
OWN = "loramux"
Operation = dict[str, Any]
"""Body, replies and parameters of a route, as the OpenAPI document has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One path of an API. Its scopes are in `types/routes.py`, which routers read too."""

    path: str
    handler: Handler
    methods: tuple[str, ...] = ("POST",)
    family: str = OWN
    """The API: our own one, or another server's."""
    name: str = ""
    """The id of the operation."""
    tag: str = ""
    operation: Operation | None = None
    """None: the document does not have the route, or its family describes it."""
    keys: frozenset[str] = frozenset()
    """Fields by one of which a body is recognised; empty: of several APIs on a path, the one that
    takes all other bodies."""
    shape: ErrorShape = error_response
    any_type: bool = False
    """Bodies are read as JSON whatever their Content-Type says."""


@dataclass(slots=True)
class Routes:
    """Collects the routes of one module."""

    tag: str = ""
    prefix: str = ""
    shape: ErrorShape = error_response
    found: list[Route] = field(default_factory=list)

    def get(self, path: str, operation: Operation | None = None) -> Callable[[HandlerT], HandlerT]:
        return self.on(path, "GET", operation=operation)

    def post(self, path: str, operation: Operation | None = None) -> Callable[[HandlerT], HandlerT]:
        return self.on(path, "POST", operation=operation)

    def delete(
        self, path: str, operation: Operation | None = None
    ) -> Callable[[HandlerT], HandlerT]:
        return self.on(path, "DELETE", operation=operation)

    def on(
        self, path: str, *methods: str, operation: Operation | None = None
    ) -> Callable[[HandlerT], HandlerT]:
        """Add the decorated handler."""

        def add(handler: HandlerT) -> HandlerT:
            self.add(path, handler, *methods, operation=operation)
            return handler

        return add

    def add(
        self,
        path: str,
        handler: Handler,
        *methods: str,
        operation: Operation | None = None,
        name: str = "",
    ) -> None:
        """Add a handler; without a name, the operation has that of the handler."""
        route = Route(
            path=self.prefix + path,
            handler=handler,
            methods=methods,
            name=name or getattr(handler, "__name__", ""),
            tag=self.tag,
            operation=operation,
            shape=self.shape,
        )
        self.found.append(route)
