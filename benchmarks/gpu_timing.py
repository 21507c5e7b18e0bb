"""Times of GPU work: replays of a CUDA graph, and what its kernels take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch.profiler import ProfilerActivity, profile


def capture(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph


def replay_times(
    work: Callable[[], object],
    *,
    num_replays: int = 20,
    num_rounds: int = 3,
    reset: Callable[[], None] | None = None,
) -> tuple[torch.cuda.CUDAGraph, float]:
    """The graph of `work`, and the mean seconds of a replay in the best of the rounds."""
    graph = capture(work)
    rounds = []
    for _ in range(num_rounds):
        if reset is not None:
            reset()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(num_replays):
            graph.replay()
        stop.record()
        torch.cuda.synchronize()
        rounds.append(start.elapsed_time(stop) / 1e3 / num_replays)
    return graph, min(rounds)


def time_by_kernel(work: Callable[[], object], top: int = 14) -> None:
    """Kernels that overlap count twice: the sum may exceed the time of the whole."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name].append(event.time_range.elapsed_us())
    ordered = sorted(times.items(), key=lambda item: -sum(item[1]))
    rows = [
        [name[:70], len(us), f"{sum(us) / len(us):.2f}", f"{sum(us):.0f}"]
        for name, us in ordered[:top]
    ]
    print_table(["kernel", "count", "mean us", "total us"], rows)


def print_table(header: Sequence[object], rows: Sequence[Sequence[object]]) -> None:
    lines = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
