"""Endpoints of other servers' APIs: a path may be shared by several, told apart by a field."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loramux.errors import InvalidRequest
from loramux.server.errors import ErrorShape, error_response, set_error_shape
from loramux.server.http.body import keep_body, read_body, yield_after

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One path of another server's API."""

    family: str
    path: str
    handler: Handler
    methods: tuple[str, ...] = ("POST",)
    keys: frozenset[str] = frozenset()
    """Fields by one of which a body is recognised; empty: no other family has this path."""
    shape: ErrorShape = error_response
    any_type: bool = False
    """Bodies are read as JSON whatever their Content-Type says."""


KeyedEndpoints = Mapping[str, Sequence[Endpoint]]
"""The endpoints of paths that the server's own API has too."""


def routes_of(endpoints: Iterable[Endpoint], max_bytes: int) -> list[Route]:
    """Returns one route per path and method."""
    groups: defaultdict[tuple[str, str], list[Endpoint]] = defaultdict(list)
    for endpoint in endpoints:
        for method in endpoint.methods:
            groups[endpoint.path, method].append(endpoint)
    return [
        Route(
            path,
            partial(_answer, group, max_bytes),
            methods=[method],
            name=f"{method} {path}",
            include_in_schema=False,
        )
        for (path, method), group in groups.items()
    ]


def shapes_of(endpoints: Iterable[Endpoint]) -> dict[str, ErrorShape]:
    """Returns the shape of errors by method and path; of several families on a path the first."""
    shapes: dict[str, ErrorShape] = {}
    for endpoint in endpoints:
        for method in endpoint.methods:
            shapes.setdefault(f"{method} {endpoint.path}", endpoint.shape)
    return shapes


async def find_keyed(request: Request, max_bytes: int) -> Handler | None:
    """Returns the handler of another family for this body; None: it is for the own API."""
    group: Sequence[Endpoint] = request.app.state.keyed.get(request.url.path, ())
    if not group:
        return None
    body = await _read(request, max_bytes, any_type=any(one.any_type for one in group))
    found = _recognise(group, body)
    await yield_after(len(body))
    if found is None:
        return None
    set_error_shape(request, found.shape)
    return found.handler


async def _answer(group: Sequence[Endpoint], max_bytes: int, request: Request) -> Response:
    found: Endpoint | None = group[0]
    if len(group) == 1:
        set_error_shape(request, group[0].shape)
    if request.method == "POST":
        body = await _read(request, max_bytes, any_type=any(one.any_type for one in group))
        found = _recognise(group, body) if group[0].keys else group[0]
    if found is None:
        keys = sorted(key for endpoint in group for key in endpoint.keys)
        raise InvalidRequest(f"The body has none of {', '.join(keys)}.", param=keys[0])
    set_error_shape(request, found.shape)
    return await found.handler(request)


async def _read(request: Request, max_bytes: int, *, any_type: bool) -> bytes:
    body = await read_body(request, max_bytes, any_type=any_type)
    keep_body(request, body)
    return body


def _recognise(group: Sequence[Endpoint], body: bytes) -> Endpoint | None:
    try:
        given = msgspec.json.decode(body, type=dict[str, msgspec.Raw]).keys()
    except (ValueError, RecursionError):
        return None
    return next((one for one in group if one.keys & given), None)
