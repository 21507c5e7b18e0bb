"""A decoder's products: few rows by our own kernel, more by the fastest of a library's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from loramux.kernels.gpu.gemm.cublaslt import CublasLt, Product, ProductShape
from loramux.memory.device import (
    device_name,
    hot_seconds,
    is_capturing,
    load_library,
    run_seconds,
    stream_address,
)
from loramux.models.default_model import cache_folder
from loramux.models.digests import read_sidecar, write_sidecar
from loramux.runner.gemm.autotune import (
    WHOLE_BY_ANOTHER,
    Clock,
    Follower,
    Trial,
    Way,
    fastest,
    run_of,
    some_of,
    with_torch,
)

# Products of more rows are near the device's limit anyway; what is fastest for fewer in a row of
# products was slower in whole steps.
_SEARCHED_ROWS = range(16, 1025)
# With more rows a whole product has tiles enough for all multiprocessors; with fewer, parts are no
# faster than a product of small tiles.
_ROWS_IN_PARTS = range(97, 321)
# Steps of so many rows draw as much power as the card may, so it is never as fast as for a moment.
_HOT_ROWS = range(97, 321)
# Another name where another search would find other products: what an earlier one kept is not read.
_SEARCH = "hot-2"
_NUMBERS_OF_PARTS = (2,)
# The inputs of a part are a multiple of it.
_PART_INPUTS = 64
_WORKSPACE_BYTES = 32 * 2**20

# Float32 is for reference, by torch, unless a check adds it.
FEW_ROWS_DTYPES = {torch.float16, torch.bfloat16}

_AT_ONCE, _APART = "at once", "apart"
# As _SEARCH, of the kernel that does it at once.
_GATED = "gated-2"

Choice = TypeVar("Choice")


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


@dataclass(frozen=True, slots=True)
class Gated:
    """gate and up with their activation, by one kernel or by a product and one behind it."""

    fits: Callable[[Tensor, Tensor], bool]
    """May x and weight be given to `at_once`?"""
    at_once: Callable[[Tensor, Tensor], Tensor]
    """Of x and weight."""
    activate: Callable[[Tensor], Tensor]
    """Of what a product gives."""


@dataclass(frozen=True, slots=True)
class _Split:
    """A product in parts, each from its share of the inputs."""

    num_parts: int
    product: Product


class Products:
    """`linear` is torch's; in a search each new shape gets what is faster, and keeps it."""

    def __init__(  # noqa: PLR0913
        self,
        library: CublasLt | None,
        families: Sequence[Sequence[Tensor]],
        *,
        choices_file: Path | None = None,
        clock: Clock = Clock(run_seconds),  # noqa: B008
        few: FewRows | None = None,
        follower: Follower | None = None,
        gated: Gated | None = None,
    ) -> None:
        """families: weights that are used in turn, each with all rows that may be computed.

        choices_file: what earlier searches on such a device found
        clock: its `settle` decides where a card is hot
        follower: what stands behind `parts`; None: those are whole
        gated: None: never at once
        """
        self._few = few
        self._library = library
        self._families = {weight.data_ptr(): family for family in families for weight in family}
        self._choices_file = choices_file
        self._remembered = {} if choices_file is None else read_sidecar(choices_file)
        self._clock = clock
        self._follower = follower
        self._gated = gated
        self._chosen: dict[ProductShape, Product | None] = {}
        self._splits: dict[ProductShape, _Split | None] = {}
        self._at_once: dict[ProductShape, bool | None] = {}
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

    def parts(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As `linear`, for who can add parts up: whole, or float32 [parts, rows, outputs].

        A library's own sum of parts is one more launch, which the kernel behind it makes needless.
        """
        split = None
        is_few = self._few is not None and self._few.fits(x, weight)
        if self._library is not None and not is_few and bias is None and x.dtype != torch.float32:
            split = self._kept(self._splits, x, weight, partial(self._choose_split, self._library))
        if split is None:
            return self.linear(x, weight, bias)
        y = x.new_empty(split.num_parts, len(x), len(weight), dtype=torch.float32)
        split.product(x, weight, y)
        return y

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """gate and up with their activation, by one kernel where that is faster; None elsewhere.

        weight: gate's outputs, then up's
        """
        gated = self._gated
        if gated is None or bias is not None or not gated.fits(x, weight):
            return None
        return gated.at_once(x, weight) if self._is_faster(gated, x, weight) else None

    def _is_faster(self, gated: Gated, x: Tensor, weight: Tensor) -> bool:
        if self._library is None:
            return False
        choose = partial(self._choose_gated, self._library, gated)
        found = self._kept(self._at_once, x, weight, choose)
        return bool(found)

    def _choose_gated(
        self, library: CublasLt, gated: Gated, shape: ProductShape, x: Tensor, weight: Tensor
    ) -> bool:
        """True: at once."""
        family = self._families.get(weight.data_ptr())
        if family is None:
            return False
        name = f"{_name_of(shape)} {_GATED}"
        kept = self._remembered.get(name)
        if kept not in (_AT_ONCE, _APART):
            weights, y = some_of(family, len(weight)), x.new_empty(len(x), len(weight))
            product = self._product(library, x, weight) or with_torch

            def at_once(x: Tensor, weight: Tensor, y: Tensor) -> None:
                del y
                gated.at_once(x, weight)

            runs = {
                _APART: run_of(product, x, weights, y, partial(gated.activate, y)),
                _AT_ONCE: run_of(at_once, x, weights, y),
            }
            kept = self._remembered[name] = fastest(runs, self._clock_for(shape))
        return kept == _AT_ONCE

    def _kept(
        self,
        chosen: dict[ProductShape, Choice | None],
        x: Tensor,
        weight: Tensor,
        choose: Callable[[ProductShape, Tensor, Tensor], Choice | None],
    ) -> Choice | None:
        """What was chosen for the shape; a new one is chosen in a search alone."""
        shape = ProductShape(len(x), len(weight), x.shape[1], x.dtype)
        if not shape.fits(x, weight):
            return None
        if shape not in chosen and self._is_searching and not is_capturing():
            chosen[shape] = choose(shape, x, weight)
        return chosen.get(shape)

    def _choose_split(
        self, library: CublasLt, whole: ProductShape, x: Tensor, weight: Tensor
    ) -> _Split | None:
        """None: it stays whole."""
        family = self._families.get(weight.data_ptr())
        if self._follower is None or family is None or whole.num_rows not in _ROWS_IN_PARTS:
            return None
        name = f"{_name_of(whole)} in parts"
        kept = _split_of(self._remembered.get(name))
        if kept is None or not _can_split(library, whole, *kept):
            trial = Trial(library, whole, x, some_of(family, len(weight)), self._follower)
            kept = self._search_parts(trial, self._product(library, x, weight) or with_torch)
            self._remembered[name] = f"{kept[0]} {kept[1].hex()}"
        num_parts, algorithm = kept
        if num_parts == 1:
            return None
        shape = replace(whole, num_parts=num_parts)
        return _Split(num_parts, library.product(shape, algorithm))

    def _search_parts(self, trial: Trial, product: Product) -> Way:
        """Each way with what reads it; whole, it is as in `linear`."""
        runs = {WHOLE_BY_ANOTHER: trial.run(product)}
        for num_parts in _NUMBERS_OF_PARTS:
            if _can_be_cut(trial.whole, num_parts):
                runs |= trial.proposals(num_parts)
        return fastest(runs, self._clock_for(trial.whole), trial)

    def _clock_for(self, shape: ProductShape) -> Clock:
        return self._clock if shape.num_rows in _HOT_ROWS else replace(self._clock, settle=None)

    def _product(self, library: CublasLt, x: Tensor, weight: Tensor) -> Product | None:
        return self._kept(self._chosen, x, weight, partial(self._choose, library))

    def _choose(
        self, library: CublasLt, shape: ProductShape, x: Tensor, weight: Tensor
    ) -> Product | None:
        family = self._families.get(weight.data_ptr())
        if family is None or shape.num_rows not in _SEARCHED_ROWS:
            return None
        name = _name_of(shape)
        algorithm = _algorithm_of(self._remembered.get(name))
        if algorithm is None or (algorithm and not library.can_run(shape, algorithm)):
            algorithm = self._search(Trial(library, shape, x, some_of(family, len(weight))))
            self._remembered[name] = algorithm.hex()
        return library.product(shape, algorithm) if algorithm else None

    def _search(self, trial: Trial) -> bytes:
        """Empty: torch's own choice."""
        runs = {WHOLE_BY_ANOTHER: trial.run(with_torch), **trial.proposals()}
        return fastest(runs, self._clock_for(trial.whole), trial)[1]


def open_products(
    device: torch.device,
    families: Sequence[Sequence[Tensor]],
    follower: Follower | None = None,
    gated: Gated | None = None,
) -> Products:
    library, few = open_cublaslt(device), open_few_rows(device)
    if library is None:
        return Products(None, families, few=few, gated=gated)
    kind = f"{device_name(device)}-cublaslt-{library.version}".replace(" ", "-").lower()
    return Products(
        library,
        families,
        choices_file=cache_folder() / "products" / f"{kind}-{_SEARCH}.json",
        clock=Clock(run_seconds, partial(hot_seconds, device)),
        few=few,
        follower=follower,
        gated=gated,
    )


def open_few_rows(device: torch.device) -> FewRows | None:
    """None: on this device torch's products are as good, or ours do not run."""
    if device.type != "cuda":
        return None
    from loramux.kernels.gpu import pdl as launch_triton
    from loramux.kernels.gpu.gemm import small_m as product_triton

    if not launch_triton.supports_pdl(device.type):
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


def _name_of(shape: ProductShape) -> str:
    return f"{shape.num_rows}x{shape.num_outputs}x{shape.num_inputs} {shape.dtype}"


def _split_of(remembered: object) -> Way | None:
    """Number of parts, and their algorithm. None: nothing that can be used."""
    count, _, rest = remembered.partition(" ") if isinstance(remembered, str) else ("", "", "")
    num_parts = {str(number): number for number in (1, *_NUMBERS_OF_PARTS)}.get(count)
    algorithm = _algorithm_of(rest)
    return None if num_parts is None or algorithm is None else (num_parts, algorithm)


def _can_split(library: CublasLt, whole: ProductShape, num_parts: int, algorithm: bytes) -> bool:
    """Or leave it whole, by an algorithm that is kept elsewhere."""
    if num_parts == 1:
        return not algorithm
    if not algorithm or not _can_be_cut(whole, num_parts):
        return False
    return library.can_run(replace(whole, num_parts=num_parts), algorithm)


def _can_be_cut(whole: ProductShape, num_parts: int) -> bool:
    return num_parts > 1 and whole.num_inputs % (num_parts * _PART_INPUTS) == 0


def _algorithm_of(remembered: object) -> bytes | None:
    """None: nothing that can be used."""
    try:
        return bytes.fromhex(remembered) if isinstance(remembered, str) else None
    except ValueError:
        return None
