"""Images drawn with the kernels of a GPU, in an interpreter, against those drawn with torch."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs Triton")

from loramux.diffusion.engine import ImageEngine
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

FAMILIES = ["flux", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sdxl", "z_image"))]


def engine_for(name: str) -> ImageEngine:
    pipe = make_pipeline(name)
    engine = ImageEngine(pipe)
    engine.add_adapter(make_adapter(pipe, "a", (*ATTENTION, *CONVOLUTIONS, *TEXT), rank=4))
    engine.add_adapter(make_adapter(pipe, "b", (*FEED_FORWARD, *EMBEDDERS, "to_q"), rank=3))
    return engine


@pytest.mark.parametrize("name", FAMILIES)
def test_the_kernels_draw_what_torch_draws(name, monkeypatch):
    requests = [
        request_for(name, "base", steps=1),
        request_for(name, "single", steps=1, selection=(("a", 1.0),)),
        request_for(name, "sum", steps=2, selection=(("a", 0.5), ("b", -0.6))),
    ]
    expected = draw_all(engine_for(name), requests)
    monkeypatch.setenv("LORAMUX_KERNELS", "triton")
    engine = engine_for(name)
    drawn = draw_all(engine, requests)
    assert max(float((drawn[n] - expected[n]).abs().max()) for n in expected) < 1e-5
    plain = draw_all(engine_for(name), [request_for(name, "sum", steps=2)])
    assert float((drawn["sum"] - plain["sum"]).abs().max()) > 1e-3
    # The tables follow the adapters: none is left of one that is gone.
    engine.remove_adapter("b")
    assert float((draw_all(engine, requests[:2])["single"] - expected["single"]).abs().max()) < 1e-5
