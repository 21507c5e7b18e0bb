"""The replicas that Ray has told this process of.

Ray may ship classes with copies of their module's globals; this module is imported, never copied,
so that all of them share the one table.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Member:
    url: str
    build: str
    """Digest of the settings with which it was started."""


@dataclass(slots=True)
class MemberTable:
    """Written by the thread in which Ray routes, read by that of the server."""

    version: int = 0
    """Another one after each change."""
    _running: dict[str, Member] = field(default_factory=dict)
    """By Ray's id of the replica."""
    _gone: dict[str, Member] = field(default_factory=dict)
    """By URL: Ray names no replica that it changes, stops or has lost, but it may still answer."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def replace(self, running: Mapping[str, Member]) -> None:
        with self._lock:
            if running == self._running:
                return
            self._gone |= {one.url: one for one in self._running.values()}
            self._running = dict(running)
            for one in running.values():
                self._gone.pop(one.url, None)
            self.version += 1

    def died(self, replica_id: str) -> None:
        with self._lock:
            gone = self._running.pop(replica_id, None)
            if gone is not None:
                self._gone[gone.url] = gone
                self.version += 1

    def running(self) -> dict[str, Member]:
        """Return by URL the replicas that Ray names."""
        with self._lock:
            return {one.url: one for one in self._running.values()}

    def gone(self) -> dict[str, Member]:
        with self._lock:
            return dict(self._gone)

    def forget(self, url: str) -> None:
        with self._lock:
            self._gone.pop(url, None)


TABLE = MemberTable()
