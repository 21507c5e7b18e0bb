"""Removal of what nobody names; in an order that a crash at any point cannot turn into damage."""

from __future__ import annotations

import os
import shutil
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from loramux.errors import StoreDamaged
from loramux.store.files import sync_folder
from loramux.store.paths import StoreLayout, size_of


@dataclass(frozen=True, slots=True)
class Collected:
    num_adapters: int
    num_files: int
    freed_bytes: int


def collect(layout: StoreLayout, kept: AbstractSet[str], *, used_before_ns: int) -> Collected:
    """Call it with the store's lock held. Records go first, then what only they needed."""
    doomed = [
        cid
        for cid in layout.cids()
        if cid not in kept and layout.record(cid).stat().st_mtime_ns <= used_before_ns
    ]
    for cid in doomed:
        layout.record(cid).unlink()
    sync_folder(layout.records)
    remove_views(layout)
    blobs = unneeded_blobs(layout)
    freed_bytes = sum(size_of(path) for path in blobs)
    for path in blobs:
        path.unlink()
    for folder in {path.parent for path in blobs}:
        sync_folder(folder)
    return Collected(len(doomed), len(blobs), freed_bytes)


def remove_views(layout: StoreLayout) -> None:
    alive = {layout.view(cid).name for cid in layout.cids()}
    for view in list(layout.views.iterdir()):
        if view.name not in alive:
            # Half a view must never lie under its own name.
            condemned = layout.staging / f"work-view-{view.name}"
            shutil.rmtree(condemned, ignore_errors=True)
            os.rename(view, condemned)
            shutil.rmtree(condemned)


def unneeded_blobs(layout: StoreLayout) -> list[Path]:
    """None at all while a record is damaged: nobody knows what that one needs."""
    needed: set[Path] = set()
    for cid in layout.cids():
        try:
            record = layout.read_record(cid)
        except StoreDamaged:
            return []
        assert record is not None, "the lock keeps records in place"
        needed.update(layout.blob(digest) for digest in record.files.values())
    return [path for path in layout.all_blobs() if path not in needed]
