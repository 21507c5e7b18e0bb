"""Locations of the registry and the adapter store, for the server and the commands."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

REGISTRY_VARIABLE = "LORAMUX_REGISTRY"
DATA_VARIABLE = "LORAMUX_DATA"
SHARED_CACHE_VARIABLE = "LORAMUX_SHARED_CACHE"
REMOTE_STORE_VARIABLE = "LORAMUX_REMOTE_STORE"
REGISTRY_FILE = "registry.db"
STORE_FOLDER = "store"
FETCH_FOLDER = "fetch"


@dataclass(frozen=True, slots=True)
class DataPaths:
    """Locations of the registry, the adapter store and the tiers behind it."""

    registry: str = field(repr=False)
    """URL of a database, or path of a SQLite file."""
    store: Path
    shared_cache: str | None = field(default=None, repr=False)
    """URL of a Redis server."""
    remote_store: str | None = None
    """URL of a bucket."""


def find_data_paths(
    *,
    registry: str | None = None,
    data: str | Path | None = None,
    shared_cache: str | None = None,
    remote_store: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> DataPaths:
    """Locations from the arguments, else from the environment, else in the user's data folder."""
    environment = os.environ if environment is None else environment
    folder = data_folder(data, environment)
    chosen = registry or environment.get(REGISTRY_VARIABLE) or str(folder / REGISTRY_FILE)
    return DataPaths(
        registry=chosen,
        store=folder / STORE_FOLDER,
        shared_cache=shared_cache or environment.get(SHARED_CACHE_VARIABLE) or None,
        remote_store=remote_store or environment.get(REMOTE_STORE_VARIABLE) or None,
    )


def data_folder(chosen: str | Path | None, environment: Mapping[str, str]) -> Path:
    """$LORAMUX_DATA, or loramux under $XDG_DATA_HOME, or ~/.local/share/loramux."""
    own = chosen or environment.get(DATA_VARIABLE)
    if own:
        return Path(own).expanduser().absolute()
    shared = environment.get("XDG_DATA_HOME")
    return (Path(shared) if shared else Path("~/.local/share")).expanduser() / "loramux"
