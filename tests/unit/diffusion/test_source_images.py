"""Drawings that begin with an image, and inpainting, against diffusers' own pipelines for them."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from loramux.diffusion.engine import ImageEngine
from loramux.diffusion.families.find import family_of
from loramux.diffusion.source import decode_source, fit_source
from loramux.errors import InvalidRequest, UnsupportedModel
from loramux.types.image import SourceImage
from loramux.types.image_files import MAX_SOURCE_PIXELS, measure
from tests.image_factory import (
    ATTENTION,
    CONVOLUTIONS,
    SIZE,
    draw_all,
    file_of,
    make_adapter,
    make_pipeline,
    mask_file,
    picture_file,
    request_for,
    shared_pipeline,
)
from tests.stock_pipeline import StockPipeline

FAMILIES = [
    "flux",
    "sdxl",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("sd3", "qwen_image", "z_image")),
]
GUIDED = {
    "flux": {"true_cfg_scale": 3.0, "negative_prompt": "blue"},
    "qwen_image": {"true_cfg_scale": 3.0, "negative_prompt": "blue"},
}
TOLERANCE = 1e-5


def source(strength: float = 0.8, *, inpaint: bool = False, **fields) -> SourceImage:
    given = {
        "image": picture_file(),
        "mask": mask_file() if inpaint else None,
        "strength": strength,
    }
    return SourceImage(**(given | fields))


def mixed_requests(name: str):
    guided = GUIDED.get(name, {"guidance_scale": 3.0, "negative_prompt": "blue"})
    euler_a = {"sampler": "euler_a"} if name == "sdxl" else {}
    heun = {"sampler": "heun"} if name == "sdxl" else {}
    requests = [
        request_for(name, "text"),
        request_for(name, "text_lora", selection=(("a", 1.0),)),
        request_for(name, "image", source=source(0.7), steps=4),
        request_for(name, "image_lora", source=source(0.5), steps=6, selection=(("a", -0.7),)),
        request_for(name, "all_steps", source=source(1.0), selection=(("b", 1.0),), **guided),
        request_for(name, "part", source=source(inpaint=True), steps=5, **euler_a),
        request_for(
            name,
            "part_lora",
            source=source(0.6, inpaint=True),
            steps=6,
            selection=(("a", 0.5), ("b", 0.6)),
            **guided,
            **heun,
        ),
        request_for(name, "part_new", source=source(1.0, inpaint=True), selection=(("b", 1.3),)),
    ]
    if name == "flux":  # diffusers scales the source by itself.
        image, mask = picture_file(1, (56, 44)), mask_file((56, 44))
        requests.append(request_for(name, "scaled", source=source(image=image, mask=mask)))
    return requests


@pytest.mark.parametrize("name", FAMILIES)
def test_images_and_masks_in_a_mixed_batch_equal_stock_pipelines(name):
    pipe = make_pipeline(name)
    adapters = [
        make_adapter(pipe, "a", (*ATTENTION, *CONVOLUTIONS)),
        make_adapter(pipe, "b", ("to_q", "to_v"), rank=2),
    ]
    engine = ImageEngine(pipe)
    for adapter in adapters:
        engine.add_adapter(adapter)
    requests = mixed_requests(name)
    stock = StockPipeline(name, adapters)
    expected = {request.request_id: stock.draw(request) for request in requests}
    got = draw_all(engine, requests)
    off = {key: float((got[key] - expected[key]).abs().max()) for key in expected}
    assert max(off.values()) < TOLERANCE, off
    # Fewer forwards than images: those with a source share the forwards of the others.
    assert engine.num_forwards < sum(request.steps for request in requests) / 3


def test_previews_of_a_source_come_closer():
    engine = ImageEngine(shared_pipeline("flux"))
    engine.add(request_for("flux", "x", source=source(0.75), steps=8, partial_images=2))
    events = []
    while engine.has_work:
        events += engine.step()
    assert events[-1].facts.num_steps == 6
    final = events[-1].pixels
    off = [float((e.preview - final).abs().mean()) for e in events if e.preview is not None]
    assert len(off) == 2 and off[0] > off[1]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"strength": 0.0}, "strength must be over 0"),
        ({"strength": 1.1}, "at most 1"),
        ({"strength": float("nan")}, "strength"),
        ({"image": b""}, "image is empty"),
        ({"mask": b""}, "mask is empty"),
        ({"mask_blur": -1.0}, "mask_blur"),
    ],
)
def test_fields_of_sources_are_checked(fields, text):
    with pytest.raises(InvalidRequest, match=text):
        source(**fields)


def test_a_strength_without_a_step_is_refused():
    engine = ImageEngine(shared_pipeline("sdxl"))
    with pytest.raises(InvalidRequest, match="No step is left: 3 steps with strength 0.2"):
        engine.add(request_for("sdxl", "x", source=source(0.2)))
    assert not engine.has_work


def test_families_from_text_alone_refuse_images():
    engine = ImageEngine(shared_pipeline("wan"))
    with pytest.raises(InvalidRequest, match="takes no image"):
        engine.add(request_for("wan", "x", source=source()))


@pytest.mark.parametrize("name", ["sdxl", "flux"])
def test_inpainting_models_are_refused_by_name(name):
    pipe = make_pipeline(name)
    net = getattr(pipe, "unet", None) or pipe.transformer
    net.register_to_config(in_channels=9)
    with pytest.raises(UnsupportedModel, match="9 input channels"):
        family_of(pipe)


def decoded(**fields):
    return decode_source(source(**fields), SIZE, SIZE)


def test_masks_mark_by_white_black_and_transparency():
    right = decoded(mask=mask_file()).mask
    assert right.mean() == 0.5 and bool((right[..., SIZE // 2 :] == 1).all())
    assert torch.equal(decoded(mask=mask_file(), masked_by="black").mask, 1 - right)
    clear = Image.new("RGBA", (SIZE, SIZE), (255, 255, 255, 255))
    clear.paste((0, 0, 0, 0), (SIZE // 2, 0, SIZE, SIZE))
    masked = decoded(mask=file_of(clear), masked_by="transparency")
    assert torch.equal(masked.mask, right)
    assert torch.equal(decoded(mask=mask_file(), masked_by="transparency").mask, right)
    corner = Image.new("L", (SIZE, SIZE), 0)
    corner.paste(255, (0, 0, 9, 9))
    sharp, soft = (decoded(mask=file_of(corner), mask_blur=blur).mask for blur in (0.0, 4.0))
    assert sharp.sum() == 81
    assert 0 < float(soft.sum()) < 81 and set(soft.unique().tolist()) == {0.0, 1.0}


def test_transparent_pixels_are_white_and_photographs_upright():
    clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    assert torch.equal(decoded(image=file_of(clear)).image, torch.ones(1, 3, SIZE, SIZE))
    upright = Image.new("RGB", (40, 20), "black")
    upright.paste("white", (0, 0, 20, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # stored turned to the left
    out = io.BytesIO()
    upright.rotate(90, expand=True).save(out, "JPEG", exif=exif, quality=100)
    assert measure(out.getvalue(), "image") == (40, 20)
    pixels = decoded(image=out.getvalue()).image
    assert pixels[..., : SIZE // 2 - 2].mean() > 0.9
    assert pixels[..., SIZE // 2 + 2 :].mean() < -0.9


def test_a_fitted_source_decodes_to_the_same_pixels():
    given = source(image=picture_file(2, (70, 50), "RGBA"), mask=mask_file((70, 50)), mask_blur=2.0)
    request = request_for("flux", "x", source=given)
    fitted = fit_source(request).source
    assert measure(fitted.image, "image") == (SIZE, SIZE)
    one, other = (decode_source(each, SIZE, SIZE) for each in (given, fitted))
    assert torch.equal(one.image, other.image)
    assert torch.equal(one.mask, other.mask)
    plain = request_for("flux", "x")
    assert fit_source(plain) is plain


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
def test_files_are_measured_by_their_header(kind, mode):
    if kind == "JPEG" and mode == "RGBA":
        mode = "CMYK"
    for size in ((33, 70), (1, 300)):
        for options in ({}, {"lossless": True}):
            out = io.BytesIO()
            Image.new(mode, size).save(out, kind, **options)
            assert measure(out.getvalue(), "image") == size
            assert decoded(image=out.getvalue()).image.shape == (1, 3, SIZE, SIZE)


def png_header(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + width.to_bytes(4) + height.to_bytes(4) + b"\x08\0" * 4


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"GIF89a" + b"\0" * 50, "cannot be read as PNG, JPEG or WebP"),
        (b"\xff\xd8\xff", "cannot be read"),
        (b"RIFF1234WEBPVP8X", "cannot be read"),
        (b"\x89PNG\r\n\x1a\n", "cannot be read"),
        (png_header(0, 5), "cannot be read"),
        (png_header(2**16, 2**16), f"65536x65536 pixels, and at most {MAX_SOURCE_PIXELS}"),
        (png_header(8, 8), "cannot be read"),
        (picture_file()[:-60], "cannot be read"),
        (picture_file(kind="JPEG")[:200], "cannot be read"),
    ],
)
def test_other_files_and_bombs_are_refused(data, text):
    with pytest.raises(InvalidRequest, match=text) as caught:
        decoded(image=data)
    assert caught.value.param == "image"
    with pytest.raises(InvalidRequest, match="mask"):
        decoded(mask=data)


def test_random_bytes_behind_a_header_are_refused():
    """Whatever follows, no other error escapes."""
    numbers = np.random.default_rng(0)
    for start in (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"\xff\xd8\xff", b"RIFF\0\0\0\0WEBPVP8L"):
        for _ in range(30):
            with pytest.raises(InvalidRequest):
                decoded(image=start + numbers.bytes(60))


def test_a_broken_source_fails_its_image_alone():
    engine = ImageEngine(shared_pipeline("flux"))
    engine.add(request_for("flux", "x", source=source(image=picture_file()[:-60]), steps=2))
    engine.add(request_for("flux", "y", steps=2))
    events = []
    while engine.has_work:
        events += engine.step()
    failed = [event for event in events if event.error is not None]
    assert [event.request_id for event in failed] == ["x"]
    assert isinstance(failed[0].error, InvalidRequest)
    assert any(event.pixels is not None and event.request_id == "y" for event in events)
