from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loramux.kernels.gpu.gemm.cublaslt import CublasLtError, ProductShape
from loramux.runner.gemm import dispatch as products
from loramux.runner.gemm.autotune import Clock
from loramux.runner.gemm.dispatch import (
    FewRows,
    Products,
    open_cublaslt,
    open_few_rows,
    open_products,
)

FAILS = b"fails"
# Small enough for products on a CPU that has no bfloat16.
ROWS = 16


class Library:
    """As CublasLt, which needs a GPU: algorithms are named by the seconds that they take."""

    def __init__(self, *names: bytes) -> None:
        self.names = names
        self.asked: list[ProductShape] = []
        self.ran: list[bytes] = []
        self.others: dict[bytes, tuple[bytes, ...]] = {}

    def proposals(self, shape: ProductShape) -> list[bytes]:
        self.asked.append(shape)
        return list(self.names)

    def variations(self, shape: ProductShape, algorithm: bytes) -> list[bytes]:
        del shape
        return [algorithm, *self.others.get(algorithm, ())]

    def num_sharing(self, algorithm: bytes) -> int:
        return len(algorithm)

    def can_run(self, shape: ProductShape, algorithm: bytes) -> bool:
        del shape
        return algorithm in self.names

    def product(self, shape: ProductShape, algorithm: bytes) -> Callable[..., None]:
        def run(x: Tensor, weight: Tensor, y: Tensor) -> None:
            if algorithm == FAILS:
                raise CublasLtError(f"no such algorithm for {shape}")
            self.ran.append(algorithm)
            torch.mm(x, weight.t(), out=y)

        return run


def make(library: Library, choices_file: Path | None = None) -> tuple[Products, list[Tensor]]:
    weights = [aligned(12, 16) for _ in range(3)]

    def measure(run: Callable[[], None]) -> float:
        library.ran.clear()
        run()
        return float(library.ran[0]) if library.ran else 1.0

    return Products(library, [weights], choices_file=choices_file, clock=Clock(measure)), weights  # type: ignore[arg-type]


def aligned(num_rows: int, size: int) -> Tensor:
    """A CPU gives 64 bytes, the library wants 256."""
    buffer = torch.randn(num_rows * size + 128).to(torch.bfloat16)
    start = -buffer.data_ptr() % 256 // 2
    return buffer[start : start + num_rows * size].view(num_rows, size)


def search(products: Products, x: Tensor, weight: Tensor) -> Tensor:
    with products.searching():
        return products.linear(x, weight)


def test_a_search_keeps_the_fastest_and_asks_once() -> None:
    library = Library(b"0.9", b"0.5", b"0.7")
    products, weights = make(library)
    x = aligned(ROWS, 16)
    y = search(products, x, weights[0])
    assert torch.equal(y, F.linear(x, weights[0]))
    library.ran.clear()
    for weight in weights:
        assert torch.equal(products.linear(x, weight), F.linear(x, weight))
    assert library.ran == [b"0.5"] * 3
    assert len(library.asked) == 1


@pytest.mark.parametrize("names", [(), (b"1.2",), (b"0.995",), (FAILS,)])
def test_torch_stays_where_nothing_is_clearly_faster(names: tuple[bytes, ...]) -> None:
    library = Library(*names)
    products, weights = make(library)
    x = aligned(ROWS, 16)
    search(products, x, weights[0])
    library.ran.clear()
    assert torch.equal(products.linear(x, weights[1]), F.linear(x, weights[1]))
    assert library.ran == []


def test_steps_outside_a_search_do_not_wait_for_one() -> None:
    library = Library(b"0.5")
    products, weights = make(library)
    products.linear(aligned(ROWS, 16), weights[0])
    assert library.asked == []


def test_what_the_library_cannot_take_goes_to_torch() -> None:
    """Catches a wrong answer for rows with gaps, biases, float32 and strange weights."""
    library = Library(b"0.5")
    products, weights = make(library)
    weight, bias = weights[0], torch.randn(12).to(torch.bfloat16)
    gaps = aligned(ROWS, 32)[:, :16]
    search(products, aligned(ROWS, 16), weight)
    library.ran.clear()
    assert torch.equal(search(products, gaps, weight), F.linear(gaps, weight))
    x = aligned(ROWS, 16)
    assert torch.equal(products.linear(x, weight, bias), F.linear(x, weight, bias))
    stranger = aligned(10, 16)
    assert torch.equal(search(products, x, stranger), F.linear(x, stranger))
    assert library.ran == []
    float_x, float_weight = x.float(), weight.float()
    assert torch.equal(search(products, float_x, float_weight), F.linear(float_x, float_weight))
    assert library.ran == []


def test_a_part_of_a_weight_is_a_shape_of_its_own() -> None:
    """Weights with fewer rows of their tail are views of the same choices_file."""
    library = Library(b"0.5")
    products, weights = make(library)
    x = aligned(ROWS, 16)
    for num_outputs in (12, 8):
        part = weights[1][:num_outputs]
        assert torch.equal(search(products, x, part), F.linear(x, part))
    assert [shape.num_outputs for shape in library.asked] == [12, 8]


def test_a_product_can_be_written_where_it_is_wanted() -> None:
    library = Library(b"0.5")
    products, weights = make(library)
    x, out = aligned(ROWS, 16), torch.empty(ROWS, 12, dtype=torch.bfloat16)
    with products.searching():
        assert products.linear(x, weights[0], out=out) is out
    assert torch.equal(out, F.linear(x, weights[0]))


def test_a_device_without_the_library_has_torch_alone() -> None:
    assert open_cublaslt(torch.device("cpu")) is None
    assert open_products(torch.device("cpu"), [])._library is None
    x, weight = torch.randn(3, 8), torch.randn(4, 8)
    assert torch.equal(search(Products(None, [[weight]]), x, weight), F.linear(x, weight))


@pytest.mark.parametrize("names", [(b"0.5", b"0.9"), (b"1.5",)])
def test_the_next_start_does_not_search_again(tmp_path: Path, names: tuple[bytes, ...]) -> None:
    library, again = Library(*names), Library(*names)
    choices_file = tmp_path / "of" / "gpu.json"
    for some in (library, again):
        products, weights = make(some, choices_file)
        search(products, aligned(ROWS, 16), weights[0])
        some.ran.clear()
        products.linear(aligned(ROWS, 16), weights[0])
    assert library.ran == again.ran
    assert len(library.asked) == 1 and again.asked == []


@pytest.mark.parametrize("content", ["", "[1]", '{"16x12x16 torch.bfloat16": 3}'])
def test_a_file_that_makes_no_sense_is_written_anew(tmp_path: Path, content: str) -> None:
    library, choices_file = Library(b"0.5"), tmp_path / "gpu.json"
    choices_file.write_text(content)
    products, weights = make(library, choices_file)
    search(products, aligned(ROWS, 16), weights[0])
    assert len(library.asked) == 1 and b"0.5".hex() in choices_file.read_text()


def test_an_algorithm_that_another_library_chose_is_not_run(tmp_path: Path) -> None:
    choices_file = tmp_path / "gpu.json"
    products, weights = make(Library(b"0.4"), choices_file)
    search(products, aligned(ROWS, 16), weights[0])
    library = Library(b"0.5")
    products, weights = make(library, choices_file)
    search(products, aligned(ROWS, 16), weights[0])
    assert len(library.asked) == 1 and set(library.ran) <= {b"0.5"}


@pytest.mark.parametrize("num_rows", [1, 15])
def test_steps_of_few_rows_stay_with_torch(num_rows: int) -> None:
    library = Library(b"0.5")
    products, weights = make(library)
    search(products, aligned(num_rows, 16), weights[0])
    assert library.asked == [] and library.ran == []


def test_few_rows_are_left_to_the_kernel_for_them() -> None:
    ran: list[int] = []

    def product(x: Tensor, weight: Tensor, y: Tensor) -> None:
        ran.append(len(x))
        torch.mm(x, weight.t(), out=y)

    library = Library(b"0.5")
    products = Products(library, [], few=FewRows(product, most_rows=2))  # type: ignore[arg-type]
    weight, x = aligned(12, 16), aligned(3, 16)
    out = torch.empty(2, 12, dtype=torch.bfloat16)
    assert products.linear(x[:2], weight, out=out) is out
    assert torch.equal(out, F.linear(x[:2], weight))
    assert torch.equal(products.linear(x[:1], weight), F.linear(x[:1], weight))
    assert ran == [2, 1]
    others: list[tuple[Tensor, Tensor, Tensor | None]] = [
        (x, weight, None),
        (x[:1], weight, aligned(1, 12)[0]),
        (x[:1].float(), weight.float(), None),
        (x[::2], weight, None),
        (x[:1], aligned(16, 12).t(), None),
    ]
    for rows, matrix, bias in others:
        y = products.linear(rows, matrix, bias)
        torch.testing.assert_close(y, F.linear(rows, matrix, bias))
    assert ran == [2, 1], "more rows, a bias, float32, gaps between rows, another order"


def test_without_a_gpu_there_is_no_such_kernel() -> None:
    assert open_few_rows(torch.device("cpu")) is None


class PartsLibrary(Library):
    """As Library, with other algorithms for every number of parts."""

    def __init__(self, by_parts: dict[int, tuple[bytes, ...]]) -> None:
        super().__init__()
        self.by_parts = by_parts

    def proposals(self, shape: ProductShape) -> list[bytes]:
        self.asked.append(shape)
        return list(self.by_parts.get(shape.num_parts, ()))

    def can_run(self, shape: ProductShape, algorithm: bytes) -> bool:
        return algorithm in self.by_parts.get(shape.num_parts, ())

    def product(self, shape: ProductShape, algorithm: bytes) -> Callable[..., None]:
        def run(x: Tensor, weight: Tensor, y: Tensor) -> None:
            self.ran.append(algorithm)
            shares = zip(*(t.float().chunk(shape.num_parts, 1) for t in (x, weight)), strict=True)
            y.copy_(torch.stack([a @ b.t() for a, b in shares]).view_as(y))

        return run


PARTS_ROWS, PARTS_INPUTS = 160, 256


class PartsWorld:
    """Seconds are those of the algorithm, and of reading each part."""

    def __init__(
        self,
        by_parts: dict[int, tuple[bytes, ...]],
        choices_file: Path | None = None,
        few: FewRows | None = None,
        part_seconds: float = 0.0,
    ) -> None:
        self.library = PartsLibrary(by_parts)
        self.weights = [aligned(12, PARTS_INPUTS) for _ in range(2)]
        self.x = aligned(PARTS_ROWS, PARTS_INPUTS)
        self.read: list[int] = []
        self.products = Products(
            self.library,  # type: ignore[arg-type]
            [self.weights],
            choices_file=choices_file,
            clock=Clock(lambda run: self._measure(run, part_seconds)),
            few=few,
            follower=lambda y: lambda: self.read.append(1 if y.ndim == 2 else len(y)),
        )

    def search(self, x: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        with self.products.searching():
            return self.products.parts(self.x if x is None else x, self.weights[0], bias)

    def _measure(self, run: Callable[[], None], part_seconds: float) -> float:
        self.library.ran.clear()
        self.read.clear()
        run()
        own = float(self.library.ran[0]) if self.library.ran else 1.0
        return own + part_seconds * (self.read[0] if self.read else 0)


@pytest.fixture(autouse=True)
def many_numbers_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_NUMBERS_OF_PARTS", (2, 4, 7, 8))


def test_parts_are_taken_where_they_are_faster() -> None:
    world = PartsWorld({1: (b"0.9",), 2: (b"0.8", b"0.6"), 4: (b"0.7",)})
    world.search()
    world.library.ran.clear()
    for weight in world.weights:
        y = world.products.parts(world.x, weight)
        assert y.shape == (2, PARTS_ROWS, 12) and y.dtype == torch.float32
        torch.testing.assert_close(y.sum(0), world.x.float() @ weight.float().t())
    assert world.library.ran == [b"0.6"] * 2
    assert [shape.num_parts for shape in world.library.asked] == [1, 2, 4], "256 / 7, 256 / 8: no"


def test_reading_parts_costs_what_it_costs() -> None:
    """Catches a search of products alone: four parts are the fastest of them."""
    by_parts: dict[int, tuple[bytes, ...]] = {1: (b"0.9",), 2: (b"0.6",), 4: (b"0.5",)}
    assert PartsWorld(by_parts, part_seconds=0.1).search().shape[0] == 2
    assert PartsWorld(by_parts, part_seconds=0.4).search().shape == (PARTS_ROWS, 12)
    assert PartsWorld(by_parts).search().shape[0] == 4


@pytest.mark.parametrize("whole", [(b"0.5",), ()])
def test_a_product_stays_whole_as_linear_has_it(whole: tuple[bytes, ...]) -> None:
    world = PartsWorld({1: whole, 2: (b"1.2",)})
    world.search()
    world.library.ran.clear()
    y = world.products.parts(world.x, world.weights[1])
    assert torch.equal(y, world.products.linear(world.x, world.weights[1]))
    assert world.library.ran == list(whole) * 2


def test_what_cannot_come_in_parts_is_whole() -> None:
    """Few or many rows, a bias, float32, gaps between rows, a kernel for few rows, no follower."""
    parts: dict[int, tuple[bytes, ...]] = {2: (b"0.1",)}
    world = PartsWorld(parts)
    bias = torch.randn(12).to(torch.bfloat16)
    for num_rows in (1, 32, 513):
        assert world.search(aligned(num_rows, PARTS_INPUTS)).ndim == 2
    assert world.search(bias=bias).ndim == 2
    assert world.search(aligned(PARTS_ROWS, 2 * PARTS_INPUTS)[:, :PARTS_INPUTS]).ndim == 2
    stranger = aligned(10, PARTS_INPUTS)
    with world.products.searching():
        assert world.products.parts(world.x, stranger).ndim == 2
        assert world.products.parts(world.x.float(), stranger.float()).ndim == 2
    few = FewRows(lambda x, weight, y: torch.mm(x, weight.t(), out=y), most_rows=PARTS_ROWS)
    assert PartsWorld(parts, few=few).search().ndim == 2
    assert world.products.parts(world.x, world.weights[0]).ndim == 2, "not in a search"
    assert world.search().ndim == 3
    world = PartsWorld(parts)
    world.products._follower = None
    assert world.search().ndim == 2


@pytest.mark.parametrize("seconds", [b"0.5", b"1.5"])
def test_the_next_start_knows_the_parts(tmp_path: Path, seconds: bytes) -> None:
    choices_file = tmp_path / "gpu.json"
    world = PartsWorld({2: (seconds,)}, choices_file)
    y = world.search()
    again = PartsWorld({2: (seconds,)}, choices_file)
    assert again.search().shape == y.shape
    assert world.library.asked and again.library.asked == []


WHOLE_NAME = f"{PARTS_ROWS}x12x{PARTS_INPUTS} torch.bfloat16"


@pytest.mark.parametrize(
    "kept",
    [None, 7, "", "2", "2 ", "3 00", "1 00", "x", "2 zz", f"2 {b'0.4'.hex()}"]
    + [f"8 {b'0.6'.hex()}"],
)
def test_a_file_without_good_parts_is_searched_for_them_alone(tmp_path: Path, kept: object) -> None:
    """As files are that know whole products only."""
    choices_file = tmp_path / "gpu.json"
    content = {WHOLE_NAME: b"0.9".hex(), f"{WHOLE_NAME} in parts": kept}
    choices_file.write_text(json.dumps(content))
    world = PartsWorld({1: (b"0.9", b"0.8"), 2: (b"0.6",)}, choices_file)
    assert world.search().shape == (2, PARTS_ROWS, 12)
    assert 1 not in {shape.num_parts for shape in world.library.asked}
    found = json.loads(choices_file.read_text())
    assert found == {WHOLE_NAME: b"0.9".hex(), f"{WHOLE_NAME} in parts": f"2 {b'0.6'.hex()}"}
