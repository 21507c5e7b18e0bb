"""`loramux router`: one address for several servers."""

from __future__ import annotations

import logging
import os
from typing import Annotated

import typer
from rich.console import Console

from loramux.cli.console import show_error
from loramux.errors import InvalidRequest

_PACKAGES = ("aiohttp", "prometheus_client", "starlette", "uvicorn", "yarl")
# An open stream may take this long to end after SIGTERM.
_DRAIN_S = 300


def router(
    replicas: Annotated[
        list[str],
        typer.Option(
            metavar="URL",
            help="http://HOST:PORT of a server, or dns://HOST:PORT for all addresses of a name; "
            "may be repeated.",
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8080,
    drain_s: Annotated[
        int, typer.Option(help="Seconds that open streams have to end after SIGTERM.")
    ] = _DRAIN_S,
) -> None:
    """Answer for a fleet: each request goes where its adapter is, or is loaded soonest.

    The key of LORAMUX_API_KEY is used for the reports of servers that require one.
    """
    console = Console(stderr=True)
    try:
        import uvicorn

        from loramux.router.app import RouterApp
        from loramux.router.members import find_members
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _PACKAGES:
            raise
        show_error(
            console, f"{error.name} is not installed. Run: pip install 'loramux[server,router]'"
        )
        raise typer.Exit(1) from error
    try:
        members = find_members(replicas)
    except InvalidRequest as error:
        show_error(console, str(error))
        raise typer.Exit(2) from error
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    app = RouterApp(members, api_key=os.environ.get("LORAMUX_API_KEY"))
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
