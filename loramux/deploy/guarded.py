"""The router of a deployment whose spec decides which adapters there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loramux.router.answers import error_answer
from loramux.router.app import RouterApp

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

_LOADS = ("load_lora_adapter", "unload_lora_adapter", "adapters")


class GuardedApp:
    """The router without the routes that would make replicas differ from their configuration."""

    def __init__(self, app: RouterApp, *, runtime_loads: bool) -> None:
        self._app = app
        self._is_open = runtime_loads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_open and _changes_adapters(scope):
            message = (
                "The adapters of this deployment are those of its spec: change them there, and "
                "update it (`loramux deploy ray --update` or ModelServer.update); or set "
                "fleet.runtime_loads."
            )
            await error_answer(403, message).send(send)
        else:
            await self._app(scope, receive, send)


def _changes_adapters(scope: Scope) -> bool:
    """Whether a request is to load or unload an adapter; pushes to a registry are not."""
    path = scope["path"].strip("/")
    if path.removeprefix("v1/") in _LOADS[:2]:
        return True
    # SageMaker's routes; those under /v1/ are of the registry.
    return scope["method"] in ("POST", "DELETE") and path.split("/")[0] == _LOADS[2]
