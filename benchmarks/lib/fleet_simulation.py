"""Discrete-event simulation of a fleet: the router's own choice over replicas with three tiers.

A replica runs up to `slots` sequences; a step costs a base, a part for each sequence, and one for
each prompt token. Adapters load beside the batch: only their own requests wait. The router sees
reports of a given age, as it does of real replicas.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, count

from loramux.router.fleet import Fleet, Replica, key_of_name
from loramux.types.replica_report import ResidencyReport
from loramux.types.residency import Tier

REPORT_S = 0.25
MOVED_SHARE = 0.4
"""Share of the requests of a flash crowd."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of an 8B model on a GPU."""

    step_s: float = 0.0039
    sequence_s: float = 0.000027
    token_s: float = 0.00003
    slots: int = 48
    budget: int = 512
    host_s: float = 0.002
    disk_s: float = 0.06
    system_tokens: int = 300
    """Tokens of each adapter's own prompt, which its prefix cache has after the first request."""
    answer_tokens: int = 100

    def requests_per_s(self, load: float) -> float:
        """Return what brings a replica to a share of its capacity."""
        step_s = self.step_s + self.sequence_s * self.slots
        prompt_s = (self.system_tokens * 0.3 + 150) * self.token_s
        return load / (self.answer_tokens * step_s / self.slots + prompt_s)


@dataclass(frozen=True, kw_only=True)
class Setting:
    replicas: int = 4
    adapters: int = 200
    device: int = 32
    """Adapters on the device of a replica."""
    host: int = 80
    """Adapters in host memory of a replica."""
    zipf: float = 1.0
    load: float = 0.75
    requests: int = 12_000
    trace: str = "zipf"
    """zipf, drift, flash or loss"""
    report_s: float = REPORT_S
    seed: int = 1


@dataclass
class Result:
    policy: str
    first_token_s: list[float] = field(default_factory=list)
    found: Counter[str] = field(default_factory=Counter)
    served: Counter[str] = field(default_factory=Counter)
    num_retried: int = 0

    def percentile(self, share: float) -> float:
        times = sorted(self.first_token_s)
        return times[min(len(times) - 1, int(len(times) * share))]

    def share(self, tier: str) -> float:
        return self.found[tier] / max(1, sum(self.found.values()))

    @property
    def imbalance(self) -> float:
        """Returns the requests of the busiest replica over the mean."""
        return max(self.served.values()) * len(self.served) / sum(self.served.values())


@dataclass(eq=False)
class Job:
    number: int
    arrived_s: float
    adapter: int
    prompt: int
    answer: int
    is_counted: bool
    remaining: int = 0
    replica: SimulatedReplica | None = None


class Lru(OrderedDict[int, None]):
    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def use(self, adapter: int) -> int | None:
        """Return the adapter that had to go."""
        self[adapter] = None
        self.move_to_end(adapter)
        return self.popitem(last=False)[0] if len(self) > self._size else None


class SimulatedReplica:
    def __init__(self, known: Replica, setting: Setting, costs: Costs) -> None:
        self.known = known
        self.costs = costs
        self.device, self.host = Lru(setting.device), Lru(setting.host)
        self.moves: dict[int, int] = {}
        self.loading: dict[int, float] = {}
        self.ready: deque[Job] = deque()
        self.running: list[tuple[int, int, Job]] = []
        self.jobs: dict[int, Job] = {}
        self.num_steps = 0
        self.is_stepping = False
        self.waiting_tokens = 0
        self.generation = 0
        self.is_lost = False

    def use(self, adapter: int, now: float) -> str:
        """Brings an adapter to the device; returns the tier where it was."""
        tier = "device" if adapter in self.device else "host" if adapter in self.host else "disk"
        if tier != "device":
            seconds = self.costs.host_s if tier == "host" else self.costs.disk_s
            self.loading[adapter] = now + seconds
        gone = (self.host.use(adapter), self.device.use(adapter))
        self.moves[adapter] = Tier.DEVICE
        for other in gone:
            if other is not None and other not in self.device:
                self.moves[other] = Tier.HOST if other in self.host else Tier.DISK
        return tier

    def report(self, keys: list[str]) -> ResidencyReport:
        costs, since = self.costs, self.generation
        self.generation += len(self.moves)
        moves = {keys[adapter]: tier for adapter, tier in self.moves.items()}
        self.moves = {}
        return ResidencyReport(
            instance="simulated",
            since=since,
            generation=self.generation,
            full=since == 0,
            moves=moves,
            state="ready",
            base="base",
            base_digest="base",
            revision=0,
            open=len(self.jobs),
            waiting=len(self.ready),
            waiting_tokens=self.waiting_tokens,
            slots=costs.slots,
            step_s=costs.step_s + costs.sequence_s * len(self.running),
            token_s=costs.token_s + costs.step_s / costs.budget,
            tier_s=[costs.disk_s, costs.disk_s, costs.disk_s, costs.host_s, costs.host_s / 2, 0],
            free_pages=0,
            answer_tokens=costs.answer_tokens,
        )


Choose = Callable[["Simulation", Job], Replica]


class Simulation:
    def __init__(self, policy: str, setting: Setting, costs: Costs | None = None) -> None:
        self.setting = setting
        self.costs = costs or Costs()
        self.now = 0.0
        self.rng = random.Random(setting.seed)
        self.keys = [key_of_name(f"a{number}") for number in range(setting.adapters)]
        known = [Replica(name=f"r{number}", url="") for number in range(setting.replicas)]
        self.fleet = Fleet(known)
        self.replicas = {one.name: SimulatedReplica(one, setting, self.costs) for one in known}
        self.result = Result(policy)
        self.result.served.update(dict.fromkeys(self.replicas, 0))
        self._choose = POLICIES[policy]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def run(self) -> Result:
        end_s = 0.0
        for job in make_jobs(self.setting, self.costs):
            self._at(job.arrived_s, partial(self._arrive, job))
            end_s = job.arrived_s
        for number, replica in enumerate(list(self.replicas.values())):
            self._report_on(replica, end_s, number / len(self.replicas) * self.setting.report_s)
        if self.setting.trace == "loss":
            self._at(end_s / 2, self._lose_one)
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
        return self.result

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), event))

    def _report_on(self, replica: SimulatedReplica, end_s: float, wait_s: float) -> None:
        def report() -> None:
            if not replica.is_lost:
                known = replica.known
                told = replica.report(self.keys)
                self.fleet.apply(known, told, now=self.now, own=known.own)
                self._report_on(replica, end_s, self.setting.report_s)

        if self.now < end_s or not self.now:
            self._at(self.now + wait_s, report)

    def _lose_one(self) -> None:
        name = next(iter(self.replicas))
        lost = self.replicas.pop(name)
        lost.is_lost = True
        self.fleet.remove(name)
        self.result.served.pop(name)
        for job in list(lost.jobs.values()):
            self.result.num_retried += 1
            self._arrive(job)

    def _arrive(self, job: Job) -> None:
        known = self._choose(self, job)
        replica = job.replica = self.replicas[known.name]
        self.fleet.sent(known, f"a{job.adapter}", self.now)
        is_new_prefix = job.adapter not in replica.device
        tier = replica.use(job.adapter, self.now)
        if job.is_counted:
            self.result.found[tier] += 1
            self.result.served[known.name] += 1
        job.remaining = job.prompt + (self.costs.system_tokens if is_new_prefix else 0)
        replica.jobs[job.number] = job
        replica.waiting_tokens += job.remaining
        ready_s = max(self.now, replica.loading.get(job.adapter, 0.0))
        self._at(ready_s, lambda: self._enqueue(replica, job))

    def _enqueue(self, replica: SimulatedReplica, job: Job) -> None:
        if job.replica is replica and not replica.is_lost:
            replica.ready.append(job)
            if not replica.is_stepping:
                self._step(replica)

    def _step(self, replica: SimulatedReplica) -> None:
        costs, left, first = self.costs, self.costs.budget, list[Job]()
        while replica.ready and left and len(replica.running) + len(first) < costs.slots:
            job = replica.ready[0]
            taken = min(left, job.remaining)
            job.remaining -= taken
            left -= taken
            replica.waiting_tokens -= taken
            if not job.remaining:
                first.append(replica.ready.popleft())
        num_computed = costs.budget - left
        replica.is_stepping = bool(replica.running or first or num_computed)
        if replica.is_stepping:
            seconds = costs.step_s + costs.sequence_s * (len(replica.running) + len(first))
            seconds += costs.token_s * num_computed
            self._at(self.now + seconds, lambda: self._end_step(replica, first))

    def _end_step(self, replica: SimulatedReplica, first: list[Job]) -> None:
        if replica.is_lost:
            return
        replica.num_steps += 1
        for job in first:
            if job.is_counted:
                self.result.first_token_s.append(self.now - job.arrived_s)
            heapq.heappush(replica.running, (replica.num_steps + job.answer, job.number, job))
        while replica.running and replica.running[0][0] <= replica.num_steps:
            job = heapq.heappop(replica.running)[2]
            del replica.jobs[job.number]
            self.fleet.ended(replica.known)
        self._step(replica)


def make_jobs(setting: Setting, costs: Costs) -> Iterator[Job]:
    """Yield requests in order of arrival; the first third warms the tiers and is not counted."""
    rng = random.Random(setting.seed)
    weights = list(accumulate((rank + 1) ** -setting.zipf for rank in range(setting.adapters)))
    rate = costs.requests_per_s(setting.load) * setting.replicas
    now = 0.0
    for number in range(setting.requests):
        now += rng.expovariate(rate)
        share = number / setting.requests
        (adapter,) = rng.choices(range(setting.adapters), cum_weights=weights)
        if setting.trace == "drift":
            # Half of the popular adapters are others at the end.
            adapter = (adapter + int(share * setting.device * setting.replicas / 2)) % len(weights)
        is_crowd = setting.trace == "flash" and 0.5 < share < 0.8
        if is_crowd and rng.random() < MOVED_SHARE:
            adapter = setting.adapters // 2
        yield Job(
            number,
            now,
            adapter,
            prompt=rng.randint(50, 250),
            answer=1 + int(rng.expovariate(1 / costs.answer_tokens)),
            is_counted=share > 1 / 3,
        )


def _at_random(simulation: Simulation, job: Job) -> Replica:
    return simulation.rng.choice(list(simulation.fleet.replicas.values()))


def _two_choices(simulation: Simulation, job: Job) -> Replica:
    known = list(simulation.fleet.replicas.values())
    return min(simulation.rng.sample(known, min(2, len(known))), key=lambda one: one.load)


def _hashed(simulation: Simulation, job: Job) -> Replica:
    return simulation.fleet.homes(f"a{job.adapter}", now=simulation.now, count=1)[0]


def _by_seconds(simulation: Simulation, job: Job) -> Replica:
    ranked = simulation.fleet.ranked(
        f"a{job.adapter}", prompt_tokens=job.prompt, now=simulation.now
    )
    return next(ranked)


POLICIES: dict[str, Choose] = {
    "random": _at_random,
    "two choices": _two_choices,
    "hash": _hashed,
    "seconds": _by_seconds,
}
