"""What a router knows of its replicas, and the choice among them by expected seconds.

Pure: no clock and no sockets of its own, so that simulations and tests run the same code.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b

from loramux.router.conduct import MAX_EJECTED_SHARE, Conduct
from loramux.router.named import parts_of
from loramux.router.recently_used import RecentlyUsed
from loramux.types.replica_report import USUAL_ANSWER_TOKENS, ResidencyReport
from loramux.types.residency import Tier, key_of_cid

BACK_OFF_S = 2.0
"""How long a replica is left out after a connection to it failed."""
STALE_S = 2.0
"""A report of this age is old enough for an alarm."""
SILENT_S = 4.0
"""Without a report for this long, a replica is chosen only where nothing else is left."""
FORGET_S = 10.0
"""Without a report for this long, the tiers of a replica are not believed any more."""
# An adapter that was sent to a replica this recently is expected to be loading there.
_RECENT_S = 5.0
_TIE_S = 0.001
# What a load pushes out has to be loaded again later: err upwards.
_LOAD_FACTOR = 1.5
# The share of a step that one more sequence costs the others.
_CROWD = 0.05
# Prompt tokens that are computed where the adapter is on the device: it may have the prefix.
_PREFIX_FACTOR = 0.3
# More replicas than this are not all compared.
_MAX_COMPARED = 16
_NUM_HOMES = 3
_NUM_LEAST_LOADED = 2
_MAX_NAMES = 100_000
_MAX_RECENT = 4096
_MASK = (1 << 64) - 1
_CID = re.compile(r"[a-z0-9]+:sha256:[0-9a-f]{64}")


def key_of_name(name: str) -> str:
    """Return the key of a name until an answer has told its CIDs."""
    return blake2b(name.encode(), digest_size=8).hexdigest()


def _mixed(salt: int, number: int) -> int:
    x = ((salt ^ number) * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 29)) * 0xBF58476D1CE4E5B9) & _MASK
    return x ^ (x >> 32)


class Gap(Exception):
    """A report that does not begin where the last one ended: a full one is needed."""


class State(StrEnum):
    UNKNOWN = "unknown"
    STARTING = "starting"
    READY = "ready"
    STALLED = "stalled"
    RESTARTING = "restarting"
    DRAINING = "draining"
    STOPPED = "stopped"


_LEAVING = (State.DRAINING, State.STOPPED)


@dataclass(slots=True, eq=False)
class Replica:
    name: str
    """Stable over restarts: it is hashed."""
    url: str
    state: State = State.UNKNOWN
    instance: str = ""
    generation: int = -1
    base: str = ""
    base_digest: str = ""
    revision: int = 0
    tiers: dict[str, int] = field(default_factory=dict)
    """By key."""
    open: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    slots: int = 48
    step_s: float = 0.005
    token_s: float = 0.00003
    answer_tokens: float = USUAL_ANSWER_TOKENS
    tier_s: tuple[float, ...] = (0.5, 0.5, 0.05, 0.005, 0.0025, 0.0)
    own: int = 0
    """Requests that are open through this router."""
    own_reported: int = 0
    """The same when the last report was asked for."""
    recent: dict[str, float] = field(default_factory=dict)
    """Key -> when this router last sent it there."""
    failed_until: float = 0.0
    reported_s: float = -1e9
    """When the last report came."""
    salt: int = 0
    conduct: Conduct = field(default_factory=Conduct)
    is_prepared: bool = True
    """Whether it has what it should have of the adapters that were loaded at run time."""
    lacking: frozenset[str] = frozenset()
    """Names that were loaded at run time and that it does not have."""

    def __post_init__(self) -> None:
        self.salt = int(key_of_name(self.name), 16)

    @property
    def id(self) -> str:
        """The name for clients, which does not tell the address."""
        return f"r-{self.salt & 0xFFFFFFFF:08x}"

    @property
    def load(self) -> int:
        """Open sequences: reported ones of others, and those of this router."""
        return max(0, self.open - self.own_reported) + self.own

    def tier_of(self, key: str, now: float) -> int:
        if now - self.reported_s > FORGET_S:
            return Tier.SOURCE
        tier = self.tiers.get(key, Tier.SOURCE)
        if tier < Tier.DEVICE and now - self.recent.get(key, -1e9) < _RECENT_S:
            return Tier.LOADING
        return tier

    def seconds(self, keys: Sequence[str], prompt_tokens: float, now: float) -> float:
        """Return the expected seconds to the first token: claimed ones, and what exceeded them."""
        return self.claimed_seconds(keys, prompt_tokens, now) + self.conduct.excess_s(now)

    def claimed_seconds(self, keys: Sequence[str], prompt_tokens: float, now: float) -> float:
        """Return the seconds to the first token that follow from the reports."""
        load = self.load
        tiers = [self.tier_of(key, now) for key in keys]
        if all(tier == Tier.DEVICE for tier in tiers):
            prompt_tokens *= _PREFIX_FACTOR
        wait = max(0, load + 1 - self.slots) * self.answer_tokens * self.step_s / self.slots
        prompt = (self.waiting_tokens + prompt_tokens) * self.token_s
        loads = sum(self.tier_s[tier] for tier in tiers)
        return wait + prompt + load * self.step_s * _CROWD + _LOAD_FACTOR * loads


@dataclass(frozen=True, slots=True)
class _Meaning:
    """What an answer has told of a name."""

    keys: tuple[str, ...]
    base_digest: str


class Fleet:
    """The replicas of one router, and the CIDs of the names that were asked for."""

    def __init__(self, replicas: Iterable[Replica] = ()) -> None:
        self.replicas = {replica.name: replica for replica in replicas}
        self._holders: dict[str, dict[str, Replica]] = {}
        self._names: RecentlyUsed[str, _Meaning] = RecentlyUsed(_MAX_NAMES)
        self._homes: RecentlyUsed[str, list[Replica]] = RecentlyUsed(_MAX_NAMES)

    def add(self, replica: Replica) -> None:
        self.replicas[replica.name] = replica
        self._homes.clear()

    def remove(self, name: str) -> None:
        replica = self.replicas.pop(name)
        self._forget_tiers(replica)
        self._homes.clear()

    def keys_of(self, name: str) -> tuple[str, ...]:
        """Return the keys of a name; empty for the base."""
        if not name:
            return ()
        known = self._names.get(name)
        return (key_of_name(name.partition("\0")[0]),) if known is None else known.keys

    def learn(self, name: str, cids: str, *, base_digest: str = "") -> None:
        """Record what a name meant, from an answer: a moved alias is corrected by the next one.

        `cids` is empty for a name of the base. What is no CID is not believed.
        """
        found = [cid for cid in cids.split(",") if cid]
        if all(_CID.fullmatch(cid) for cid in found):
            self._names.put(name, _Meaning(tuple(map(key_of_cid, found)), base_digest))

    def base_of(self, name: str) -> str:
        """Return the digest of the base that answered to a name; empty if none has."""
        known = self._names.get(name)
        return "" if known is None else known.base_digest

    def move(self, names: Collection[str], keys: tuple[str, ...]) -> None:
        """Record that these names of all callers now mean another adapter."""
        for known in [known for known in self._names if known.partition("\0")[0] in names]:
            self._names.put(known, _Meaning(keys, self.base_of(known)))
        for name in names:
            self._names.put(name, _Meaning(keys, self.base_of(name)))

    def apply(self, replica: Replica, report: ResidencyReport, *, now: float, own: int) -> None:
        """Apply a report; raise Gap.

        `own`: requests of this router that were open when the report was asked for.
        """
        if not report.full and (report.instance, report.since) != (
            replica.instance,
            replica.generation,
        ):
            raise Gap
        if report.full:
            self._forget_tiers(replica)
        for key, tier in report.moves.items():
            if tier > Tier.SOURCE:
                replica.tiers[key] = tier
                self._holders.setdefault(key, {})[replica.name] = replica
            elif replica.tiers.pop(key, None) is not None:
                self._drop_holder(key, replica)
        if replica.instance != report.instance:
            # Another process, which is not to blame for the one before.
            replica.conduct = Conduct()
        replica.instance, replica.generation = report.instance, report.generation
        replica.state = State(report.state)
        replica.base, replica.base_digest = report.base, report.base_digest
        replica.revision = report.revision
        replica.open, replica.waiting = report.open, report.waiting
        replica.waiting_tokens, replica.slots = report.waiting_tokens, max(1, report.slots)
        replica.step_s, replica.token_s = report.step_s, report.token_s
        replica.tier_s = tuple(report.tier_s)
        replica.answer_tokens = report.answer_tokens
        replica.own_reported, replica.reported_s = own, now

    def without_report(self, replica: Replica) -> None:
        """Record that what a replica reports cannot be used: nothing is known of it."""
        self._forget_tiers(replica)
        replica.state, replica.generation = State.UNKNOWN, -1

    def usable(self, now: float) -> list[Replica]:
        """Return the replicas that take requests; where there are none, those that might."""
        replicas = self.replicas.values()
        ready = [r for r in replicas if r.state is State.READY and r.failed_until <= now]
        heard = [r for r in ready if now - r.reported_s <= SILENT_S]
        prepared = [r for r in heard if r.is_prepared]
        good = [r for r in prepared if not r.conduct.is_out(now)]
        found = good or prepared or heard or ready
        return found or [r for r in replicas if r.state not in _LEAVING] or list(replicas)

    def ranked(self, name: str, *, prompt_tokens: float = 200, now: float) -> Iterator[Replica]:
        """Yield replicas, the one with the fewest expected seconds first, each once."""
        keys = self.keys_of(name)
        usable = self.usable(now)
        if any(replica.lacking for replica in usable):
            parts = parts_of(name.partition("\0")[0])
            usable = [r for r in usable if parts.isdisjoint(r.lacking)] or usable
        base = self.base_of(name)
        if base and len({replica.base_digest for replica in usable}) > 1:
            usable = [r for r in usable if r.base_digest == base] or usable
        compared = usable
        if len(usable) > _MAX_COMPARED:
            compared = self._worth_comparing(keys, usable)
        places = self._in_hash_order(keys, compared)
        costs = [
            (replica.seconds(keys, prompt_tokens, now) + _TIE_S * place, place, replica)
            for place, replica in enumerate(places)
        ]
        costs.sort()
        yielded = set()
        for _, _, replica in costs:
            yielded.add(replica.name)
            yield replica
        # Only retries come here.
        rest = [r for r in self.usable(now) if r.name not in yielded]
        yield from sorted(rest, key=lambda r: r.load)

    def homes(self, name: str, *, now: float, count: int = 2) -> list[Replica]:
        """Return where an adapter belongs by its hash."""
        return self.homes_of(self.keys_of(name), now=now, count=count)

    def homes_of(self, keys: Sequence[str], *, now: float, count: int) -> list[Replica]:
        usable = [r for r in self.usable(now) if r.state is State.READY]
        return self._in_hash_order(keys, usable)[:count]

    def holders(self, name: str, *, now: float) -> list[Replica]:
        """Return the ready replicas that have the adapter on the device or in host memory."""
        keys = self.keys_of(name)
        return [
            r
            for r in self.usable(now)
            if r.state is State.READY and keys and all(r.tier_of(k, now) >= Tier.HOST for k in keys)
        ]

    def sent(self, replica: Replica, name: str, now: float) -> None:
        replica.own += 1
        replica.conduct.begun(now)
        for key in self.keys_of(name):
            replica.recent.pop(key, None)
            replica.recent[key] = now
            if len(replica.recent) > _MAX_RECENT:
                del replica.recent[next(iter(replica.recent))]

    def ended(self, replica: Replica) -> None:
        replica.own -= 1
        replica.conduct.is_probed = False

    def judge(self, replica: Replica, *, is_fault: bool, now: float) -> None:
        """Record whether an answer was a fault of the replica, which several in a row eject."""
        if not is_fault:
            replica.conduct.good(now)
            return
        others = [one for one in self.replicas.values() if one is not replica]
        num_out = sum(now < one.conduct.ejected_until for one in others)
        may_eject = num_out + 1 <= MAX_EJECTED_SHARE * len(self.replicas)
        replica.conduct.fault(now, may_eject=may_eject)

    def failed(self, replica: Replica, now: float) -> None:
        replica.failed_until = now + BACK_OFF_S

    @property
    def revision(self) -> int:
        """The newest revision of the registry that any replica has reported."""
        return max((replica.revision for replica in self.replicas.values()), default=0)

    def _in_hash_order(self, keys: Sequence[str], replicas: Sequence[Replica]) -> list[Replica]:
        number = 0
        for key in keys:
            number ^= int(key, 16)
        if not keys:
            return sorted(replicas, key=lambda r: (r.load, r.salt))
        return sorted(replicas, key=lambda r: _mixed(r.salt, number), reverse=True)

    def _worth_comparing(self, keys: Sequence[str], usable: Sequence[Replica]) -> list[Replica]:
        """Return the holders, the homes by hash, and the least loaded replicas."""
        chosen: dict[str, Replica] = {}
        for key in keys:
            chosen |= self._holders.get(key, {})
        joined = ",".join(keys)
        homes = self._homes.get(joined)
        if homes is None:
            homes = self._in_hash_order(keys, list(self.replicas.values()))[: 2 * _NUM_HOMES]
            self._homes.put(joined, homes)
        chosen |= {home.name: home for home in homes}
        ids = set(map(id, usable))
        chosen = {name: r for name, r in chosen.items() if id(r) in ids}
        least = heapq.nsmallest(_NUM_LEAST_LOADED, usable, key=lambda r: r.load)
        return list((chosen | {r.name: r for r in least}).values())

    def _forget_tiers(self, replica: Replica) -> None:
        for key in replica.tiers:
            self._drop_holder(key, replica)
        replica.tiers = {}
        replica.recent = {}

    def _drop_holder(self, key: str, replica: Replica) -> None:
        holders = self._holders.get(key, {})
        holders.pop(replica.name, None)
        if not holders:
            self._holders.pop(key, None)
