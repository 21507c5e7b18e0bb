"""What all commands about the registry share: their options, and how they fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from loramux.cli.serve_view import show_error
from loramux.data_folder import find_places
from loramux.errors import InvalidRequest, LoramuxError

if TYPE_CHECKING:
    from loramux.adapters.library import AdapterLibrary
    from loramux.registry.registry import Registry

FAILED, WRONG_USAGE = 1, 2
# Installed with the extra `registry`, not with the package alone.
REGISTRY_PACKAGES = ("sqlalchemy", "alembic", "cryptography")

RegistryFlag = Annotated[
    str | None,
    typer.Option(
        metavar="URL_OR_PATH",
        help="postgresql://… or a SQLite file. Default: $LORAMUX_REGISTRY, else registry.db in "
        "the data folder.",
        show_default=False,
    ),
]
DataFlag = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Where adapters are stored. Default: $LORAMUX_DATA, else "
        "$XDG_DATA_HOME/loramux or ~/.local/share/loramux.",
        show_default=False,
    ),
]
AliasFlag = Annotated[str, typer.Option(help="The alias to move.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object, nothing else.")]


@contextmanager
def open_registry(registry: str | None, data: Path | None) -> Iterator[Registry]:
    """What goes wrong inside ends the command with a sentence and an exit status."""
    with reporting_errors():
        # Imported here and below, because a database driver takes time that `--help` should not.
        from loramux.registry.registry import Registry

        with Registry(find_places(registry=registry, data=data).registry) as opened:
            yield opened


@contextmanager
def open_library(registry: str | None, data: Path | None) -> Iterator[AdapterLibrary]:
    with open_registry(registry, data) as opened:
        from loramux.adapters.library import AdapterLibrary
        from loramux.adapters.store import ContentStore

        store = ContentStore(find_places(registry=registry, data=data).store)
        yield AdapterLibrary(store, opened)


@contextmanager
def reporting_errors() -> Iterator[None]:
    try:
        yield
    except (LoramuxError, OSError) as error:
        show_error(Console(stderr=True), str(error))
        status = WRONG_USAGE if isinstance(error, InvalidRequest) else FAILED
        raise typer.Exit(status) from error
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in REGISTRY_PACKAGES:
            raise
        message = f"{error.name} is not installed. Run: pip install 'loramux[registry]'"
        show_error(Console(stderr=True), message)
        raise typer.Exit(FAILED) from error


@contextmanager
def working(stage: str) -> Iterator[None]:
    """On a terminal, what is being done and for how long; elsewhere nothing."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        bar.add_task(stage, total=None)
        yield
