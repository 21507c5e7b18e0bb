"""Brings a pipeline of diffusers from the Hugging Face hub into its cache."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from loramux.base.progress import SILENT, ByteSink
from loramux.errors import UnsupportedModel
from loramux.models.hub.cache import RepositoryCache
from loramux.models.hub.fetch import bring, fetch_or_find, fetch_small
from loramux.models.hub.files import Listing
from loramux.models.hub.pipeline_files import (
    PIPELINE_INDEX,
    components_of,
    local_files,
    small_files,
    weights_of,
)
from loramux.models.hub.single_file import components_in
from loramux.types.hub_id import HubId
from loramux.types.image import PIPELINE_CLASSES


def fetch_pipeline(
    hub_id: HubId,
    *,
    variant: str | None,
    parts: Collection[str] = (),
    sink: ByteSink = SILENT,
) -> Path:
    """Return the folder of the pipeline in the cache, fetching what is missing.

    `parts`: those of a file that has the weights of other components (`single_file.parts_of`).

    The class of the pipeline, its weights and the free space are checked before any weight is
    fetched. The hub and the cache are asked as for models of texts.
    """
    cache = RepositoryCache(hub_id)

    def complete(folder: Path) -> Path:
        names = local_files(folder)
        components = components_of(folder / PIPELINE_INDEX)
        absent = [one for one in components if not any(n.startswith(f"{one}/") for n in names)]
        if absent:
            raise UnsupportedModel(f"{', '.join(absent)} is missing.")
        weights_of(names, _without(folder / PIPELINE_INDEX, components, parts), variant)
        return folder

    return fetch_or_find(
        hub_id,
        find=lambda: cache.find_by(complete),
        fetch=lambda listing: _fetch(cache, listing, variant, parts, sink),
    )


def _without(index: Path, components: list[str], parts: Collection[str]) -> list[str]:
    """Return the components whose weights the repository must have."""
    given = components_in(index, parts) if parts else []
    return [name for name in components if name not in given]


def _fetch(
    cache: RepositoryCache,
    listing: Listing,
    variant: str | None,
    parts: Collection[str],
    sink: ByteSink,
) -> Path:
    hub_id, names = cache.hub_id, list(listing.files)
    if PIPELINE_INDEX not in names:
        raise UnsupportedModel(
            f"{hub_id} has no {PIPELINE_INDEX}: it is not a pipeline of diffusers. A repository of "
            "LoRA files is an adapter: give it as --image-lora."
        )
    index = fetch_small(cache, listing, PIPELINE_INDEX)
    try:
        _check_class(index)
        components = components_of(index)
        weights, _ = weights_of(names, _without(index, components, parts), variant)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{hub_id}: {error} Nothing else was downloaded.") from None
    chosen = [listing.files[name] for name in (*small_files(names, components), *weights)]
    bring(cache, listing.commit, chosen, sink)
    cache.remember(listing.commit, replace=True)
    return cache.snapshot(listing.commit)


def _check_class(index: Path) -> None:
    name = json.loads(index.read_bytes()).get("_class_name")
    if name not in PIPELINE_CLASSES:
        raise UnsupportedModel(
            f"Pipelines of the class {name} are not served. Served are: "
            f"{', '.join(PIPELINE_CLASSES)}."
        )
