from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loramux.kernels.cublaslt import CublasLtError, ProductShape
from loramux.runner.products import (
    FewRows,
    Products,
    fastest,
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

    def proposals(self, shape: ProductShape) -> list[bytes]:
        self.asked.append(shape)
        return list(self.names)

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

    return Products(library, [weights], choices_file=choices_file, measure=measure), weights  # type: ignore[arg-type]


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


def test_a_lucky_first_measurement_does_not_decide() -> None:
    """The finalists run again; what was slow once and fast later counts with its best."""
    times = {0: [1.0] * 9, 1: [0.6] + [0.6] * 8, 2: [0.7] + [0.4] * 8}
    turn = {number: iter(values) for number, values in times.items()}
    current = [0]

    def run_of(number: int) -> Callable[[], None]:
        return lambda: current.__setitem__(0, number)

    def measure(run: Callable[[], None]) -> float:
        run()
        return next(turn[current[0]])

    assert fastest({number: run_of(number) for number in times}, measure) == 2


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
