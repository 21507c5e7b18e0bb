"""What the kernels of a profile cost, step by step: each what it adds to the time of its step.

Kernels overlap: one may start while the one ahead of it ends, and wait. So a kernel counts from
where all ahead of it have ended to its own end, and a step's parts add up to the step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]
"""Of a Chrome trace: name, cat, ts and dur in microseconds, args with stream and grid."""

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAST_OF_STEP = ("_choose", "_draw")
# The first of these that a kernel's name contains says what it is; any other is "other".
KINDS = {
    "nvjet": "product",
    "gemm": "product",
    "splitK": "product",
    "product": "product",
    "gate_up": "product",
    "shrink": "shrink",
    "expand": "expand",
    "attend": "attention",
    "rotate_write": "rotation",
    "activate_mul": "activation",
    "add_norm": "norm",
    "_sum_parts": "sampling",
    "_choose": "sampling",
    "_draw": "sampling",
}


@dataclass(frozen=True, slots=True)
class StepShares:
    """One step: its rows, its length and its parts, in microseconds."""

    num_rows: int
    length: float
    parts: Counter[str]


def kind_of(event: Event) -> str:
    if event["cat"] != "kernel":
        return "copy"
    return next((kind for part, kind in KINDS.items() if part in event["name"]), "other")


def step_shares(events: Iterable[Event]) -> list[StepShares]:
    """Of the stream that has the most kernels; the first step is left out: it may be cut off."""
    work = [e for e in events if e.get("ph") == "X" and e.get("cat") in DEVICE_WORK]
    if not work:
        return []
    stream = Counter(e["args"].get("stream") for e in work).most_common(1)[0][0]
    ours = sorted((e for e in work if e["args"].get("stream") == stream), key=lambda e: e["ts"])
    steps = list(_split(ours))
    last = _end(steps[0]) if steps else 0.0
    shares = []
    for step in steps[1:]:
        shares.append(_share(step, last))
        last = max(last, _end(step))
    return shares


def _split(events: Sequence[Event]) -> Iterable[list[Event]]:
    step: list[Event] = []
    for event in events:
        step.append(event)
        if any(name in event["name"] for name in LAST_OF_STEP):
            yield step
            step = []


def _end(step: Sequence[Event]) -> float:
    return float(max(event["ts"] + event["dur"] for event in step))


def _share(step: Sequence[Event], began: float) -> StepShares:
    parts: Counter[str] = Counter()
    last = began
    for event in step:
        end = event["ts"] + event["dur"]
        parts["gaps"] += max(0.0, event["ts"] - last)
        parts[kind_of(event)] += max(0.0, end - max(last, event["ts"]))
        last = max(last, end)
    norms = [e["args"]["grid"][0] for e in step if kind_of(e) == "norm"]
    return StepShares(max(norms, default=0), last - began, parts)


def by_rows(steps: Iterable[StepShares], num_layers: int) -> list[dict[str, object]]:
    """A line for every number of rows: steps, their length, and microseconds a layer by part."""
    groups: dict[int, list[StepShares]] = defaultdict(list)
    for step in steps:
        groups[step.num_rows].append(step)
    lines: list[dict[str, object]] = []
    for num_rows, members in sorted(groups.items()):
        total: Counter[str] = sum((step.parts for step in members), Counter())
        mean_ms = sum(step.length for step in members) / len(members) / 1e3
        line: dict[str, object] = {"rows": num_rows, "steps": len(members), "ms a step": mean_ms}
        names = sorted({*KINDS.values(), "copy", "other", "gaps"})
        lines.append(line | {n: total[n] / len(members) / num_layers for n in names if total[n]})
    return lines
