from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loramux.adapters.packed import file as image_file
from loramux.adapters.packed.dense import plan_dense
from loramux.adapters.packed.extras import ExtraKind, ExtraSpec
from loramux.adapters.packed.file import KnownLayouts, read_image, write_image
from loramux.adapters.packed.image import AdapterImage, mapped_buffer
from loramux.adapters.packed.packing import DensePacking
from loramux.errors import AdapterRefused
from loramux.types.model import LinearSpec

SITES = (
    LinearSpec("qkv", 8, ("q_proj", "k_proj", "v_proj"), (8, 4, 4)),
    LinearSpec("o", 8, ("o_proj",), (8,)),
)
PACKING = DensePacking(SITES, torch.float32, 4 * 64)
RANKS = {(0, "q_proj"): 3, (0, "v_proj"): 1, (2, "o_proj"): 5}


def make_image(dtype: torch.dtype) -> AdapterImage:
    layout = plan_dense(SITES, RANKS)
    generator = torch.Generator().manual_seed(3)
    buffer = torch.randn(layout.num_elements, generator=generator).to(dtype)
    return AdapterImage("cidv1:sha256:ab", layout, buffer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_layout_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    image = make_image(dtype)
    write_image(tmp_path / "x.image", image)
    again = read_image(tmp_path / "x.image", image.cid, KnownLayouts(PACKING))
    assert again.layout == image.layout and again.buffer.dtype == dtype
    assert torch.equal(again.buffer.view(torch.uint8), image.buffer.view(torch.uint8))


def test_the_buffer_comes_from_the_callers_allocator(tmp_path: Path) -> None:
    image = make_image(torch.float32)
    write_image(tmp_path / "x.image", image)
    room = torch.zeros(image.buffer.numel())
    again = read_image(
        tmp_path / "x.image", image.cid, KnownLayouts(PACKING), lambda count, dtype: room[:count]
    )
    assert again.buffer.data_ptr() == room.data_ptr()


def test_a_reader_hears_of_every_byte_once_and_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_file, "SLICE_BYTES", 100)
    image = make_image(torch.float32)
    write_image(tmp_path / "x.image", image)
    heard, ends = bytearray(), []

    def listen(start: int, data: memoryview, *, is_last: bool) -> None:
        assert start == len(heard)
        heard.extend(data)
        ends.append(is_last)

    read_image(
        tmp_path / "x.image", image.cid, KnownLayouts(PACKING), mapped_buffer, on_slice=listen
    )
    assert heard == image.buffer.view(torch.uint8).numpy().tobytes()
    assert len(ends) > 2 and ends.index(True) == len(ends) - 1


def test_adapters_of_one_layout_share_it_and_others_do_not(tmp_path: Path) -> None:
    image, layouts = make_image(torch.float32), KnownLayouts(PACKING)
    write_image(tmp_path / "x.image", image)
    first, second = (read_image(tmp_path / "x.image", image.cid, layouts) for _ in range(2))
    assert first.layout is second.layout
    other = layouts.find([[0, "o", [5]]])
    assert other == plan_dense(SITES, {(0, "o_proj"): 5})


def test_an_image_with_other_parts_comes_back_for_pages_of_the_same_size(tmp_path: Path) -> None:
    specs = (
        ExtraSpec(0, "qkv", ExtraKind.GAIN, 1, 16),
        ExtraSpec(-1, "embed_tokens", ExtraKind.ROWS, 2, 8, (3, 70)),
    )
    layout = PACKING.plan(RANKS, specs)
    image = AdapterImage("cidv1:sha256:ab", layout, torch.randn(layout.num_elements))
    write_image(tmp_path / "x.image", image)
    layouts = KnownLayouts(PACKING)
    again = read_image(tmp_path / "x.image", image.cid, layouts)
    assert again.layout == layout and torch.equal(again.buffer, image.buffer)
    assert layouts.find(layout.key) == PACKING.plan(RANKS), "the key of the extras tells them apart"
    other = KnownLayouts(replace(PACKING, page_bytes=4 * 128))
    with pytest.raises(AdapterRefused, match="another size"):
        read_image(tmp_path / "x.image", image.cid, other)


def test_a_file_of_another_adapter_is_refused(tmp_path: Path) -> None:
    write_image(tmp_path / "x.image", make_image(torch.float32))
    with pytest.raises(AdapterRefused, match="another adapter"):
        read_image(tmp_path / "x.image", "cidv1:sha256:cd", KnownLayouts(PACKING))


@pytest.mark.parametrize("content", [b"", b"loramux image 1\n", b"x" * 100000])
def test_what_is_no_image_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.image").write_bytes(content)
    with pytest.raises(AdapterRefused, match="cannot be used"):
        read_image(tmp_path / "x.image", "cidv1:sha256:ab", KnownLayouts(PACKING))


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.image").mkdir()
    with pytest.raises(OSError):
        write_image(tmp_path / "x.image", make_image(torch.float32))
    assert [path.name for path in tmp_path.iterdir()] == ["x.image"]
