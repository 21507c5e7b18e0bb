"""The host's memory, as far as this process may use it: control groups limit containers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CGROUPS, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
_DEFAULT_POOL_LIMIT = 4 * 2**30


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """The limit of a control group and what its processes use, without reclaimable file cache."""

    limit_bytes: int
    used_bytes: int


def total_memory_bytes() -> int:
    """Return the machine's memory, or the lowest limit of this process's control groups."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([installed, *(group.limit_bytes for group in cgroups())])


def available_memory_bytes() -> int:
    """Memory that can be allocated without swapping, within this process's control groups."""
    rooms = [group.limit_bytes - group.used_bytes for group in cgroups()]
    return max(0, min([_machine_available_bytes(), *rooms]))


def default_pool_bytes() -> int:
    """Return the size of a page pool in host memory, if none is given."""
    return min(total_memory_bytes() // 4, _DEFAULT_POOL_LIMIT)


def cgroups(root: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> list[CgroupMemory]:
    """Return the control groups (version 1 or 2) of this process that limit its memory."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file")
            top = root
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            top = root / "memory"
        else:
            continue
        groups = (_read_group(folder, *names) for folder in _lineage(top, path))
        found += [group for group in groups if group is not None]
    return found


def _lineage(top: Path, path: str) -> Iterator[Path]:
    """Yield the folder of a group and those of its parents; in a container only the top
    may exist.
    """
    folder = top / path.lstrip("/")
    yield folder
    while folder != top and top in folder.parents:
        folder = folder.parent
        yield folder


def _read_group(folder: Path, limit: str, usage: str, cache: str) -> CgroupMemory | None:
    try:
        text = (folder / limit).read_text().strip()
        if text == "max":
            return None
        used = int((folder / usage).read_text())
        fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return CgroupMemory(int(text), max(0, used - int(fields.get(cache, 0))))
    except (OSError, ValueError):
        return None


def _machine_available_bytes() -> int:
    try:
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
