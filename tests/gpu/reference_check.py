"""Compare every kernel call of every step in mixed traffic with its torch reference.

    python -m tests.gpu.reference_check [--dtypes float32,bfloat16] [--requests 100]

bfloat16 answers cannot be compared token by token, and the compiler may do what the interpreter
does not. So each step is computed twice: by its CUDA graph, and kernel by kernel, where the
reference gets the inputs of the kernel and their outputs are compared. In 16 bits the kernels of
large steps are used (TMA decode attention, SwiGLU-fused GEMM). The model is small and random, with
adapters of ranks 1 to 64, single and in weighted selections. It needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.lib.machine import describe_machine
from benchmarks.lib.report import Section, Table, names, parse_arguments, start_report
from loramux.engine import build_device
from loramux.engine.engine import Engine
from loramux.kernels.ops import AttendArgs, DeviceKernels, SequenceRows
from loramux.kernels.reference import attention as attention_reference
from loramux.kernels.reference import elementwise as elementwise_reference
from loramux.kernels.reference import lora_augmented as augmented_reference
from loramux.kernels.reference import lora_segmented
from loramux.kernels.reference import sampling as sampling_reference
from loramux.kernels.select import select_device_kernels
from loramux.runner.gemm.dispatch import GemmDispatcher
from loramux.runner.gpu_sampler import DeviceLogits
from loramux.types.request import Request
from tests.gpu.engine_check import (
    SMALL,
    mixed_requests,
    random_engine,
    run_all,
    write_adapters,
)

REFERENCES: dict[str, ModuleType] = {
    "elementwise": elementwise_reference,
    "swiglu": elementwise_reference,
    "augmented": augmented_reference,
    "sampling": sampling_reference,
}
OUTPUT_ARGUMENTS: dict[str, Callable[[Sequence[Any]], Tensor]] = {
    "add_norm": lambda args: args[1],
    "rotate_write": lambda args: args[2].storage,
}
"""The argument that a function writes to; other arguments may be overwritten with scratch data."""
SCALE = dataclasses.replace(SMALL, shape={**SMALL.shape, "head_dim": 64})
"""A model whose head dimension TMA decode attention supports."""
ERROR = "largest error of a row"
"""The column of the errors."""
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest error, relative to the norm of a row."""


class ReferenceCheck:
    """Wraps kernels so that each call is compared with its reference while the check is `on`."""

    def __init__(self) -> None:
        self.worst: dict[str, float] = {}
        self.wrong: list[str] = []
        self.num_calls = 0
        self._is_on = False
        self._step = ""
        self._num_rows = self._num_live = 0
        self._x: Tensor | None = None

    @contextmanager
    def on(self, step: str, *, num_rows: int, num_live: int) -> Iterator[None]:
        """Compare calls within this context; rows from num_live on are padding of the graph."""
        self._is_on, self._step = True, step
        self._num_rows, self._num_live = num_rows, num_live
        try:
            yield
        finally:
            self._is_on = False

    def wrap(self, kernels: DeviceKernels) -> DeviceKernels:
        found: dict[str, Any] = {
            name: self._wrap_all(name, getattr(kernels, name), reference)
            for name, reference in REFERENCES.items()
        }
        for name in ("attention", "lora"):
            found[name] = SimpleNamespace(**_public(getattr(kernels, name)))
        for name in ("plan", "plan_decodes", "plan_steps"):
            setattr(found["attention"], name, self._wrap_plan(getattr(kernels.attention, name)))
        found["lora"].shrink = self._wrap_shrink(kernels.lora)
        found["lora"].expand = self._wrap_expand(kernels.lora)
        found["lora"].expand_swiglu = self._wrap_expand_swiglu(kernels.lora)
        return dataclasses.replace(kernels, **found)

    def compare(self, name: str, found: Tensor, expected: Tensor) -> None:
        found, expected = self._live(found), self._live(expected)
        if not found.is_floating_point():
            error = float((found != expected).any())
        else:
            actual, wanted = (x.reshape(x.shape[0], -1).double() for x in (found, expected))
            norms = wanted.norm(dim=1)
            # The error of a nearly zero row is relative to the largest row.
            least = (1e-3 * norms.max()).clamp(min=torch.finfo(torch.float32).tiny)
            errors = (actual - wanted).norm(dim=1) / norms.maximum(least)
            error = float(errors.nan_to_num(nan=float("inf")).max())
        self.num_calls += 1
        self.worst[name] = max(self.worst.get(name, 0.0), error)
        if error > LIMITS.get(found.dtype, 0.0):
            self.wrong.append(f"{self._step}: {name} is {error:.1e} from its reference")

    def _live(self, x: Tensor) -> Tensor:
        return x[: self._num_live] if len(x) == self._num_rows else x

    def _wrap_all(self, name: str, module: Any, reference: ModuleType) -> SimpleNamespace:
        functions = _public(module)
        for own in [n for n in functions if _is_public(reference, n)]:
            functions[own] = self._wrap(f"{name}.{own}", functions[own], getattr(reference, own))
        return SimpleNamespace(**functions)

    def _wrap(
        self, name: str, kernel: Callable[..., Any], reference: Callable[..., Any]
    ) -> Callable[..., Any]:
        output_of = OUTPUT_ARGUMENTS.get(name.partition(".")[2])

        def run(*args: Any, **named: Any) -> Any:
            if not self._is_on:
                return kernel(*args, **named)
            before = copy.deepcopy((args, named))
            known = copy.deepcopy((args, named))
            expected = reference(*known[0], **known[1])
            found = kernel(*args, **named)
            for actual, wanted in zip(_tensors(found), _tensors(expected), strict=True):
                self.compare(name, actual, wanted)
            if output_of is not None:
                outputs = (output_of(of) for of in (args, known[0], before[0]))
                self._compare_changes(name, *outputs)
            return found

        return run

    def _compare_changes(self, name: str, found: Tensor, expected: Tensor, before: Tensor) -> None:
        """Compare the rows that the kernel or the reference has changed."""
        found, expected, before = (self._live(x) for x in (found, expected, before))
        is_same = _is_equal(found, before) & _is_equal(expected, before)
        rows = (~is_same).any(1)
        if rows.any():
            kept = [x[rows].masked_fill(is_same[rows], 0.0) for x in (found, expected)]
            self.compare(f"{name}, in place", *kept)

    def _wrap_plan(self, make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: _CheckedPlan(self, make(*args))

    def compare_attention(
        self, plan: Any, found: Tensor, storage: Tensor, q: Tensor, args: AttendArgs
    ) -> None:
        if self._is_on:
            sequences = sequences_of(plan, args.sliding_window)
            known = attention_reference.plan(sequences, plan.layout, q.device)
            expected = known.attend(storage.float(), q.float(), args)
            self.compare("attention.attend", found, expected.to(found.dtype))

    def _wrap_shrink(self, lora: Any) -> Callable[..., None]:
        """Keep x: the reference lays out h differently, so results are compared after expand."""

        def shrink(tables: Any, pool: Tensor, x: Tensor, layer: int, site: int) -> None:
            self._x = x.clone() if self._is_on else None
            lora.shrink(tables, pool, x, layer, site)

        return shrink

    def _wrap_expand(self, lora: Any) -> Callable[..., None]:
        def expand(tables: Any, pool: Tensor, y: Tensor, layer: int, site: int) -> None:
            known = self._shrunk(tables, pool, layer, site)
            # Copies only outside of graphs: PDL allows no kernel between shrink and expand.
            expected = None if known is None else y.clone()
            lora.expand(tables, pool, y, layer, site)
            if expected is not None:
                lora_segmented.expand(known, pool, expected, layer, site)
                self.compare("lora.shrink and expand", y, expected)

        return expand

    def _wrap_expand_swiglu(self, lora: Any) -> Callable[..., Tensor]:
        def expand_swiglu(  # noqa: PLR0913
            tables: Any, pool: Tensor, y: Tensor, activation: str, layer: int, site: int
        ) -> Tensor:
            known = self._shrunk(tables, pool, layer, site)
            before = None if known is None else y.clone()
            found: Tensor = lora.expand_swiglu(tables, pool, y, activation, layer, site)
            if before is not None:
                expected = lora_segmented.expand_swiglu(
                    known, pool, before, activation, layer, site
                )
                self.compare("lora.shrink and expand_swiglu", found, expected)
            return found

        return expand_swiglu

    def _shrunk(self, tables: Any, pool: Tensor, layer: int, site: int) -> Any:
        """Return tables with the reference's h of the last x, or None if nothing is compared."""
        if not self._is_on or self._x is None:
            return None
        known = copy.deepcopy(tables)
        lora_segmented.shrink(known, pool, self._x, layer, site)
        return known


@dataclasses.dataclass(frozen=True)
class _CheckedPlan:
    """A plan of attention whose results are compared with the reference."""

    check: ReferenceCheck
    plan: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plan, name)

    def first_rows(self, *args: Any) -> _CheckedPlan:
        return _CheckedPlan(self.check, self.plan.first_rows(*args))

    def attend(self, storage: Tensor, q: Tensor, args: AttendArgs) -> Tensor:
        found: Tensor = self.plan.attend(storage, q, args)
        self.check.compare_attention(self.plan, found, storage, q, args)
        return found


def sequences_of(plan: Any, window: int | None) -> list[SequenceRows]:
    """Recover the sequences of an attention plan from its work items."""
    rows: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for work in plan.work[window]:
        for sequence, first, count, position, *_ in work.items.tolist():
            if count:
                rows[sequence].append((first, first + count, position))
    found = []
    for sequence, parts in rows.items():
        first, _, position = min(parts)
        num_rows = max(end for _, end, _ in parts) - first
        num_pages = -(-(position + num_rows) // plan.layout.block_tokens)
        pages = plan.page_table[sequence, :num_pages].tolist()
        found.append(SequenceRows(first, num_rows, position, pages))
    return found


def _public(module: ModuleType) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not name.startswith("_")}


def _is_public(reference: ModuleType, name: str) -> bool:
    function = getattr(reference, name, None)
    return callable(function) and getattr(function, "__module__", "") == reference.__name__


def _is_equal(one: Tensor, other: Tensor) -> Tensor:
    return (one == other) | (one.isnan() & other.isnan())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif dataclasses.is_dataclass(value):
        yield from _tensors([getattr(value, f.name) for f in dataclasses.fields(value)])


def check_graphs(graphs: Any, feed: Any, check: ReferenceCheck, name: str) -> None:
    """Compute each step a second time, kernel by kernel, from the tokens of its graph."""
    launch, fill = graphs.launch, graphs.lora.fill
    last: list[Any] = []

    def recorded_fill(selections: Any, lengths: Any, num_rows: int, out: Any) -> Any:
        mode = fill(selections, lengths, num_rows, out)
        last[:] = [num_rows, mode]
        return mode

    @torch.inference_mode()
    def checked_launch(chunks: Sequence[Any], draws: Any) -> DeviceLogits | None:
        before = feed._words.clone()
        graphs.lora.fill = recorded_fill
        launched: DeviceLogits | None = launch(chunks, draws)
        graphs.lora.fill = fill
        if launched is None:
            return None
        logits = launched.logits
        num_rows, mode = last
        by_graph, after = logits.clone(), feed._words.clone()
        feed._words.copy_(before)
        num_live = sum(len(chunk.token_ids) for chunk in chunks)
        step = f"{name} of {num_rows} tokens, {mode}"
        with check.on(step, num_rows=num_rows, num_live=num_live):
            graphs._compute(num_rows, mode)
            check.compare("graph", by_graph, logits)
        feed._words.copy_(after)
        return launched

    graphs.launch = checked_launch


@contextmanager
def kernels_of_large_steps() -> Iterator[None]:
    """Use the kernels of large steps in small steps, and the SwiGLU-fused GEMM where it fits."""
    from loramux.kernels.gpu.attention import ops as attention
    from loramux.kernels.gpu.gemm import swiglu

    with (
        mock.patch.object(attention, "_TMA_CTAS_PER_SM", 0),
        mock.patch.object(swiglu, "SMALL_M_ROWS", 0),
        mock.patch.object(GemmDispatcher, "_is_fused_faster", return_value=True),
    ):
        yield


def check_traffic(
    make: Callable[[], Engine],
    requests: Callable[[Sequence[str]], Sequence[Request]],
    kernels: Callable[[torch.device], DeviceKernels] = select_device_kernels,
) -> ReferenceCheck:
    """Serve `requests`, made from the CIDs of the adapters, and compare every kernel call."""
    check = ReferenceCheck()
    module: Any = build_device
    own = module.select_device_kernels
    with kernels_of_large_steps():
        module.select_device_kernels = lambda device: check.wrap(kernels(device))
        try:
            engine = make()
        finally:
            module.select_device_kernels = own
        runner: Any = engine.executor
        check_graphs(runner.decode_graphs, runner._token_buffer, check, "decode")
        check_graphs(runner.prefill_graphs, runner._token_buffer, check, "step")
        run_all(engine, requests([known.cid for known in engine.catalog.known()]))
    engine.close()
    return check


def section_of(check: ReferenceCheck, dtype: str) -> Section:
    limit = LIMITS[getattr(torch, dtype)]
    rows: Table = [{"kernel": n, ERROR: e, "limit": limit} for n, e in sorted(check.worst.items())]
    wrong = sorted(set(check.wrong))
    notes = [f"{check.num_calls} comparisons, {len(check.wrong)} beyond the limit.", *wrong[:20]]
    return Section(title=f"Kernels against their reference, {dtype}", rows=rows, notes=tuple(notes))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dtypes", type=names(("float32", "bfloat16", "float16")))
    parser.add_argument("--requests", type=int, default=100)
    return parser


def main() -> None:
    arguments = parse_arguments(make_parser())
    if not torch.cuda.is_available():
        raise SystemExit("The kernels are compared on an NVIDIA GPU, and there is none.")
    dtypes = arguments.dtypes or ["float32", "bfloat16"]
    out = start_report("reference", arguments, describe_machine(", ".join(dtypes), "cuda"))
    num_wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folders = write_adapters(Path(name), SCALE)
        for dtype in dtypes:
            check = check_traffic(
                partial(random_engine, folders, dtype, reference=False, scale=SCALE),
                partial(mixed_requests, count=arguments.requests),
            )
            out.add(section_of(check, dtype))
            num_wrong += len(check.wrong)
    out.finish()
    if num_wrong:
        raise SystemExit(f"{num_wrong} comparisons are beyond their limit")


if __name__ == "__main__":
    main()
