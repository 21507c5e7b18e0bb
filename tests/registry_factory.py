"""Contents and times for tests of the registry."""

from __future__ import annotations

import functools
import hashlib
import tempfile
from pathlib import Path

from sqlalchemy import delete, insert, update

from loramux.adapters.identity import CID_PREFIX
from loramux.registry import schema as tables
from loramux.registry.database import Database
from loramux.registry.records import Content


class FakeClock:
    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def make_cid(seed: object) -> str:
    return CID_PREFIX + hashlib.sha256(str(seed).encode()).hexdigest()


def make_content(seed: object = 0, *, base_model: str | None = "tiny") -> Content:
    manifest = {"format": "loramux-adapter/1", "config": {"r": 4}, "files": {}, "seed": str(seed)}
    return Content(cid=make_cid(seed), manifest=manifest, size_bytes=100, base_model=base_model)


@functools.cache
def _empty_registry() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "registry.db"
        Database(path).close()
        return path.read_bytes()


def write_empty_registry(path: Path) -> Path:
    """Write a database with all tables and no rows, without running the migrations again."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(_empty_registry())
    return path


def wipe(database: Database) -> None:
    """Return the fields as they were at creation."""
    with database.writing() as connection:
        for table in reversed(tables.metadata.sorted_tables):
            if table is not tables.registry_state:
                connection.execute(delete(table))
        connection.execute(update(tables.registry_state).values(revision=0))
        connection.execute(insert(tables.audit_head).values(id=1, number=0, digest=""))
