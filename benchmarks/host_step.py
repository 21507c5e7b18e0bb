"""What the host does in a step while the device computes, in ms, part by part; no model, no GPU.

    python -m benchmarks.host_step [--adapters 0,1000] [--steps 300] [--runs 3]

The scheduler, pages, prefix cache and residency are real; tokens are drawn at random, and the
clock goes on by --step-ms with every step. The batch is full and as many requests wait. Parts in
parentheses lie inside of others. Of several runs, each part's fastest is shown. The last column is
a digest of all plans: it must not change when only the speed of the scheduler does.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_report import numbers
from benchmarks.report import Table, markdown
from benchmarks.workloads import SLORA_RANKS, first, rank_of, slora
from loramux.adapters.catalog import KnownAdapter
from loramux.adapters.packed.dense import DenseLayout
from loramux.adapters.packed.image import AdapterImage
from loramux.config.engine import SchedulerConfig
from loramux.kernels.gpu.attention.split_kv import Cut, cut_sequences
from loramux.kernels.ops import StepRows
from loramux.memory.host_tier import HostTier
from loramux.memory.loader import AdapterLoader
from loramux.memory.pages import PageAllocator
from loramux.memory.policies import make_policy
from loramux.memory.prefix import PrefixCache
from loramux.memory.reclaim import Reclaimer
from loramux.memory.records import LowerTiers
from loramux.memory.residency import AdapterResidency
from loramux.scheduler.scheduler import Scheduler
from loramux.types.request import Request
from loramux.types.sampling import SamplingParams
from loramux.types.step import StepPlan, StepResult

# An 8B model in 16 bits on an H200: a page of 16 tokens, and q,k,v,o of a rank in all layers.
PAGE_ELEMENTS = 32 * 2 * 8 * 128 * 16
RANK_ELEMENTS = 32 * (4 * 4096 + 2 * 4096 + 2 * 1024)
PROMPT_CUT = Cut(rows=32, tile_tokens=64, num_shares=16, least_tokens=512)
DECODE_CUT = Cut(rows=4, tile_tokens=64, num_shares=99)
BYTES_PER_S = 2e10
VOCABULARY = 128_256


def pages_for(num_elements: int) -> int:
    return -(-num_elements // PAGE_ELEMENTS)


class InlineExecutor(Executor):
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        fn(*args, **kwargs)
        return Future()


class EmptyAdapters:
    """A catalog of adapters that take the pages of real ones and have no bytes."""

    def get(self, cid: str) -> KnownAdapter:
        rank = rank_of(int(cid), SLORA_RANKS)
        elements = rank * RANK_ELEMENTS
        return KnownAdapter(cid, Path("no-folder"), elements, 2 * elements, rank, ())

    def read(self, cid: str) -> AdapterImage:
        elements = self.get(cid).num_elements
        layout = DenseLayout(places={}, num_elements=elements, key=())
        return AdapterImage(cid, layout, torch.zeros(1, dtype=torch.bfloat16).expand(elements))


@dataclass
class Timer:
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Of each step, part by part."""

    def begin_step(self) -> None:
        for times in self.seconds.values():
            times.append(0.0)

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        times = self.seconds.setdefault(part, [0.0])
        # Of this thread alone: others may have the core in between.
        clock = time.thread_time

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = clock()
            try:
                return function(*args, **kwargs)
            finally:
                times[-1] += clock() - began

        return timed

    def reset(self) -> None:
        for times in self.seconds.values():
            times.clear()


class Host:
    """An engine's memory and scheduler, without a pool of bytes."""

    def __init__(self, options: argparse.Namespace, cids: Sequence[str]) -> None:
        self.now = 0.0
        self.step_s = options.step_ms / 1e3
        self.timer = Timer()
        adapters = EmptyAdapters()
        adapter_pages = sum(pages_for(adapters.get(cid).num_elements) for cid in cids)
        self.pages = PageAllocator(options.pages + adapter_pages)
        self.room = Reclaimer(self.pages)
        policy = make_policy("cost")
        host = HostTier(
            budget_bytes=2**40,
            policy=make_policy("cost", is_lower_tier=True),
            cost_s=lambda cid, num_bytes: 0.01,
        )
        loader = AdapterLoader(
            source=adapters,
            disk=None,
            write_pages=lambda page_ids, image: None,
            executor=InlineExecutor(),
        )
        self.tiers = LowerTiers(catalog=adapters, host=host, disk=None, loader=loader)
        self.residency = AdapterResidency(
            pages=self.pages,
            room=self.room,
            tiers=self.tiers,
            policy=policy,
            pages_for=pages_for,
            clock=lambda: self.now,
        )
        self.prefixes = PrefixCache(
            pages=self.pages,
            reclaimer=self.room,
            policy=policy,
            block_tokens=16,
            clock=lambda: self.now,
            token_s=1e-4,
        )
        self.residency.prefixes = self.prefixes
        self.scheduler = Scheduler(
            SchedulerConfig(max_batch_tokens=options.batch_tokens, max_sequences=options.sequences),
            pages=self.pages,
            room=self.room,
            adapters=self.residency,
            prefixes=self.prefixes,
        )

    def wrap_parts(self) -> None:
        """Only now: what the adapters' loads took does not count."""
        wrap, scheduler = self.timer.wrap, self.scheduler
        places: list[tuple[str, Any, str]] = [
            ("(make_room)", self.room, "make_room"),
            ("(commit)", self.prefixes, "commit"),
            ("add", scheduler, "add"),
            ("plan", scheduler, "next_plan"),
            ("apply", scheduler, "apply"),
            ("launched", scheduler, "launched"),
        ]
        for part, holder, name in places:
            setattr(holder, name, wrap(part, getattr(holder, name)))

    def warm(self, cids: Sequence[str]) -> None:
        counters = self.tiers.device_counters
        self.tiers.step_s = self.step_s
        for cid in cids:
            assert self.residency.load_now([cid])
            # As a bus moves them, and the same in every run: evictions go by what a reload costs.
            counters.load_seconds = counters.load_bytes / BYTES_PER_S
            self.residency.release([cid])


def cut_items(plan: StepPlan) -> None:
    """The attention items of a step with prompts."""
    chunks = plan.chunks
    rows = StepRows.of_lengths([len(c.token_ids) for c in chunks], [c.start for c in chunks])
    is_fp12 = rows.lengths <= DECODE_CUT.rows
    for cut, members in ((PROMPT_CUT, ~is_fp12), (DECODE_CUT, is_fp12)):
        cut_sequences(rows, members, cut)


@dataclass
class Driver:
    host: Host
    requests: list[Request]
    backlog: int
    tokens: random.Random = field(default_factory=lambda: random.Random(1))
    flying: StepPlan | None = None
    digest: Any = field(default_factory=sha256)

    def __post_init__(self) -> None:
        self.requests.reverse()
        self.items = self.host.timer.wrap("items", cut_items)

    def step(self) -> None:
        """As Engine.step of a device that runs one step ahead."""
        host, scheduler = self.host, self.host.scheduler
        host.timer.begin_step()
        while self.requests and scheduler.num_waiting < self.backlog:
            scheduler.add(self.requests.pop(), host.now)
        plan = scheduler.next_plan(host.now)
        host.now += host.step_s
        if plan is not None:
            self.note(plan)
            if any(len(chunk.token_ids) > 1 for chunk in plan.chunks):
                self.items(plan)
            host.pages.num_launched += 1
        if self.flying is not None:
            host.pages.num_landed += 1
            scheduler.apply(self.flying, self.result(self.flying))
        if plan is not None:
            scheduler.launched(plan)
        self.flying = plan

    def note(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            what = (chunk.sequence_id, chunk.start, list(chunk.token_ids), list(chunk.page_ids))
            self.digest.update(repr(what).encode())

    def result(self, plan: StepPlan) -> StepResult:
        draw = self.tokens.randrange
        return StepResult(
            {c.sequence_id: [draw(VOCABULARY)] for c in plan.chunks if c.sample is not None}
        )


def make_requests(options: argparse.Namespace, cids: Sequence[str]) -> list[Request]:
    source = random.Random(0)
    trace = slora(num_adapters=max(1, len(cids)), alpha=1.0, requests_per_s=1.0)
    # A request has some 260 tokens of output, one for each step of a place.
    num_requests = options.sequences * (3 + (options.warm_up + options.steps) // 200)
    return [
        Request(
            request_id=str(number),
            prompt_token_ids=tuple(source.choices(range(VOCABULARY), k=arrival.prompt_tokens)),
            params=SamplingParams(
                temperature=0.0, max_tokens=arrival.output_tokens, ignore_eos=True
            ),
            selection=((cids[arrival.adapter], 1.0),) if cids else (),
        )
        for number, arrival in enumerate(first(trace, num_requests))
    ]


def run_once(options: argparse.Namespace, num_adapters: int) -> tuple[Timer, str]:
    cids = [str(number) for number in range(num_adapters)]
    host = Host(options, cids)
    host.warm(cids)
    host.wrap_parts()
    driver = Driver(host, make_requests(options, cids), options.sequences)
    gc.collect()
    gc.disable()
    for _ in range(options.warm_up):
        driver.step()
    host.timer.reset()
    for _ in range(options.steps):
        driver.step()
    gc.enable()
    return host.timer, driver.digest.hexdigest()[:12]


def measure(options: argparse.Namespace, num_adapters: int) -> dict[str, object]:
    runs = [run_once(options, num_adapters) for _ in range(options.runs)]
    row: dict[str, object] = {"adapters": num_adapters}
    parts = runs[0][0].seconds
    for part in parts:
        best = min(sum(timer.seconds[part]) for timer, _ in runs)
        row[part] = f"{1e3 * best / options.steps:.2f}"
    totals = [
        sorted(
            sum(times)
            for times in zip(
                *(t for part, t in timer.seconds.items() if part[0] != "("), strict=True
            )
        )
        for timer, _ in runs
    ]
    row["all"] = f"{1e3 * min(map(sum, totals)) / options.steps:.2f}"
    row["p99"] = f"{1e3 * min(total[int(0.99 * len(total))] for total in totals):.2f}"
    row["plans"] = runs[0][1]
    return row


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--adapters", type=numbers, default=[0, 1000], help="0: all requests ask the base")
    add("--sequences", type=int, default=256, help="that run, and that wait")
    add("--pages", type=int, default=12_000, help="beside those of the adapters")
    add("--batch-tokens", type=int, default=512)
    add("--step-ms", type=float, default=20.0)
    add("--warm-up", type=int, default=600, help="steps before the measured ones")
    add("--steps", type=int, default=300)
    add("--runs", type=int, default=3)
    return parser


def main() -> None:
    options = make_parser().parse_args()
    table: Table = [measure(options, number) for number in options.adapters]
    print("\n".join(markdown(table)))


if __name__ == "__main__":
    main()
