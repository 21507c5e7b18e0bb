"""Resolution without a query: routes are kept until their adapter changes."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable

from loramux.registry.names import AdapterName, Reference
from loramux.registry.records import Resolved
from loramux.registry.registry import Registry
from loramux.registry.resolve import Route

MAX_ROUTES = 100_000


class RouteCache:
    """Whoever watches the registry calls forget() with what changed. Misses are not kept."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._routes: dict[Reference, Route] = {}
        self._num_changes = 0
        self._lock = threading.Lock()

    def resolve(
        self, reference: str, *, sticky_key: str | None = None, home_tenant: str | None = None
    ) -> Resolved:
        route = self._route(self._registry.parse(reference, home_tenant=home_tenant))
        return route.choose(secrets.token_hex(16) if sticky_key is None else sticky_key)

    def peek(self, reference: Reference) -> Route | None:
        """Without a query."""
        return self._routes.get(reference)

    def forget(self, adapters: Iterable[AdapterName]) -> None:
        changed = set(adapters)
        with self._lock:
            self._num_changes += 1
            # A content id has no adapter: any change may end it, or make its prefix ambiguous.
            self._routes = {
                reference: route
                for reference, route in self._routes.items()
                if route.adapter is not None and route.adapter not in changed
            }

    def _route(self, reference: Reference) -> Route:
        route = self._routes.get(reference)
        if route is not None:
            return route
        before = self._num_changes
        route = self._registry.route(reference)
        with self._lock:
            # What was read before a change must not outlive it.
            if before == self._num_changes and len(self._routes) < MAX_ROUTES:
                self._routes[reference] = route
        return route
