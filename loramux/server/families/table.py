"""The families of other servers' APIs, and which of them answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from loramux.backend.host import Health
from loramux.errors import InvalidRequest, suggest
from loramux.server.context import Context, HostContext
from loramux.server.errors import ErrorShape
from loramux.server.families.anthropic import anthropic_endpoints, anthropic_error
from loramux.server.families.llamacpp import llamacpp_endpoints
from loramux.server.families.lorax import lorax_endpoints
from loramux.server.families.ollama import ollama_endpoints, ollama_error
from loramux.server.families.responses import responses_endpoints
from loramux.server.families.sagemaker import sagemaker_endpoints
from loramux.server.families.sglang import sglang_endpoints
from loramux.server.http.endpoint import Endpoint, KeyedEndpoints
from loramux.server.live.page import is_browser, to_page

FAMILIES: dict[str, Callable[[Context], list[Endpoint]]] = {
    "anthropic": anthropic_endpoints,
    "llamacpp": llamacpp_endpoints,
    "lorax": lorax_endpoints,
    "ollama": ollama_endpoints,
    "responses": responses_endpoints,
    "sagemaker": sagemaker_endpoints,
    "sglang": sglang_endpoints,
}
PREFIXES: tuple[tuple[str, str, ErrorShape], ...] = (
    ("ollama", "/api/", ollama_error),
    ("anthropic", "/v1/messages/", anthropic_error),
)
"""Families, the beginnings of paths that are theirs alone, and the shapes of their errors."""
OWN = "loramux"
OWN_PATHS = {"/tokenize": frozenset({"prompt", "messages"})}
"""Paths of the server's own API that others have too, and the fields of its own bodies."""


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
        endpoint.path: f"It is of an API that needs --compat {name} at the start of the server."
        for name in others
        for endpoint in FAMILIES[name](context)
    }


def endpoints_of(context: Context) -> list[Endpoint]:
    names = _served(context)
    found = [endpoint for name in names for endpoint in FAMILIES[name](context)]
    return [root_endpoint(context, is_ollama="ollama" in names), *found]


def shared_with_own(endpoints: Iterable[Endpoint]) -> KeyedEndpoints:
    shared: defaultdict[str, list[Endpoint]] = defaultdict(list)
    for endpoint in endpoints:
        if endpoint.path in OWN_PATHS:
            shared[endpoint.path].append(endpoint)
    return shared


def root_endpoint(context: HostContext, *, is_ollama: bool = False) -> Endpoint:
    """GET /, by which several clients see whether a server is there; Ollama's read its text.

    Browsers are sent to the web page.
    """

    async def root(request: Request) -> Response:
        if context.options.ui and is_browser(request):
            return to_page(request)
        is_ready = context.backend.health is Health.READY
        text = "Ollama is running" if is_ollama else "loramux is running"
        return PlainTextResponse(text, 200 if is_ready else 503, headers={"vary": "accept"})

    return Endpoint(family=OWN, path="/", handler=root, methods=("GET", "HEAD"))
