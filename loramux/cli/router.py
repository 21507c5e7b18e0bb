"""`loramux router`: one address for several servers."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from loramux.cli.console import show_error
from loramux.config.paths import REGISTRY_VARIABLE
from loramux.errors import InvalidRequest, LoramuxError

if TYPE_CHECKING:
    from loramux.config.connections import ConnectionConfig
    from loramux.router.app import RouterApp, RouterOptions
    from loramux.router.members import Members

_log = logging.getLogger(__name__)
_PACKAGES = (
    "aiohttp",
    "alembic",
    "httptools",
    "psycopg",
    "sqlalchemy",
    "prometheus_client",
    "starlette",
    "uvicorn",
    "yarl",
)
# An open stream may take this long to end after SIGTERM.
_DRAIN_S = 300
# Bodies of the largest size that fit into the router's memory together.
_BODIES_AT_ONCE = 16


_Replicas = Annotated[
    list[str],
    typer.Option(
        metavar="URL",
        help="http://HOST:PORT of a server, dns://HOST:PORT for all addresses of a name, or "
        "dns://pod-{0..9}.DOMAIN:PORT for the names of a range; may be repeated.",
    ),
]
_Registry = Annotated[
    str | None,
    typer.Option(
        envvar=REGISTRY_VARIABLE,
        metavar="URL|PATH",
        help="The servers' registry: the router resolves tenant/name to a version, so that all "
        "servers serve the same one. Default: the servers resolve.",
    ),
]
_TenantHeader = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The servers' --tenant-header, if they have one."),
]
_Fleet = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Name of the fleet in the registry, where several fleets share one: the adapters "
        "that are loaded at run time are recorded under it.",
    ),
]
_AdaptersFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Without --registry: where the adapters that are loaded at run time are recorded. "
        "Default: they end with the router.",
    ),
]
_LoadS = Annotated[
    float, typer.Option(help="Seconds that a server may take to load an adapter.", min=0.1)
]
_OpenStatus = Annotated[
    bool,
    typer.Option(
        "--open-status",
        help="Show /metrics, /v1/replicas and /v1/stats, which name the servers, without a "
        "key. Default: they need the key of LORAMUX_API_KEY.",
    ),
]
_AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(metavar="HOST", help="As of `loramux serve`; may be repeated."),
]
_SslCertfile = Annotated[
    str | None, typer.Option(metavar="FILE", help="As of `loramux serve`: serves HTTPS.")
]
_SslKeyfile = Annotated[str | None, typer.Option(metavar="FILE", help="As of `loramux serve`.")]
_SslCaCerts = Annotated[str | None, typer.Option(metavar="FILE", help="As of `loramux serve`.")]
_MaxRequestSize = Annotated[
    str, typer.Option(metavar="SIZE", help="Maximum size of a body; 16 of them fit at once.")
]
_MaxConnections = Annotated[int, typer.Option(help="Maximum number of open connections.", min=1)]
_MaxConnectionsPerAddress = Annotated[
    int | None, typer.Option(help="The same of one address. Default: no limit.", min=1)
]
_DrainS = Annotated[int, typer.Option(help="Seconds that open streams have to end after SIGTERM.")]


def router(  # noqa: PLR0913  (the options of a command)
    replicas: _Replicas,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8080,
    registry: _Registry = None,
    tenant_header: _TenantHeader = None,
    fleet: _Fleet = "default",
    adapters_file: _AdaptersFile = None,
    load_s: _LoadS = 60.0,
    open_status: _OpenStatus = False,
    allowed_hosts: _AllowedHosts = None,
    ssl_certfile: _SslCertfile = None,
    ssl_keyfile: _SslKeyfile = None,
    ssl_ca_certs: _SslCaCerts = None,
    max_request_size: _MaxRequestSize = "16MiB",
    max_connections: _MaxConnections = 10_000,
    max_connections_per_address: _MaxConnectionsPerAddress = None,
    drain_s: _DrainS = _DRAIN_S,
) -> None:
    """Answer for a fleet: each request goes where its adapter is, or is loaded soonest.

    LORAMUX_API_KEY is the router's own key at the servers: for their reports, to load adapters on
    servers that start, and for /metrics and /v1/replicas of the router itself.
    """
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    with _explaining():
        from loramux.config.connections import ConnectionConfig
        from loramux.config.fields import parse_bytes
        from loramux.router.app import RouterOptions
        from loramux.router.members import find_members

        connections = ConnectionConfig(
            ssl_certfile=ssl_certfile,
            ssl_keyfile=ssl_keyfile,
            ssl_ca_certs=ssl_ca_certs,
            allowed_hosts=tuple(allowed_hosts or ()),
            max_request_size=parse_bytes(max_request_size),
            max_connections=max_connections,
            max_connections_per_address=max_connections_per_address,
        )
        options = RouterOptions(
            api_key=os.environ.get("LORAMUX_API_KEY"),
            is_status_open=open_status,
            tenant_header=tenant_header,
            max_body_bytes=connections.max_request_size,
            max_bodies_bytes=_BODIES_AT_ONCE * connections.max_request_size,
            load_s=load_s,
        )
        members = find_members(replicas)
        state = _State(registry=registry, fleet=fleet, file=adapters_file)
        _serve(_app(members, options, state), connections, host=host, port=port, drain_s=drain_s)


@contextmanager
def _explaining() -> Iterator[None]:
    """End the command with the reason of an error."""
    console = Console(stderr=True)
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _PACKAGES:
            raise
        show_error(
            console,
            f"{error.name} is not installed. Run: pip install 'loramux[router,registry,postgres]'",
        )
        raise typer.Exit(1) from error
    except LoramuxError as error:
        show_error(console, str(error))
        raise typer.Exit(2) from error


@dataclass(frozen=True)
class _State:
    """Where a router keeps what outlives it."""

    registry: str | None
    fleet: str
    file: Path | None


def _app(members: Members, options: RouterOptions, state: _State) -> RouterApp:
    from loramux.router.app import RouterApp
    from loramux.router.desired import FileDesired

    if state.registry is None or state.registry == "none":
        if state.file is None:
            _log.warning(
                "adapters that are loaded at run time are forgotten when this router ends: give "
                "--registry or --adapters-file"
            )
        desired = None if state.file is None else FileDesired(state.file)
        return RouterApp(members, options, desired=desired)
    if state.file is not None:
        raise InvalidRequest("With a registry the adapters are recorded there: no --adapters-file.")
    # Imported here: without a registry, the extra `registry` is not needed.
    from loramux.registry.registry import Registry
    from loramux.router.resolve import RegistryNames

    opened = Registry(state.registry)
    names = RegistryNames(opened, api_key=options.api_key, tenant_header=options.tenant_header)
    return RouterApp(members, options, names=names, desired=opened.desired(state.fleet))


def _serve(
    app: RouterApp, connections: ConnectionConfig, *, host: str, port: int, drain_s: int
) -> None:
    from loramux.http_server.browsers import BrowserGuard, default_hosts
    from loramux.http_server.serving import (
        DrainingServer,
        allow_many_connections,
        listen,
        uvicorn_config,
    )

    allow_many_connections()
    # The servers decide about pages of other sites: --cors-origins.
    hosts = connections.allowed_hosts or default_hosts(host)
    guarded = BrowserGuard(app, hosts, ("*",))
    config = uvicorn_config(guarded, connections, log_level="info", drain_s=drain_s)

    async def drain() -> None:
        """Nothing of the router's own outlasts its requests."""

    with listen(host, port) as listener:
        asyncio.run(DrainingServer(config, connections, drain).serve(sockets=[listener]))
