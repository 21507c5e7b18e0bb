"""`loramux deploy`: a fleet on Ray Serve from one file."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loramux.cli.console import printable, say, show_error
from loramux.errors import InvalidRequest, LoramuxError

if TYPE_CHECKING:
    from loramux.deploy.ray_server import DeploymentState, RayDeployment
    from loramux.launch.specs import ModelSpec

_PACKAGES = ("ray", "yaml", "aiohttp", "uvicorn", "starlette", "prometheus_client")
app = typer.Typer(no_args_is_help=True, help="Deploy replicas and a router on a cluster.")


@app.callback()
def deploy() -> None:
    """Deploy replicas and a router on a cluster."""


@app.command("ray")
def deploy_ray(  # noqa: PLR0913  (one for each flag)
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="YAML file with a ModelSpec.")],
    update: Annotated[
        bool, typer.Option("--update", help="Change the running deployment into this spec.")
    ] = False,
    status: Annotated[bool, typer.Option("--status", help="Show the running deployment.")] = False,
    down: Annotated[
        bool, typer.Option("--down", help="Stop the deployment; open streams end first.")
    ] = False,
    print_config: Annotated[
        bool,
        typer.Option(
            "--print-config", help="Print the file for `serve deploy` or KubeRay; start nothing."
        ),
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="The Ray cluster. Default: $RAY_ADDRESS, else that of this machine.",
        ),
    ] = None,
) -> None:
    """Deploy a spec on Ray Serve: replicas, and a router in front of them.

    Without a cluster on this machine one is started, which ends with this command (Ctrl-C).

    [bold]Examples[/bold]

    loramux deploy ray spec.yaml

    loramux deploy ray spec.yaml --update
    """
    console, errors = Console(), Console(stderr=True)
    if sum((update, status, down, print_config)) > 1:
        show_error(errors, "Choose one of --update, --status, --down and --print-config.")
        raise typer.Exit(2)
    with _explaining(errors):
        from loramux.deploy.spec_file import read_spec

        read = read_spec(spec)
        if print_config:
            _print_config(read)
            return
        _act(read, console, address, update=update, status=status, down=down)


def _act(
    spec: ModelSpec,
    console: Console,
    address: str | None,
    *,
    update: bool,
    status: bool,
    down: bool,
) -> None:
    from loramux.deploy.ray_server import RayDeployment, connect

    began = time.monotonic()

    def progress(line: str) -> None:
        say(console, f"{time.monotonic() - began:6.1f} s  ", line, style="dim")

    server = RayDeployment(spec, on_progress=progress)
    needs_cluster = update or status or down
    is_own = connect(address, needs_cluster=needs_cluster)
    if status:
        show_state(console, server.status())
    elif down:
        server.shutdown()
        say(console, "Stopped ", spec.name, style="bold green")
    elif update:
        show_state(console, server.update(spec))
    else:
        with _until_stopped(server, console, is_own=is_own):
            show_state(console, server.run())
            say(console, "\nListening on ", server.url, style="bold green")


@contextmanager
def _until_stopped(server: RayDeployment, console: Console, *, is_own: bool) -> Iterator[None]:
    """Keep a cluster of this process until Ctrl-C or SIGTERM, and takes the deployment down."""
    if not is_own:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
        say(console, "Ctrl-C   ", "stops the deployment and its cluster", style="dim")
        signal.pause()
    except KeyboardInterrupt:
        say(console, "Stopping ", "open streams end first", style="dim")
    finally:
        server.shutdown()


def show_state(console: Console, state: DeploymentState) -> None:
    """Print the applications, and each replica in a row."""
    for name, status in state.applications.items():
        say(console, f"{name:<9}", status, style="bold")
    for message in state.messages:
        say(console, "         ", message, style="yellow")
    if not state.applications:
        say(console, "", "Nothing is deployed.", style="bold")
        return
    table = Table("replica", "actor pid", "server pid", "revision", "fault", box=None)
    for one in sorted(state.engines, key=lambda engine: str(engine["url"])):
        cells = ("url", "actor_pid", "server_pid", "revision", "fault")
        table.add_row(*(Text(printable(str(one[cell]))) for cell in cells))
    console.print(table)


def _print_config(spec: ModelSpec) -> None:
    import yaml

    from loramux.deploy.serve_config import serve_config

    typer.echo(yaml.safe_dump(serve_config(spec), sort_keys=False), nl=False)


@contextmanager
def _explaining(errors: Console) -> Iterator[None]:
    """Turn errors into messages and exit statuses."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _PACKAGES:
            raise
        show_error(errors, f"{error.name} is not installed. Run: pip install 'loramux[ray]'")
        raise typer.Exit(1) from error
    except InvalidRequest as error:
        show_error(errors, str(error))
        raise typer.Exit(2) from error
    except LoramuxError as error:
        show_error(errors, str(error))
        raise typer.Exit(1) from error
