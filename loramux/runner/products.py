"""A decoder's products: few rows by our own kernel, more by the fastest of a library's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from loramux.kernels.cublaslt import CublasLt, CublasLtError, Product, ProductShape
from loramux.memory.device import (
    device_name,
    is_capturing,
    load_library,
    run_seconds,
    stream_address,
)
from loramux.models.default_model import cache_folder
from loramux.models.digests import read_sidecar, write_sidecar

# Products of more rows are near the device's limit anyway; what is fastest for fewer in a row of
# products was slower in whole steps.
_SEARCHED_ROWS = range(16, 1025)
# As much is read in one measurement that no weight stays in the cache until the next one.
_MIN_BYTES_READ = 192 * 2**20
_WORKSPACE_BYTES = 32 * 2**20
_NUM_FINALISTS = 5
_NUM_ROUNDS = 4
# Whatever is closer to torch's own choice than this may be noise.
_MIN_GAIN = 0.01

# Float32 is for reference, by torch, unless a check adds it.
FEW_ROWS_DTYPES = {torch.float16, torch.bfloat16}

Name = TypeVar("Name")
Measure = Callable[[Callable[[], None]], float]
"""Runs it once; seconds, or whatever can be compared."""


@dataclass(frozen=True, slots=True)
class FewRows:
    """Products that are better than a library's as long as there are few rows."""

    product: Product
    most_rows: int

    def fits(self, x: Tensor, weight: Tensor) -> bool:
        return (
            len(x) <= self.most_rows
            and x.dtype in FEW_ROWS_DTYPES
            and x.is_contiguous()
            and weight.is_contiguous()
        )


class Products:
    """`linear` is torch's; in a search each new shape gets what is faster, and keeps it."""

    def __init__(
        self,
        library: CublasLt | None,
        families: Sequence[Sequence[Tensor]],
        *,
        choices_file: Path | None = None,
        measure: Measure = run_seconds,
        few: FewRows | None = None,
    ) -> None:
        """families: weights that are used in turn, each with all rows that may be computed.

        choices_file: what earlier searches on such a device found
        """
        self._few = few
        self._library = library
        self._families = {weight.data_ptr(): family for family in families for weight in family}
        self._choices_file = choices_file
        self._remembered = {} if choices_file is None else read_sidecar(choices_file)
        self._measure = measure
        self._chosen: dict[ProductShape, Product | None] = {}
        self._is_searching = False

    @contextmanager
    def searching(self) -> Iterator[None]:
        """What runs inside, before it is captured, may take the time to search."""
        before = self._is_searching
        known = dict(self._remembered)
        self._is_searching = self._library is not None
        try:
            yield
        finally:
            self._is_searching = before
        if self._choices_file is not None and self._remembered != known:
            # Without it the next start searches again, no more.
            with suppress(OSError):
                write_sidecar(self._choices_file, self._remembered)

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """x @ weight.T + bias. x [rows, inputs]   weight [outputs, inputs]"""
        product = None
        if self._few is not None and bias is None and self._few.fits(x, weight):
            product = self._few.product
        elif self._library is not None and bias is None and x.dtype != torch.float32:
            product = self._product(self._library, x, weight)
        if product is None:
            if out is None:
                return F.linear(x, weight, bias)
            return torch.mm(x, weight.t(), out=out)
        y = x.new_empty(len(x), len(weight)) if out is None else out
        product(x, weight, y)
        return y

    def _product(self, library: CublasLt, x: Tensor, weight: Tensor) -> Product | None:
        shape = ProductShape(len(x), len(weight), x.shape[1], x.dtype)
        if not shape.fits(x, weight):
            return None
        if shape not in self._chosen and self._is_searching and not is_capturing():
            self._chosen[shape] = self._choose(library, shape, x, weight)
        return self._chosen.get(shape)

    def _choose(
        self, library: CublasLt, shape: ProductShape, x: Tensor, weight: Tensor
    ) -> Product | None:
        family = self._families.get(weight.data_ptr())
        if family is None or shape.num_rows not in _SEARCHED_ROWS:
            return None
        name = f"{shape.num_rows}x{shape.num_outputs}x{shape.num_inputs} {shape.dtype}"
        algorithm = _algorithm_of(self._remembered.get(name))
        if algorithm is None or (algorithm and not library.can_run(shape, algorithm)):
            algorithm = self._search(library, shape, x, _some(family, len(weight)))
            self._remembered[name] = algorithm.hex()
        return library.product(shape, algorithm) if algorithm else None

    def _search(
        self, library: CublasLt, shape: ProductShape, x: Tensor, weights: Sequence[Tensor]
    ) -> bytes:
        """Empty: torch's own choice."""
        y = x.new_empty(shape.num_rows, shape.num_outputs)

        def with_torch(x: Tensor, weight: Tensor, y: Tensor) -> None:
            torch.mm(x, weight.t(), out=y)

        products: dict[bytes, Product] = {b"": with_torch}
        for algorithm in library.proposals(shape):
            products[algorithm] = library.product(shape, algorithm)
        runs = {name: _run_of(product, x, weights, y) for name, product in products.items()}
        return fastest(runs, self._measure)


def open_products(device: torch.device, families: Sequence[Sequence[Tensor]]) -> Products:
    library, few = open_cublaslt(device), open_few_rows(device)
    if library is None:
        return Products(None, families, few=few)
    name = f"{device_name(device)}-cublaslt-{library.version}.json".replace(" ", "-").lower()
    choices_file = cache_folder() / "products" / name
    return Products(library, families, choices_file=choices_file, few=few)


def open_few_rows(device: torch.device) -> FewRows | None:
    """None: on this device torch's products are as good, or ours do not run."""
    if device.type != "cuda":
        return None
    from loramux.kernels import launch_triton, product_triton

    if not launch_triton.overlaps_launches(device.type):
        return None
    if launch_triton.shared_bytes(device.type) < product_triton.SHARED_BYTES:
        return None
    return FewRows(product_triton.product, product_triton.MOST_ROWS)


def open_cublaslt(device: torch.device) -> CublasLt | None:
    """None: this device has none."""
    library = load_library("cublasLt", device)
    if library is None:
        return None
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return CublasLt(library, workspace, partial(stream_address, device))


def fastest(runs: dict[Name, Callable[[], None]], measure: Measure) -> Name:
    """The name of the fastest run; that of the first, if no other is clearly faster."""
    first = next(iter(runs))
    times: dict[Name, float] = {}
    for name, run in runs.items():
        try:
            # Loads the kernel.
            run()
            times[name] = measure(run)
        except CublasLtError:
            continue
    finalists = {first, *sorted(times, key=times.__getitem__)[:_NUM_FINALISTS]}
    for _ in range(_NUM_ROUNDS):
        for name in finalists:
            times[name] = min(times[name], measure(runs[name]))
    best = min(finalists, key=times.__getitem__)
    return best if times[best] < (1 - _MIN_GAIN) * times[first] else first


def _algorithm_of(remembered: object) -> bytes | None:
    """None: nothing that can be used."""
    try:
        return bytes.fromhex(remembered) if isinstance(remembered, str) else None
    except ValueError:
        return None


def _some(family: Sequence[Tensor], num_outputs: int) -> list[Tensor]:
    """As many weights as fill a cache, or all that there are."""
    num_bytes = family[0][:num_outputs].nbytes
    count = max(2, -(-_MIN_BYTES_READ // num_bytes))
    return [weight[:num_outputs] for weight in family[:count]]


def _run_of(
    product: Product, x: Tensor, weights: Sequence[Tensor], y: Tensor
) -> Callable[[], None]:
    def run() -> None:
        for weight in weights:
            # As in a step, a product waits for the small kernel that writes x.
            x.mul_(1)
            product(x, weight, y)

    return run
