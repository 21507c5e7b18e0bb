"""cuBLASLt by its C interface: GEMMs with an algorithm of the caller's choice.

torch takes the first algorithm that the library's heuristic returns for a shape.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_SCALE_FLOAT32 = 0
_COMPUTE_FLOAT32 = 68
_TRANSPOSE_A = 3
_NUM_BATCHES = 5
_BATCH_STRIDE = 6
_PREFER_WORKSPACE = 1
_PREFER_REDUCTIONS = 3
# Split-K inside the library reduces in the compute type, never in the output's.
_REDUCTIONS = 1 | 2
_MAX_RESULTS = 8
# The library assumes this alignment of every address.
_ALIGNMENT = 256
_CONFIG_SWIZZLE = 4
_CONFIG_CLUSTER = 8
# Number of CTAs by the library's cluster ids: 1x1, 2x1, 4x1, 1x2, 2x2, 4x2, 1x4.
_CLUSTERS = {2: 1, 3: 2, 4: 4, 5: 2, 6: 4, 7: 8, 8: 4}

Gemm = Callable[[Tensor, Tensor, Tensor], None]
"""(x, weight, y): y = x @ weight.T, or its split-K partial sums"""


_Problem = tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
"""Descriptor of the operation, and the layouts of weight, x and y."""


class CublasLtError(RuntimeError):
    pass


class _HeuristicResult(ctypes.Structure):
    _fields_ = [  # noqa: RUF012
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("num_waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@dataclass(frozen=True, slots=True)
class GemmShape:
    """y [m, n] = x [m, k] @ weight [n, k].T, all contiguous.

    With split-K, y [splits, m, n] float32 holds partial sums, each over its slice of k.
    """

    m: int
    n: int
    k: int
    dtype: torch.dtype
    num_splits: int = 1

    @property
    def y_dtype(self) -> torch.dtype:
        return self.dtype if self.num_splits == 1 else torch.float32

    def fits(self, x: Tensor, weight: Tensor) -> bool:
        return (
            x.stride() == (self.k, 1)
            and weight.is_contiguous()
            and x.data_ptr() % _ALIGNMENT == 0
            and weight.data_ptr() % _ALIGNMENT == 0
        )


class CublasLt:
    """One handle and one workspace, so its GEMMs must run one after another."""

    def __init__(self, library: Any, workspace: Tensor, stream: Callable[[], int]) -> None:
        """library: loaded by ctypes   stream: returns the address of the stream to launch into"""
        self._library = library
        self._workspace = workspace
        self._stream = stream
        self._handle = self._make("cublasLtCreate")
        self._kept: dict[GemmShape, _Problem] = {}
        """Descriptors that GEMMs use; never destroyed."""

    def candidates(self, shape: GemmShape) -> list[bytes]:
        """Algorithms that the heuristic returns for the shape and for somewhat larger ones.

        The first one for m = 640 may be the fastest for m = 320.
        """
        problem = self._problem(shape)
        found: dict[bytes, None] = {}
        for other, workspace_bytes in _neighbours(shape, self._workspace.nbytes):
            larger = self._problem(other)
            for algorithm in self._heuristic(larger, workspace_bytes):
                if algorithm not in found and self._can_run(problem, algorithm):
                    found[algorithm] = None
            self._destroy(larger)
        self._destroy(problem)
        return list(found)

    def variants(self, shape: GemmShape, algorithm: bytes) -> list[bytes]:
        """Return the algorithm with other cluster shapes and CTA swizzles.

        The heuristic returns one of them; on a power-throttled GPU another may be faster.
        """
        problem = self._problem(shape)
        found = []
        for cluster in _CLUSTERS:
            for swizzle in (0, 1):
                blob = (ctypes.c_uint64 * 8).from_buffer_copy(algorithm)
                self._configure(blob, _CONFIG_CLUSTER, ctypes.c_uint16(cluster))
                self._configure(blob, _CONFIG_SWIZZLE, ctypes.c_uint32(swizzle))
                if self._can_run(problem, bytes(blob)):
                    found.append(bytes(blob))
        self._destroy(problem)
        return found

    def cluster_size(self, algorithm: bytes) -> int:
        """CTAs of a cluster, which share their reads; 1 where that is not known."""
        blob = (ctypes.c_uint64 * 8).from_buffer_copy(algorithm)
        cluster, written = ctypes.c_uint16(), ctypes.c_size_t()
        status = self._library.cublasLtMatmulAlgoConfigGetAttribute(
            *(ctypes.byref(blob), ctypes.c_int(_CONFIG_CLUSTER), ctypes.byref(cluster)),
            *(ctypes.c_size_t(ctypes.sizeof(cluster)), ctypes.byref(written)),
        )
        return 1 if status else _CLUSTERS.get(cluster.value, 1)

    @property
    def version(self) -> int:
        return int(self._library.cublasLtGetVersion())

    def can_run(self, shape: GemmShape, algorithm: bytes) -> bool:
        """Whether an algorithm from a table is valid for the shape."""
        if len(algorithm) != ctypes.sizeof(ctypes.c_uint64 * 8):
            return False
        problem = self._problem(shape)
        can_run = self._can_run(problem, algorithm)
        self._destroy(problem)
        return can_run

    def gemm(self, shape: GemmShape, algorithm: bytes) -> Gemm:
        problem = self._kept.get(shape)
        if problem is None:
            problem = self._kept[shape] = self._problem(shape)
        blob = (ctypes.c_uint64 * 8).from_buffer_copy(algorithm)
        one, zero = ctypes.byref(ctypes.c_float(1.0)), ctypes.byref(ctypes.c_float(0.0))
        workspace = ctypes.c_void_p(self._workspace.data_ptr())
        num_bytes = ctypes.c_size_t(self._workspace.nbytes)
        description, a, b, c = problem

        def run(x: Tensor, weight: Tensor, y: Tensor) -> None:
            out = ctypes.c_void_p(y.data_ptr())
            stream = ctypes.c_void_p(self._stream())
            self._call(
                "cublasLtMatmul",
                *(self._handle, description, one, ctypes.c_void_p(weight.data_ptr()), a),
                *(ctypes.c_void_p(x.data_ptr()), b, zero, out, c, out, c),
                *(ctypes.byref(blob), workspace, num_bytes, stream),
            )

        return run

    def _problem(self, shape: GemmShape) -> _Problem:
        """Return the library is column-major: y.T [n, m] = weight @ x.T."""
        description = self._make(
            "cublasLtMatmulDescCreate", ctypes.c_int(_COMPUTE_FLOAT32), ctypes.c_int(_SCALE_FLOAT32)
        )
        self._set("cublasLtMatmulDescSetAttribute", description, _TRANSPOSE_A, ctypes.c_int(1))
        m, n, k = shape.m, shape.n, shape.k
        split = k // shape.num_splits
        a, b, c = (
            self._layout(dtype, (height, width), line, (shape.num_splits, stride))
            for dtype, height, width, line, stride in (
                (shape.dtype, split, n, k, split),
                (shape.dtype, split, m, k, split),
                (shape.y_dtype, n, m, n, n * m),
            )
        )
        return description, a, b, c

    def _layout(
        self, dtype: torch.dtype, size: tuple[int, int], line: int, batches: tuple[int, int]
    ) -> ctypes.c_void_p:
        """size: (height, width)   line: from one column to the next   batches: (count, stride)"""
        height, width = size
        layout = self._make(
            "cublasLtMatrixLayoutCreate",
            *(ctypes.c_int(_TYPES[dtype]), ctypes.c_uint64(height), ctypes.c_uint64(width)),
            ctypes.c_int64(line),
        )
        count, stride = batches
        if count > 1:
            setter = "cublasLtMatrixLayoutSetAttribute"
            self._set(setter, layout, _NUM_BATCHES, ctypes.c_int32(count))
            self._set(setter, layout, _BATCH_STRIDE, ctypes.c_int64(stride))
        return layout

    def _destroy(self, problem: _Problem) -> None:
        description, *layouts = problem
        self._call("cublasLtMatmulDescDestroy", description)
        for layout in layouts:
            self._call("cublasLtMatrixLayoutDestroy", layout)

    def _heuristic(self, problem: _Problem, workspace_bytes: int) -> list[bytes]:
        preference = self._make("cublasLtMatmulPreferenceCreate")
        setter = "cublasLtMatmulPreferenceSetAttribute"
        self._set(setter, preference, _PREFER_WORKSPACE, ctypes.c_size_t(workspace_bytes))
        self._set(setter, preference, _PREFER_REDUCTIONS, ctypes.c_uint32(_REDUCTIONS))
        results = (_HeuristicResult * _MAX_RESULTS)()
        count = ctypes.c_int()
        description, a, b, c = problem
        function = self._library.cublasLtMatmulAlgoGetHeuristic
        status = function(
            *(self._handle, description, a, b, c, c, preference, ctypes.c_int(_MAX_RESULTS)),
            *(results, ctypes.byref(count)),
        )
        # It is an error, too, if the heuristic finds nothing.
        found = [] if status else results[: count.value]
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        return [bytes(result.algorithm) for result in found if result.status == 0]

    def _can_run(self, problem: _Problem, algorithm: bytes) -> bool:
        blob = (ctypes.c_uint64 * 8).from_buffer_copy(algorithm)
        result = _HeuristicResult()
        description, a, b, c = problem
        status = self._library.cublasLtMatmulAlgoCheck(
            *(self._handle, description, a, b, c, c, ctypes.byref(blob), ctypes.byref(result)),
        )
        return bool(status == 0 and result.workspace_bytes <= self._workspace.nbytes)

    def _configure(self, blob: Any, attribute: int, value: Any) -> None:
        """Set an attribute if the algorithm has it; `_can_run` checks the result."""
        self._library.cublasLtMatmulAlgoConfigSetAttribute(
            ctypes.byref(blob),
            ctypes.c_int(attribute),
            ctypes.byref(value),
            ctypes.c_size_t(ctypes.sizeof(value)),
        )

    def _make(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._call(name, ctypes.byref(made), *arguments)
        return made

    def _set(self, name: str, target: ctypes.c_void_p, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self._call(name, target, ctypes.c_int(attribute), ctypes.byref(value), size)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise CublasLtError(f"{name} failed with status {status}.")


def _neighbours(shape: GemmShape, workspace_bytes: int) -> Iterator[tuple[GemmShape, int]]:
    """Yield the shape and somewhat larger ones, without and with a workspace."""
    for n in (shape.n, shape.n + shape.n // 8):
        yield replace(shape, n=n), 0
        for quarters in (4, 5, 6, 7, 8):
            yield replace(shape, m=-(-shape.m * quarters // 4), n=n), workspace_bytes
