"""Which of several weighted targets a key belongs to: always the same one, everywhere."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

from loramux.errors import InvalidRequest
from loramux.registry.records import Target

MAX_WEIGHT = 1_000_000
MAX_TARGETS = 16
DIGEST_BITS = 64


def choose(targets: Iterable[tuple[str, int]], *, salt: str, key: str) -> str:
    """Weighted rendezvous hashing: a change of one target's weight moves keys to or from that
    target only, and the order of the targets does not count.
    """
    return max((score(salt, key, version, weight), version) for version, weight in targets)[1]


def score(salt: str, key: str, version: str, weight: int) -> float:
    text = "\0".join((salt, version, key))
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    # In (0, 1): neither end is reached, so that the logarithm is finite and not zero.
    uniform = (int.from_bytes(digest[: DIGEST_BITS // 8], "big") >> 11) + 0.5
    return -weight / math.log(uniform / 2.0**53)


def check_targets(weights: Iterable[tuple[str, int]]) -> tuple[Target, ...]:
    targets = tuple(Target(version, weight) for version, weight in sorted(weights))
    if not 1 <= len(targets) <= MAX_TARGETS:
        raise InvalidRequest(f"A split has 1 to {MAX_TARGETS} versions, not {len(targets)}.")
    for target in targets:
        if type(target.weight) is not int or not 1 <= target.weight <= MAX_WEIGHT:
            raise InvalidRequest(
                f"The weight of {target.version} must be an integer from 1 to {MAX_WEIGHT}, such "
                f"as 90 beside 10; found {target.weight!r}."
            )
    return targets
