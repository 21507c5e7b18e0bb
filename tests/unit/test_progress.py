from __future__ import annotations

from pathlib import Path

from loramux.base.progress import SILENT
from loramux.store.store import ContentStore
from tests.store_factory import FolderTier, write_tiny


class Heard:
    def __init__(self) -> None:
        self.stages: list[tuple[str, int | None]] = []
        self.num_bytes = 0

    def begin(self, what: str, total_bytes: int | None) -> None:
        self.stages.append((what, total_bytes))
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes


def test_a_store_reports_all_copied_bytes(tmp_path: Path) -> None:
    heard = Heard()
    store = ContentStore(tmp_path / "store", sink=heard)
    folder = write_tiny(tmp_path / "a")
    cid = store.put_folder(folder)
    weights_bytes = (folder / "adapter_model.safetensors").stat().st_size
    assert heard.stages == [("Storing", weights_bytes)] and heard.num_bytes == weights_bytes
    store.copy_out(cid, tmp_path / "copy")
    all_bytes = sum(path.stat().st_size for path in folder.iterdir())
    assert heard.stages[-1] == ("Copying", all_bytes) and heard.num_bytes == all_bytes


def test_the_sink_is_optional(tmp_path: Path) -> None:
    SILENT.begin("Storing", None)
    SILENT.add(1)
    store = ContentStore(tmp_path / "store", tiers=[FolderTier(tmp_path / "far")])
    assert store.put_folder(write_tiny(tmp_path / "a"))
