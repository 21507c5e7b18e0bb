"""One address for several models: the path or the body of a request names its model."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from loramux import __version__
from loramux.errors import suggest
from loramux.router.answers import Whole, error_answer, json_answer
from loramux.router.app import MAX_BODY_BYTES
from loramux.router.asked import BodiesTooLarge, BodyLimits, BodyTooLarge, ClientLeft, model_names
from loramux.router.asked import read_body as read_whole_body

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_BODIES_AT_ONCE = 16
# sheaf's routes have the name of the model in the path themselves.
_SHEAF = ("predict", "stream", "health", "ready")
_IMAGE_PATHS = ("/v1/images/", "/sdapi/")


class ServedModel(Protocol):
    """A running model."""

    @property
    def is_text(self) -> bool: ...
    @property
    def adapter_names(self) -> frozenset[str]: ...
    @property
    def app(self) -> ASGIApp: ...


class ModelsApp:
    """The models by name; with one, every request is for it."""

    def __init__(self, models: Mapping[str, ServedModel]) -> None:
        self._models = models
        self._bodies = BodyLimits(MAX_BODY_BYTES, _BODIES_AT_ONCE * MAX_BODY_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if scope["type"] != "http":
            return
        _, name, rest = (*scope["path"].split("/", 2), "", "")[:3]
        if name in self._models:
            model = self._models[name]
            is_sheaf = rest in _SHEAF and not model.is_text
            await model.app(scope if is_sheaf else _without_name(scope), receive, send)
        elif len(self._models) == 1:
            (model,) = self._models.values()
            await model.app(scope, receive, send)
        elif scope["method"] in ("GET", "HEAD"):
            await (await self._all(scope)).send(send)
        else:
            await self._by_body(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        async with contextlib.AsyncExitStack() as stack:
            for model in self._models.values():
                await stack.enter_async_context(_living(model.app))
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _all(self, scope: Scope) -> Whole:
        """Answer a GET for all models together."""
        match scope["path"]:
            case "/version":
                return json_answer({"version": __version__})
            case "/live":
                return json_answer({"status": "live"})
            case "/health" | "/ping" | "/v1/health":
                return await self._health(scope)
            case "/v1/models" | "/models":
                return await self._lists(scope)
        return self._unnamed(404, f"{scope['path']} is of one model.")

    async def _health(self, scope: Scope) -> Whole:
        answers = {name: await _ask(model.app, scope) for name, model in self._models.items()}
        is_ready = all(answer.status == 200 for answer in answers.values())
        states = {name: json.loads(answer.body)["status"] for name, answer in answers.items()}
        told = {"status": "ready" if is_ready else "starting", "models": states}
        return json_answer(told, status=200 if is_ready else 503).with_retry_after()

    async def _lists(self, scope: Scope) -> Whole:
        models: list[Any] = []
        for model in self._models.values():
            answer = await _ask(model.app, scope)
            if answer.status != 200:
                return answer
            models += json.loads(answer.body)["data"]
        return json_answer({"object": "list", "data": models})

    async def _by_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_whole_body(receive, self._bodies)
        except BodyTooLarge:
            await error_answer(413, f"The body is larger than {MAX_BODY_BYTES} bytes.").send(send)
            return
        except BodiesTooLarge:
            await error_answer(503, "The bodies of open requests fill the memory.").send(send)
            return
        except ClientLeft:
            return
        try:
            found = self._named(scope, body)
            if isinstance(found, Whole):
                await found.send(send)
            else:
                await found.app(scope, _replayed(body, receive), send)
        finally:
            self._bodies.give_back(len(body))

    def _named(self, scope: Scope, body: bytes) -> ServedModel | Whole:
        """Return the model that a body means by its name, an adapter, or the kind of the route."""
        headers = [
            (key.decode("latin-1"), text.decode("latin-1")) for key, text in scope["headers"]
        ]
        names = model_names(body, headers)
        for name in names:
            if name in self._models:
                return self._models[name]
        for name in names:
            holders = [one for one in self._models.values() if name in one.adapter_names]
            if len(holders) == 1:
                return holders[0]
            if holders:
                return self._unnamed(400, f"Several models have an adapter {name!r}.")
        is_text = not scope["path"].startswith(_IMAGE_PATHS)
        alike = [one for one in self._models.values() if one.is_text == is_text]
        if len(alike) == 1:
            # An unknown name is for it to refuse, as it knows its registry.
            return alike[0]
        if names:
            known = [*self._models, *(n for one in alike for n in one.adapter_names)]
            return self._unnamed(404, f"No model named {names[0]!r}. {suggest(names[0], known)}")
        return self._unnamed(400, "The body names no model.")

    def _unnamed(self, status: int, reason: str) -> Whole:
        names = ", ".join(self._models)
        return error_answer(
            status,
            f"{reason} This address serves {names}: name one in `model`, or write it before the "
            "path, as in /NAME/v1/models.",
        )


@contextlib.asynccontextmanager
async def _living(app: ASGIApp) -> AsyncIterator[None]:
    """Yield the lifespan of an application."""
    to_app: asyncio.Queue[Message] = asyncio.Queue()
    of_app: asyncio.Queue[Message] = asyncio.Queue()
    living = asyncio.create_task(_run_lifespan(app, to_app, of_app))
    for phase in ("startup", "shutdown"):
        await to_app.put({"type": f"lifespan.{phase}"})
        said = asyncio.create_task(of_app.get())
        await asyncio.wait((living, said), return_when=asyncio.FIRST_COMPLETED)
        said.cancel()
        if living.done():
            living.result()
        if phase == "startup":
            yield
    await living


async def _run_lifespan(
    app: ASGIApp, to_app: asyncio.Queue[Message], of_app: asyncio.Queue[Message]
) -> None:
    await app({"type": "lifespan", "asgi": {"version": "3.0"}}, to_app.get, of_app.put)


async def _ask(app: ASGIApp, scope: Scope) -> Whole:
    """Return the whole answer to a request without a body."""
    sent: list[Message] = []

    async def receive() -> Message:
        if not is_asked:
            is_asked.append(True)
            return {"type": "http.request", "body": b"", "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    is_asked: list[bool] = []
    await app(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return Whole(sent[0]["status"], list(sent[0]["headers"]), body)


def _without_name(scope: Scope) -> Scope:
    """Return the scope of a request without the first part of its path."""
    raw = scope.get("raw_path") or scope["path"].encode()
    return {
        **scope,
        "path": "/" + "/".join(scope["path"].split("/", 2)[2:]),
        "raw_path": b"/" + b"/".join(raw.split(b"/", 2)[2:]),
    }


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body that was read already, and then what comes."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay
