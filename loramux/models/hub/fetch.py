"""Brings a model of the Hugging Face hub into its cache, and returns where it is.

Before any weights are fetched: the revision is resolved to a commit, config.json is checked like
the loader checks it, the needed files are chosen, and the free space of the disk is compared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download

from loramux.base.progress import SILENT, ByteSink
from loramux.errors import ModelNotFetched, UnsupportedModel
from loramux.models.architectures import parse_config
from loramux.models.folder import INDEX_NAME, SINGLE_NAME, read_config, shard_names
from loramux.models.gguf_file import GGUF_ARCHITECTURES
from loramux.models.hub.cache import RepositoryCache
from loramux.models.hub.download import Download
from loramux.models.hub.errors import HubUnreachable, hub_errors, not_a_hub
from loramux.models.hub.files import (
    CONFIG_NAME,
    Listing,
    RemoteFile,
    check_folder,
    gguf_of,
    is_gguf,
    side_files,
    weights_of,
)
from loramux.models.quantised.config import QUANTISATION_FILES
from loramux.types.hub_id import HubId

_log = logging.getLogger(__name__)


def fetch_model(hub_id: HubId, *, sink: ByteSink = SILENT, with_weights: bool = True) -> Path:
    """Return the model's folder or GGUF file in the cache, fetching what is missing.

    Without weights, only the config is fetched; a GGUF file is always fetched as a whole. A model
    that is in the cache is used if the hub cannot be reached. With HF_HUB_OFFLINE=1, and for a
    commit that is in the cache, the hub is not asked.
    """
    cache = RepositoryCache(hub_id)
    return fetch_or_find(
        hub_id,
        find=lambda: cache.find(with_weights=with_weights),
        fetch=lambda listing: fetch_listed(cache, listing, sink=sink, with_weights=with_weights),
    )


def fetch_or_find(
    hub_id: HubId, *, find: Callable[[], Path], fetch: Callable[[Listing], Path]
) -> Path:
    """Return what `fetch` brings of a listing of the hub, or what `find` has in the cache."""
    if constants.is_offline_mode():
        return find_offline(find)
    if hub_id.is_commit:
        try:
            return find()
        except ModelNotFetched:
            pass
    try:
        listing = list_files(hub_id)
    except HubUnreachable as error:
        try:
            found = find()
        except ModelNotFetched as missing:
            raise HubUnreachable(f"{error} {missing}") from None
        _log.warning("%s The copy in the cache is used: %s", error, found)
        return found
    with hub_errors(hub_id):
        return fetch(listing)


def find_offline(find: Callable[[], Path]) -> Path:
    try:
        return find()
    except ModelNotFetched as error:
        raise ModelNotFetched(
            f"{error} HF_HUB_OFFLINE is set: unset it and start once with a connection, or set "
            "HF_HOME to the cache that has the model."
        ) from None


def list_files(hub_id: HubId) -> Listing:
    """Resolve the revision to a commit, and list its files with their sizes."""
    with hub_errors(hub_id):
        try:
            info = HfApi(library_name="loramux").model_info(
                hub_id.repository,
                revision=hub_id.revision,
                files_metadata=True,
                timeout=constants.HF_HUB_ETAG_TIMEOUT,
            )
        except (ValueError, KeyError, TypeError):
            # The answer is not the JSON of a hub.
            raise not_a_hub(hub_id) from None
    if info.sha is None:
        raise not_a_hub(hub_id)
    files = {
        one.rfilename: RemoteFile(
            path=one.rfilename,
            size_bytes=one.size or 0,
            blob=one.lfs.sha256 if one.lfs is not None else one.blob_id,
        )
        for one in info.siblings or []
    }
    return Listing(info.sha, files, (info.gguf or {}).get("architecture"))


def fetch_listed(
    cache: RepositoryCache, listing: Listing, *, sink: ByteSink, with_weights: bool
) -> Path:
    hub_id, found = cache.hub_id, cache.snapshot(listing.commit)
    if is_gguf(hub_id, listing):
        file = gguf_of(hub_id, listing)
        check_gguf_architecture(hub_id, listing)
        files, found = [file], found / file.path
    else:
        check_folder(hub_id, listing)
        check_config(cache, listing)
        files = folder_files(cache, listing) if with_weights else []
    bring(cache, listing.commit, files, sink)
    cache.remember(listing.commit, replace=with_weights)
    return found


def bring(cache: RepositoryCache, commit: str, files: list[RemoteFile], sink: ByteSink) -> None:
    """Download the files that the snapshot lacks."""
    missing = [file for file in files if not (cache.snapshot(commit) / file.path).exists()]
    if missing:
        cache.check_space(missing)
        Download(cache, commit, missing).run(sink)


def folder_files(cache: RepositoryCache, listing: Listing) -> list[RemoteFile]:
    shards = None
    index = []
    if INDEX_NAME in listing.files and SINGLE_NAME not in listing.files:
        shards = shard_names(fetch_small(cache, listing, INDEX_NAME))
        index = [listing.files[INDEX_NAME]]
    return [*weights_of(cache.hub_id, listing, shards), *index, *side_files(listing)]


def fetch_small(cache: RepositoryCache, listing: Listing, name: str) -> Path:
    found = hf_hub_download(
        cache.hub_id.repository,
        name,
        revision=listing.commit,
        cache_dir=cache.root,
        library_name="loramux",
    )
    return Path(found)


def check_config(cache: RepositoryCache, listing: Listing) -> None:
    """Refuse an architecture or a quantisation that cannot be served."""
    for name in (CONFIG_NAME, *QUANTISATION_FILES):
        if name in listing.files:
            folder = fetch_small(cache, listing, name).parent
    try:
        parse_config(read_config(folder))
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{cache.hub_id}: {error} Nothing else was downloaded.") from None


def check_gguf_architecture(hub_id: HubId, listing: Listing) -> None:
    """Refuse what the hub says about its GGUF files; the file itself is checked when it is read."""
    name = listing.gguf_architecture
    if name is not None and name not in GGUF_ARCHITECTURES:
        raise UnsupportedModel(
            f"{hub_id}: GGUF architecture {name!r} is not supported; valid values: "
            f"{', '.join(GGUF_ARCHITECTURES)}. Use the model's repository with safetensors. "
            "Nothing was downloaded."
        )
