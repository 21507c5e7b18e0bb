"""Mixed batches against stock diffusers pipelines, one request at a time."""

from __future__ import annotations

import pytest
import torch

from loramux.diffusion.engine import ImageEngine
from loramux.diffusion.planner import PlanLimits
from loramux.types.image import ImageRequest
from tests.image_factory import (
    ATTENTION,
    CONVOLUTIONS,
    EMBEDDERS,
    FEED_FORWARD,
    TEXT,
    draw_all,
    make_adapter,
    make_pipeline,
    request_for,
)
from tests.stock_pipeline import StockPipeline

FAMILIES = [
    "flux",
    "sdxl",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("sd3", "qwen_image", "z_image", "flux2", "wan")
    ),
]
GUIDANCE = {
    "flux": {"guidance_scale": 1.5, "true_cfg_scale": 3.0, "negative_prompt": "blue"},
    "qwen_image": {"true_cfg_scale": 3.0, "negative_prompt": "blue"},
    "flux2": {"guidance_scale": 2.5},
}
TOLERANCE = 1e-5


def adapters_of(pipe):
    return [
        make_adapter(pipe, "a", (*ATTENTION, *CONVOLUTIONS, *TEXT), rank=4),
        make_adapter(pipe, "b", (*FEED_FORWARD, "to_q"), rank=2),
        make_adapter(pipe, "c", (*EMBEDDERS, "to_v", "add_k_proj"), rank=8),
    ]


def eight_requests(name: str) -> list[ImageRequest]:
    guided = GUIDANCE.get(name, {"guidance_scale": 3.0, "negative_prompt": "blue"})
    sampler = {"sampler": "dpmpp_2m"} if name == "sdxl" else {}
    return [
        request_for(name, "base"),
        request_for(name, "single", selection=(("a", 1.0),)),
        request_for(name, "composed", selection=(("a", 0.5), ("b", 0.6))),
        request_for(name, "negative", selection=(("a", -0.4), ("b", 0.6))),
        request_for(name, "rank", selection=(("c", 1.3),)),
        request_for(name, "steps", selection=(("b", 1.0),), steps=5, **sampler),
        request_for(name, "seed", selection=(("a", 1.0),), seed=2**40 + 7),
        request_for(name, "guidance", selection=(("c", 0.7),), **guided),
    ]


@pytest.fixture(scope="module", params=FAMILIES)
def scene(request):
    """Return a family with an engine, its requests, and the stock pictures of them."""
    name = request.param
    pipe = make_pipeline(name)
    adapters = adapters_of(pipe)
    engine = ImageEngine(pipe)
    for adapter in adapters:
        engine.add_adapter(adapter)
    requests = eight_requests(name)
    stock = StockPipeline(name, adapters)
    return name, engine, requests, {r.request_id: stock.draw(r) for r in requests}


def furthest(one, other) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_a_mixed_batch_equals_stock_pipelines(scene):
    _, engine, requests, expected = scene
    before = engine.num_forwards
    assert furthest(draw_all(engine, requests), expected) < TOLERANCE
    assert engine.num_forwards - before == max(request.steps for request in requests)


def test_adapters_change_pictures(scene):
    """Guards the comparison: every selection must be visible in the picture."""
    _, engine, requests, expected = scene
    plain = [
        ImageRequest(**{f: getattr(r, f) for f in r.__struct_fields__} | {"selection": ()})
        for r in requests
        if r.selection
    ]
    without = draw_all(engine, plain)
    assert all(float((without[n] - expected[n]).abs().max()) > 1e-3 for n in without)


def test_base_images_are_those_of_a_pipeline_without_adapters(scene):
    name, engine, requests, _ = scene
    never = ImageEngine(make_pipeline(name))
    plain = [request_for(name, r.request_id, steps=r.steps, seed=r.seed) for r in requests]
    expected = draw_all(never, plain)
    assert furthest(draw_all(engine, plain), expected) == 0
    # Next to seven rows with adapters, the base row has the same bits as next to seven without.
    mixed = [plain[0], *(request_for(name, f"m{i}", selection=(("a", 1.0),)) for i in range(7))]
    alone = [plain[0], *(request_for(name, f"m{i}") for i in range(7))]
    assert torch.equal(draw_all(engine, mixed)["base"], draw_all(never, alone)["base"])


@pytest.mark.parametrize("order", [[7, 6, 5, 4, 3, 2, 1, 0], [3, 0, 5, 1, 7, 2, 6, 4]])
def test_the_order_of_arrival_does_not_matter(scene, order):
    """Requests arrive one after another, each while the others are under way."""
    _, engine, requests, expected = scene
    pixels = {}
    for index in order:
        engine.add(requests[index])
        pixels |= {e.request_id: e.pixels for e in engine.step() if e.pixels is not None}
        engine.check_integrity()
    while engine.has_work:
        pixels |= {e.request_id: e.pixels for e in engine.step() if e.pixels is not None}
    assert furthest(pixels, expected) < TOLERANCE


def test_aborts_leave_the_others_unchanged(scene):
    _, engine, requests, expected = scene
    for request in requests:
        engine.add(request)
    pixels = {}
    for aborted in ("single", "rank", "guidance"):
        engine.abort(aborted)
        engine.check_integrity()
        pixels |= {e.request_id: e.pixels for e in engine.step() if e.pixels is not None}
    while engine.has_work:
        pixels |= {e.request_id: e.pixels for e in engine.step() if e.pixels is not None}
    left = {n: p for n, p in expected.items() if n not in ("single", "rank", "guidance")}
    assert furthest(pixels, left) < TOLERANCE


@pytest.mark.parametrize("limits", [PlanLimits(batching="bucket"), PlanLimits(max_images=3)])
def test_other_groupings_give_the_same_pictures(scene, limits):
    """One selection in a forward, and forwards that are too small, so that images pause."""
    name, _, requests, expected = scene
    pipe = make_pipeline(name)
    engine = ImageEngine(pipe, limits)
    for adapter in adapters_of(pipe):
        engine.add_adapter(adapter)
    assert furthest(draw_all(engine, requests), expected) < TOLERANCE
