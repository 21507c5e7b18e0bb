"""Options and error handling that the registry commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from loramux.base.progress import SILENT, ByteSink
from loramux.cli.console import show_error
from loramux.config.paths import find_data_paths
from loramux.errors import InvalidRequest, LoramuxError

if TYPE_CHECKING:
    from loramux.registry.registry import Registry
    from loramux.sources.config import SourceConfig
    from loramux.sources.download import Progress
    from loramux.store.library import AdapterLibrary

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
        help="Data folder with the adapter store. Default: $LORAMUX_DATA, else "
        "$XDG_DATA_HOME/loramux or ~/.local/share/loramux.",
        show_default=False,
    ),
]
SharedCacheFlag = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Redis used by several servers as a cache, such as redis://host:6379/0. Default: "
        "$LORAMUX_SHARED_CACHE, else none.",
        show_default=False,
    ),
]
RemoteStoreFlag = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Bucket that also stores every adapter: s3://bucket/folder, gs://… or az://…. "
        "Default: $LORAMUX_REMOTE_STORE, else none.",
        show_default=False,
    ),
]
AliasFlag = Annotated[str, typer.Option(help="Alias to move.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@contextmanager
def open_registry(registry: str | None, data: Path | None) -> Iterator[Registry]:
    """Open the registry; an error inside ends the command with a message and an exit status."""
    with reporting_errors():
        # Imported here and below: a database driver slows down `--help`.
        from loramux.launch import library as stores

        with stores.open_registry(find_data_paths(registry=registry, data=data)) as opened:
            yield opened


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """How a command opens the adapter store."""

    shared_cache: str | None = None
    remote_store: str | None = None
    max_adapter_bytes: int | None = None
    sink: ByteSink = SILENT
    sources: SourceConfig | None = None
    """Sources from which missing adapters are fetched again; None: from none."""
    on_fetch: Callable[[Progress], None] | None = None


NO_OPTIONS = StoreOptions()


@contextmanager
def open_library(
    registry: str | None, data: Path | None, options: StoreOptions = NO_OPTIONS
) -> Iterator[AdapterLibrary]:
    """Open registry and store; an error inside ends the command like in open_registry."""
    with reporting_errors():
        from loramux.launch import library as stores
        from loramux.store.intake import StoreLimits

        places = find_data_paths(
            registry=registry,
            data=data,
            shared_cache=options.shared_cache,
            remote_store=options.remote_store,
        )
        size = options.max_adapter_bytes
        library_options = stores.LibraryOptions(
            sources=options.sources,
            limits=StoreLimits() if size is None else stores.store_limits(size),
            sink=options.sink,
            on_fetch=options.on_fetch,
        )
        with stores.open_library(places, library_options) as library:
            yield library


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
