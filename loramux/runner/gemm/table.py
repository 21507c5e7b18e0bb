"""Tuned GEMM tables: the fastest algorithm per GPU and shape, shipped as data or made by `tune`.

A table belongs to one GPU name. cuBLASLt algorithm descriptors are only valid for the library
version that they were tuned with: with another version they are ignored, with a logged hint.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from loramux.models.default_model import cache_folder
from loramux.models.digests import read_sidecar, write_sidecar

_log = logging.getLogger(__name__)
SHIPPED_TABLES = Path(__file__).parent / "tuned"
# Tables of another format are ignored.
_FORMAT = 1

Key = tuple[int, int, torch.dtype]
"""(n, k, dtype)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedGemm:
    """What was fastest for GEMMs of first_m to m rows."""

    first_m: int
    m: int
    n: int
    k: int
    dtype: torch.dtype
    algorithm: bytes = b""
    """cuBLASLt descriptor; empty: torch's own choice."""
    num_splits: int = 1
    """Splits of K, where the next kernel reduces the partial sums; 1: no split-K."""
    split_algorithm: bytes = b""
    fused_swiglu: bool = False
    """The gate_up GEMM runs with its activation in one kernel."""

    @property
    def key(self) -> Key:
        return self.n, self.k, self.dtype


@dataclass(slots=True)
class TunedTable:
    gpu: str
    cublaslt_version: int
    _entries: dict[Key, list[TunedGemm]] = field(default_factory=dict)
    """Sorted by m."""

    def add(self, entries: Iterable[TunedGemm]) -> None:
        """Later entries replace earlier ones with the same m, n, k and dtype."""
        for entry in entries:
            kept = [e for e in self._entries.get(entry.key, []) if e.m != entry.m]
            self._entries[entry.key] = sorted([*kept, entry], key=lambda e: e.m)

    def find(self, m: int, n: int, k: int, dtype: torch.dtype) -> TunedGemm | None:
        entries = self._entries.get((n, k, dtype), [])
        index = bisect_left(entries, m, key=lambda entry: entry.m)
        if index == len(entries) or m < entries[index].first_m:
            return None
        return entries[index]

    def entries(self) -> list[TunedGemm]:
        return [entry for key in sorted(self._entries, key=str) for entry in self._entries[key]]

    def write(self, file: Path) -> None:
        write_sidecar(file, _to_json(self))


def find_tables(gpu: str, cublaslt_version: int) -> TunedTable:
    """Return the shipped table of the GPU, overlaid with the user's own."""
    table = TunedTable(gpu, cublaslt_version)
    shipped = read_table(SHIPPED_TABLES / f"{_slug(gpu)}.json")
    if shipped is not None and shipped.gpu == gpu:
        table.add(_usable_entries(shipped, cublaslt_version))
    own = read_table(user_table_file(gpu, cublaslt_version))
    if own is not None and own.gpu == gpu:
        table.add(_usable_entries(own, cublaslt_version))
    return table


def _usable_entries(table: TunedTable, cublaslt_version: int) -> list[TunedGemm]:
    """With another cuBLASLt only the choices of our own kernels stay."""
    if table.cublaslt_version == cublaslt_version:
        return table.entries()
    _log.info(
        "tuned GEMM algorithms for %s are of cuBLASLt %s and this is %s, so they are not used; "
        "`loramux tune --model DIR` tunes for this version",
        table.gpu,
        table.cublaslt_version,
        cublaslt_version,
    )
    ours = (entry for entry in table.entries() if entry.fused_swiglu)
    return [replace(e, algorithm=b"", num_splits=1, split_algorithm=b"") for e in ours]


def user_table_file(gpu: str, cublaslt_version: int) -> Path:
    return cache_folder() / "gemm" / f"{_slug(gpu)}-cublaslt-{cublaslt_version}.json"


def read_table(file: Path) -> TunedTable | None:
    """None: there is no such file, or it is not a table of this format."""
    content = read_sidecar(file)
    if content.get("format") != _FORMAT:
        if content:
            _log.warning("%s is not a tuned GEMM table of this version; ignored", file)
        return None
    try:
        table = TunedTable(str(content["gpu"]), int(content["cublaslt"]))
        table.add(_from_json(entry) for entry in content["gemms"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        _log.warning("%s is damaged (%r); ignored", file, error)
        return None
    return table


def _to_json(table: TunedTable) -> dict[str, object]:
    return {
        "format": _FORMAT,
        "gpu": table.gpu,
        "cublaslt": table.cublaslt_version,
        "gemms": [
            {
                "m": [entry.first_m, entry.m],
                "n": entry.n,
                "k": entry.k,
                "dtype": str(entry.dtype).removeprefix("torch."),
                "algorithm": entry.algorithm.hex(),
                "splits": entry.num_splits,
                "split_algorithm": entry.split_algorithm.hex(),
                "fused_swiglu": entry.fused_swiglu,
            }
            for entry in table.entries()
        ],
    }


def _from_json(content: dict[str, Any]) -> TunedGemm:
    dtype = getattr(torch, content["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{content['dtype']} is not a dtype")
    first_m, m = content["m"]
    return TunedGemm(
        first_m=int(first_m),
        m=int(m),
        n=int(content["n"]),
        k=int(content["k"]),
        dtype=dtype,
        algorithm=bytes.fromhex(content["algorithm"]),
        num_splits=int(content["splits"]),
        split_algorithm=bytes.fromhex(content["split_algorithm"]),
        fused_swiglu=bool(content["fused_swiglu"]),
    )


def _slug(gpu: str) -> str:
    return gpu.replace(" ", "-").lower()
