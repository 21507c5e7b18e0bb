"""The real router with another choice of replicas, to compare with.

python -m benchmarks.lib.policy_router POLICY PORT URL...
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import uvicorn

from loramux.router.app import RouterApp, RouterOptions
from loramux.router.fleet import Fleet, Replica
from loramux.router.members import StaticMembers

POLICIES = ("random", "two choices", "hash", "seconds")


class PolicyFleet(Fleet):
    def __init__(self, policy: str) -> None:
        super().__init__()
        self._policy = policy

    def ranked(self, name: str, *, prompt_tokens: float = 200, now: float) -> Iterator[Replica]:
        if self._policy == "seconds":
            return super().ranked(name, prompt_tokens=prompt_tokens, now=now)
        usable = self.usable(now)
        random.shuffle(usable)
        if self._policy == "two choices":
            usable[:2] = sorted(usable[:2], key=lambda one: one.own)
        elif self._policy == "hash":
            usable = self.homes(name, now=now, count=len(usable))
        return iter(usable)


def main() -> None:
    policy, port, *urls = sys.argv[1:]
    app = RouterApp(
        StaticMembers(urls), RouterOptions(is_status_open=True), fleet=PolicyFleet(policy)
    )
    uvicorn.run(app, port=int(port), log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
