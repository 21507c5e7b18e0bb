"""The families of other servers' APIs, and which of them answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from starlette.responses import PlainTextResponse, Response

from loramux.backend.host import Health
from loramux.errors import InvalidRequest, suggest
from loramux.server.context import Context, HostContext
from loramux.server.errors import ErrorShape
from loramux.server.families.anthropic import anthropic_error, anthropic_routes
from loramux.server.families.llamacpp import llamacpp_routes
from loramux.server.families.lorax import lorax_routes
from loramux.server.families.ollama import ollama_error, ollama_routes
from loramux.server.families.responses import responses_routes
from loramux.server.families.sagemaker import sagemaker_routes
from loramux.server.families.sglang import sglang_routes
from loramux.server.http.call import Call
from loramux.server.http.routes import OWN, Route
from loramux.server.live.page import is_browser, to_page

FAMILIES: dict[str, Callable[[Context], list[Route]]] = {
    "anthropic": anthropic_routes,
    "llamacpp": llamacpp_routes,
    "lorax": lorax_routes,
    "ollama": ollama_routes,
    "responses": responses_routes,
    "sagemaker": sagemaker_routes,
    "sglang": sglang_routes,
}
PREFIXES: tuple[tuple[str, str, ErrorShape], ...] = (
    ("ollama", "/api/", ollama_error),
    ("anthropic", "/v1/messages/", anthropic_error),
)
"""Families, the beginnings of paths that are theirs alone, and the shapes of their errors."""


def check_families(names: Iterable[str]) -> None:
    for name in names:
        if name not in FAMILIES:
            raise InvalidRequest(
                f"{name!r} is not an API that --compat knows. {suggest(name, [*FAMILIES])}",
                param="compat",
            )


def _served(context: Context) -> Collection[str]:
    names = FAMILIES if context.options.compat is None else context.options.compat
    check_families(names)
    return names


def prefixes_of(context: Context) -> dict[str, ErrorShape]:
    """Return the shape of errors of paths that belong to an API, by their beginning."""
    return {start: shape for name, start, shape in PREFIXES if name in _served(context)}


def paths_of_others(context: Context) -> dict[str, str]:
    """Return the paths of the APIs that do not answer, with what opens them."""
    others = [name for name in FAMILIES if name not in _served(context)]
    return {
        route.path: f"It is of an API that needs --compat {name} at the start of the server."
        for name in others
        for route in FAMILIES[name](context)
    }


def routes_of_others(context: Context) -> list[Route]:
    names = _served(context)
    found = [route for name in names for route in FAMILIES[name](context)]
    return [root_route(context, is_ollama="ollama" in names), *found]


def root_route(context: HostContext, *, is_ollama: bool = False) -> Route:
    """GET /, by which several clients see whether a server is there; Ollama's read its text.

    Browsers are sent to the web page.
    """

    async def root(request: Call) -> Response:
        if context.options.ui and is_browser(request):
            return to_page(request)
        is_ready = context.backend.health is Health.READY
        text = "Ollama is running" if is_ollama else "loramux is running"
        return PlainTextResponse(text, 200 if is_ready else 503, headers={"vary": "accept"})

    return Route(family=OWN, path="/", handler=root, methods=("GET", "HEAD"))
