"""`loramux router`: one address for several servers."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from loramux.cli.console import show_error
from loramux.config.paths import REGISTRY_VARIABLE
from loramux.errors import LoramuxError

if TYPE_CHECKING:
    from loramux.router.app import RouterApp
    from loramux.router.resolve import RegistryNames

_PACKAGES = (
    "aiohttp",
    "alembic",
    "psycopg",
    "sqlalchemy",
    "prometheus_client",
    "starlette",
    "uvicorn",
    "yarl",
)
# An open stream may take this long to end after SIGTERM.
_DRAIN_S = 300


def router(
    replicas: Annotated[
        list[str],
        typer.Option(
            metavar="URL",
            help="http://HOST:PORT of a server, dns://HOST:PORT for all addresses of a name, or "
            "dns://pod-{0..9}.DOMAIN:PORT for the names of a range; may be repeated.",
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8080,
    registry: Annotated[
        str | None,
        typer.Option(
            envvar=REGISTRY_VARIABLE,
            metavar="URL|PATH",
            help="The servers' registry: the router resolves tenant/name to a version, so that all "
            "servers serve the same one. Default: the servers resolve.",
        ),
    ] = None,
    tenant_header: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The servers' --tenant-header, if they have one."),
    ] = None,
    drain_s: Annotated[
        int, typer.Option(help="Seconds that open streams have to end after SIGTERM.")
    ] = _DRAIN_S,
) -> None:
    """Answer for a fleet: each request goes where its adapter is, or is loaded soonest.

    The key of LORAMUX_API_KEY is used for the reports of servers that require one, and to load
    adapters on servers that start.
    """
    console = Console(stderr=True)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        app = _app(replicas, registry=registry, tenant_header=tenant_header)
        _serve(app, host=host, port=port, drain_s=drain_s)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _PACKAGES:
            raise
        show_error(
            console,
            f"{error.name} is not installed. Run: pip install 'loramux[server,router,postgres]'",
        )
        raise typer.Exit(1) from error
    except LoramuxError as error:
        show_error(console, str(error))
        raise typer.Exit(2) from error


def _app(replicas: list[str], *, registry: str | None, tenant_header: str | None) -> RouterApp:
    from loramux.router.app import RouterApp
    from loramux.router.members import find_members

    members = find_members(replicas)
    api_key = os.environ.get("LORAMUX_API_KEY")
    names = _names(registry, api_key=api_key, tenant_header=tenant_header)
    return RouterApp(members, api_key=api_key, names=names)


def _serve(app: RouterApp, *, host: str, port: int, drain_s: int) -> None:
    import uvicorn

    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="info",
        access_log=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=drain_s,
    )
    uvicorn.Server(config).run()


def _names(
    registry: str | None, *, api_key: str | None, tenant_header: str | None
) -> RegistryNames | None:
    if registry is None or registry == "none":
        return None
    from loramux.registry.registry import Registry
    from loramux.router.resolve import RegistryNames

    return RegistryNames(Registry(registry), api_key=api_key, tenant_header=tenant_header)
