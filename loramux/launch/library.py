"""Composition root of registry, adapter store and sources, for the server and for the commands.

`launch.py` adds the engine and the HTTP application. Nothing else opens a registry or a store.
"""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from loramux.base.progress import SILENT, ByteSink
from loramux.config.paths import FETCH_FOLDER, DataPaths
from loramux.errors import InvalidRequest
from loramux.registry.audit import Actor, Signer
from loramux.registry.names import DEFAULT_TENANT
from loramux.registry.registry import Registry
from loramux.server.naming.sources import fetched_folder
from loramux.sources.config import SourceConfig, read_environment
from loramux.sources.download import Progress
from loramux.store.bucket import ObjectTier
from loramux.store.intake import StoreLimits
from loramux.store.library import AdapterLibrary, OpenSource, open_store, refuse_credentials


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryOptions:
    """How an AdapterLibrary is opened; the defaults are those of a command."""

    home_tenant: str = DEFAULT_TENANT
    sources: SourceConfig | None = None
    """Sources from which missing adapters are fetched again; None: from none."""
    limits: StoreLimits = field(default_factory=StoreLimits)
    sink: ByteSink = SILENT
    on_fetch: Callable[[Progress], None] | None = None
    require_signed: bool = False
    """Whether every push needs a signature."""
    signer: Signer | None = None
    """Signs the entries of the audit log."""
    audit_anchor: Path | None = None
    """Gets the end of the audit log."""


@contextmanager
def open_registry(places: DataPaths) -> Iterator[Registry]:
    with Registry(places.registry) as registry:
        yield registry.acting(_user())


@contextmanager
def open_library(places: DataPaths, options: LibraryOptions) -> Iterator[AdapterLibrary]:
    """Yield the adapter library of a data folder; its registry is closed with the context."""
    opened = Registry(
        places.registry,
        home_tenant=options.home_tenant,
        signer=options.signer,
        anchor=options.audit_anchor,
    )
    with opened as registry:
        sources = options.sources or read_environment(os.environ, SourceConfig())
        store = open_store(places, sources, limits=options.limits, sink=options.sink)
        yield AdapterLibrary(
            store,
            registry.acting(_user()),
            open_source=_open_source(places, options),
            require_signed=options.require_signed,
        )


def _user() -> Actor:
    """Return the user of this process, as the actor of its changes; requests have their own."""
    try:
        name = getpass.getuser()
    # A container's user may have no name.
    except (KeyError, OSError):
        name = str(os.getuid())
    return Actor(address=f"{name}@{socket.gethostname()}")


def open_bucket(places: DataPaths) -> ObjectTier:
    """Return the remote store as a bucket of its own, for garbage collection."""
    if places.remote_store is None:
        raise InvalidRequest("Name the bucket with --remote-store or LORAMUX_REMOTE_STORE.")
    refuse_credentials(places.remote_store)
    return ObjectTier(places.remote_store, read_environment(os.environ, SourceConfig()))


def store_limits(max_adapter_bytes: int, max_store_bytes: int | None = None) -> StoreLimits:
    return StoreLimits(
        max_file_bytes=max_adapter_bytes,
        max_adapter_bytes=max_adapter_bytes,
        max_store_bytes=max_store_bytes,
    )


def _open_source(places: DataPaths, options: LibraryOptions) -> OpenSource | None:
    if options.sources is None:
        return None
    return partial(
        fetched_folder,
        roots=list(map(str, options.sources.allowed_roots)),
        config=options.sources,
        area=places.store.parent / FETCH_FOLDER,
        progress=options.on_fetch,
    )
