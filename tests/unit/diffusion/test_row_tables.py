"""Images drawn with the kernels of a GPU, in an interpreter, against those drawn with torch."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs Triton")

import msgspec
from safetensors.torch import save_file

from loramux.diffusion.engine import ImageEngine
from tests.image_factory import (
    ATTENTION,
    CONVOLUTIONS,
    EMBEDDERS,
    FEED_FORWARD,
    TEXT,
    dora_tensors,
    draw_all,
    make_adapter,
    make_pipeline,
    request_for,
    shared_pipeline,
    with_parts,
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


def test_rows_of_dora_draw_what_they_draw_alone(monkeypatch, tmp_path):
    """Beside rows that the kernels change in the same modules and in others."""
    pipe = make_pipeline("flux")
    path = tmp_path / "dora.safetensors"
    made = make_adapter(pipe, "d", (*ATTENTION, "proj_mlp"), rank=2)
    save_file(dora_tensors(pipe, made), path)

    def draw():
        engine = engine_for("flux")
        cid = engine.register_adapter(path).cid
        dora = [
            request_for("flux", f"dora {weight}", steps=2, selection=((cid, weight),))
            for weight in (1.0, 0.4)
        ]
        plain = [
            request_for("flux", name, steps=2, selection=((name, 1.0),)) for name in ("a", "b")
        ]
        return draw_all(engine, [*dora, *plain, request_for("flux", "base", steps=2)])

    expected = draw()
    monkeypatch.setenv("LORAMUX_KERNELS", "triton")
    drawn = draw()
    assert max(float((drawn[n] - expected[n]).abs().max()) for n in expected) < 1e-5


def test_biases_and_factors_draw_what_torch_draws(monkeypatch):
    """Rows with biases, with biases alone, with Kronecker factors, in sums and in one batch."""
    rows = ("base", "a", "biased", "alone", "factors", "sum")
    selections = ((), (("a", 1.0),), (("biased", 0.7),), (("alone", -0.5),), (("factors", 1.0),))
    several = (("biased", 0.5), ("factors", 0.6), ("alone", 1.0))
    requests = [
        request_for("flux", name, steps=2, selection=selection)
        for name, selection in zip(rows, (*selections, several), strict=True)
    ]

    def draw(wanted):
        engine = engine_for("flux")
        for adapter in with_parts(shared_pipeline("flux")):
            engine.add_adapter(adapter)
        return draw_all(engine, wanted)

    expected = draw(requests)
    bare = {name: draw([replaced(one)]) for name, one in zip(rows, requests, strict=True)}
    assert all(furthest(expected, bare[name], name) > 1e-3 for name in rows[1:])
    alone = {name: draw([one]) for name, one in zip(rows, requests, strict=True)}
    assert max(furthest(expected, alone[name], name) for name in rows) < 1e-5
    monkeypatch.setenv("LORAMUX_KERNELS", "triton")
    drawn = draw(requests)
    assert max(furthest(expected, drawn, name) for name in rows) < 1e-5


def replaced(request):
    return msgspec.structs.replace(request, selection=())


def furthest(one, other, name):
    return float((one[name] - other[name]).abs().max())
