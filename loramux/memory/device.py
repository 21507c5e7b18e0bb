"""Access to the memory, streams, events and graphs of the device.

Only this module and `gpus.py` use torch.cuda.
"""

from __future__ import annotations

import ctypes
import gc
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from loramux.adapters.packed.image import mapped_buffer, mapped_memory
from loramux.memory.host_memory import available_memory_bytes, total_memory_bytes

# About 300 us on a GPU.
_LAUNCH_CYCLES = 600_000
# A power-limited GPU lowers its clocks, but not within the first 100 ms.
_STEADY_S = 0.3
_STEADY_REPEATS = 4


def zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU they are mapped on first write, in huge pages where possible."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mapped_memory(math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def host_buffer(device: torch.device) -> Callable[[int, torch.dtype], Tensor]:
    """Return an allocator of buffers to be copied to the device: pinned if it is a GPU."""
    is_pinned = device.type == "cuda"

    def allocate(num_elements: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_elements, dtype=dtype, pin_memory=True)

    return allocate if is_pinned else mapped_buffer


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError)


def device_memory_bytes(device: torch.device) -> tuple[int, int]:
    """Return the free and the total bytes."""
    if device.type != "cuda":
        return available_memory_bytes(), total_memory_bytes()
    return torch.cuda.mem_get_info(device)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def release_cached(device: torch.device) -> None:
    """Return the memory that torch caches to the device, after all work has finished."""
    wait_for(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished all launched work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def load_library(name: str, device: torch.device) -> ctypes.CDLL | None:
    """Load a CUDA library in the version that torch uses; return None if there is none."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"lib{name}.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None


def stream_address(device: torch.device) -> int:
    """Return the handle of the calling thread's current stream, for C libraries."""
    return torch.cuda.current_stream(device).cuda_stream


def is_capturing() -> bool:
    """Return whether launches are being captured into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def run_seconds(run: Callable[[], object]) -> float:
    """Measures the device time of what `run` launches, which must take about 100 us at most."""
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    # The device starts after all launches, so that the launch rate of the host does not count.
    torch.cuda._sleep(_LAUNCH_CYCLES)  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def steady_state_seconds(device: torch.device, runs: Sequence[Callable[[], object]]) -> list[float]:
    """Measures the device time of each run at steady-state clocks, as during serving."""
    maker = GraphMaker(device)
    replays = [maker.make(partial(_repeat, run)) for run in runs]
    rounds: list[list[float]] = []
    began = time.perf_counter()
    while time.perf_counter() - began < _STEADY_S or len(rounds) < 2:
        events = []
        # An untimed replay first: an idle device would wait for the next launch.
        replays[-1]()
        for replay in replays:
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            pair[0].record()
            replay()
            pair[1].record()
            events.append(pair)
        torch.cuda.synchronize(device)
        rounds.append([begin.elapsed_time(end) / 1e3 / _STEADY_REPEATS for begin, end in events])
    late = rounds[len(rounds) // 2 :]
    return [statistics.median(times) for times in zip(*late, strict=True)]


def _repeat(run: Callable[[], object]) -> None:
    for _ in range(_STEADY_REPEATS):
        run()


class Fence:
    """A CUDA event in the calling thread's current stream."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Wait until the device has passed the event."""
        self.event.synchronize()


class StreamCopier:
    """Copies to the device concurrently with kernels, on one stream per copying thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads = threading.local()

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], *, after: Fence | None) -> None:
        """Copy the second of each pair to the first, after `after`; wait for the end."""
        stream = self._stream()
        # A blocking event does not spin: loads must not take cores from the step loop.
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        if after is not None:
            stream.wait_event(after.event)
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        done.record(stream)
        done.synchronize()

    def _stream(self) -> torch.cuda.Stream:
        stream: torch.cuda.Stream | None = getattr(self._threads, "stream", None)
        if stream is None:
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._threads.stream = stream
        return stream


class GraphMaker:
    """Captures functions as CUDA graphs; on a CPU it returns the functions themselves."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_real = device.type == "cuda"
        if self._is_real:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()

    @property
    def has_run(self) -> bool:
        """Returns whether make() runs the work once, which compiles its kernels."""
        return self._is_real

    def make(self, work: Callable[[], None]) -> Callable[[], None]:
        if not self._is_real:
            return work
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # Compiles and loads the kernels, which a capture must not do.
            work()
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        with _paused_collections(), capture:
            work()
        return graph.replay


@contextmanager
def _paused_collections() -> Iterator[None]:
    """Pause garbage collection: one that frees another graph would invalidate a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
