from __future__ import annotations

from pathlib import Path

import pytest

from loramux.memory import host_memory
from loramux.memory.host_memory import (
    CgroupMemory,
    available_memory_bytes,
    cgroups,
    default_pool_bytes,
    total_memory_bytes,
)

V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def write_group(
    folder: Path, names: tuple[str, str, str], limit: str, used: int, cache: int
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\n")


def groups_of(folder: Path, membership: str) -> list[CgroupMemory]:
    (folder / "membership").write_text(membership)
    return cgroups(folder, folder / "membership")


def test_a_group_and_its_parents_limit_the_memory(tmp_path: Path) -> None:
    write_group(tmp_path / "jobs", V2, "8000", used=3000, cache=1000)
    write_group(tmp_path / "jobs" / "one", V2, "max", used=10, cache=0)
    assert groups_of(tmp_path, "0::/jobs/one\n") == [CgroupMemory(8000, 2000)]


def test_in_a_container_only_the_top_folder_exists(tmp_path: Path) -> None:
    write_group(tmp_path, V2, "4096", used=96, cache=100)
    assert groups_of(tmp_path, "0::/docker/abc\n") == [CgroupMemory(4096, 0)]


def test_groups_of_version_1_are_read(tmp_path: Path) -> None:
    write_group(tmp_path / "memory" / "job", V1, "500", used=200, cache=50)
    membership = "5:cpu,cpuacct:/x\n4:hugetlb,memory:/job\n0::/\n"
    assert groups_of(tmp_path, membership) == [CgroupMemory(500, 150)]


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert cgroups(tmp_path, tmp_path / "missing") == []
    write_group(tmp_path, V2, "nonsense", used=1, cache=0)
    assert groups_of(tmp_path, "0::/\n") == []


def test_the_lowest_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < available_memory_bytes() <= total_memory_bytes()
    limits = [CgroupMemory(2**62, 0), CgroupMemory(4096, 1024)]
    monkeypatch.setattr(host_memory, "cgroups", lambda: limits)
    assert total_memory_bytes() == 4096 and available_memory_bytes() == 3072
    assert default_pool_bytes() == 1024
    monkeypatch.setattr(host_memory, "cgroups", lambda: [CgroupMemory(10, 20)])
    assert available_memory_bytes() == 0
