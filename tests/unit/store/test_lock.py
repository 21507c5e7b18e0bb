from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from loramux.store.files import StagingArea, StoreLock, is_abandoned

ROOT = Path(__file__).resolve().parents[3]

HOLD_A_FOLDER = """
import sys
from pathlib import Path
from loramux.store.files import StagingArea, StoreLock
root = Path(sys.argv[1])
area = StagingArea(root, prefix="work-", lock=StoreLock(root / "lock"))
with area.folder() as folder:
    (folder / "half").write_bytes(b"x")
    print(folder, flush=True)
    sys.stdin.read()
"""


def make_area(folder: Path) -> StagingArea:
    return StagingArea(folder, prefix="work-", lock=StoreLock(folder / "lock"))


def test_threads_exclude_each_other(tmp_path: Path) -> None:
    lock = StoreLock(tmp_path / "lock")
    inside, most = [], []

    def work() -> None:
        for _ in range(50):
            with lock.held():
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1 and len(most) == 200


def test_an_error_inside_releases_the_lock(tmp_path: Path) -> None:
    lock = StoreLock(tmp_path / "lock")
    with pytest.raises(KeyError), lock.held():
        raise KeyError
    with lock.held():
        pass


def test_a_folder_is_gone_after_the_block_even_after_an_error(tmp_path: Path) -> None:
    area = make_area(tmp_path)
    with pytest.raises(KeyError), area.folder() as folder:
        (folder / "file").write_bytes(b"x")
        raise KeyError
    assert not folder.exists()


def test_a_folder_in_use_is_never_swept_and_one_of_a_dead_process_is(tmp_path: Path) -> None:
    area = make_area(tmp_path)
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD_A_FOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with child:
        assert child.stdout is not None
        theirs = Path(child.stdout.readline().strip())
        with area.folder() as ours:
            assert area.sweep() == 0
            assert (theirs / "half").exists() and ours.exists()
        child.send_signal(signal.SIGKILL)
    assert area.sweep() == 1
    assert not theirs.exists()


def test_what_only_looks_like_a_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "work-link").symlink_to(tmp_path / "precious")
    (tmp_path / "work-file").write_bytes(b"x")
    assert make_area(tmp_path).sweep() == 0
    assert (tmp_path / "precious").is_dir()
    assert not is_abandoned(tmp_path / "work-none")


def test_a_folder_whose_owner_ends_while_it_is_looked_at_was_not_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a sweep that fails because there is nothing left to remove."""
    folder = tmp_path / "work-1"
    folder.mkdir()
    monkeypatch.setattr("loramux.store.files.fcntl.flock", lambda *_: folder.rmdir())
    assert not is_abandoned(folder)
