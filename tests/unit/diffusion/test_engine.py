"""The step loop: states, fairness, failures, removal of adapters, caches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.diffusion.engine import ImageEngine
from loramux.diffusion.job import JobState
from loramux.diffusion.planner import PlanLimits, Planner
from loramux.errors import AdapterNotFound, InvalidRequest, LoramuxError
from tests.image_factory import (
    ATTENTION,
    TEXT,
    draw_all,
    finish,
    make_adapter,
    request_for,
    shared_pipeline,
)


@pytest.fixture
def engine():
    """FLUX with an adapter of the denoiser and one of a text encoder as well."""
    pipe = shared_pipeline("flux")
    engine = ImageEngine(pipe)
    engine.add_adapter(make_adapter(pipe, "a", ATTENTION))
    engine.add_adapter(make_adapter(pipe, "t", (*ATTENTION, *TEXT), rank=2))
    yield engine
    for cid in list(engine.adapters):
        engine.remove_adapter(cid)
    assert not any(module._forward_hooks for module in engine.net.modules())


def flux_request(request_id, **fields):
    return request_for("flux", request_id, **fields)


def test_an_image_passes_its_states(engine):
    engine.add(flux_request("x", steps=2))
    assert engine.state_of("x") is JobState.QUEUED
    events = engine.step()
    assert [(e.step, e.num_steps, e.is_last) for e in events] == [(1, 2, False)]
    assert engine.state_of("x") is JobState.DENOISING
    events = engine.step()
    assert [e.is_last for e in events] == [False, True]
    assert events[-1].pixels.shape == (32, 32, 3)
    facts = events[-1].facts
    assert (facts.num_steps, facts.num_pauses, facts.max_images) == (2, 0, 1)
    assert not engine.has_work
    assert engine.step() == []


def test_tenants_take_turns_when_a_forward_is_full():
    """With room for one image, another tenant's image goes on at each second step."""
    engine = ImageEngine(shared_pipeline("flux"), PlanLimits(max_tokens=1))
    engine.add(flux_request("a1", steps=3, tenant="a"))
    engine.add(flux_request("a2", steps=3, tenant="a"))
    engine.add(flux_request("b1", steps=3, tenant="b"))
    order, pauses = [], {}
    while engine.has_work:
        for event in engine.step():
            if event.is_last:
                pauses[event.request_id] = event.facts.num_pauses
            else:
                order.append(event.request_id)
        engine.check_integrity()
    assert order[:6] == ["a1", "b1", "a1", "b1", "a1", "b1"]
    assert order[6:] == ["a2", "a2", "a2"]
    assert pauses == {"a1": 2, "b1": 2, "a2": 0}


def test_a_share_of_two_gets_two_steps_of_three():
    engine = ImageEngine(shared_pipeline("flux"), PlanLimits(max_tokens=1))
    engine.add(flux_request("a", steps=8, tenant="a", tenant_share=2.0))
    engine.add(flux_request("b", steps=8, tenant="b"))
    order = [event.request_id for _ in range(9) for event in engine.step() if not event.is_last]
    assert order.count("a") == 6
    engine.abort("a")
    engine.abort("b")


def test_adapters_of_a_tenant_take_turns(engine):
    planner = Planner(PlanLimits(max_tokens=1))
    for name, selection in (("a1", (("a", 1.0),)), ("a2", (("a", 1.0),)), ("t1", (("t", 1.0),))):
        planner.add(flux_request(name, selection=selection), (32, 32), 64)
    order = [planner.next_images()[0] for _ in range(4)]
    assert order == ["a1", "t1", "a1", "t1"]


def test_forwards_hold_one_size_and_no_more_tokens_than_allowed():
    planner = Planner(PlanLimits(max_tokens=100))
    for index in range(5):
        planner.add(flux_request(f"s{index}"), (32, 32), 40)
    planner.add(flux_request("large"), (64, 64), 400)
    seen = [planner.next_images() for _ in range(3)]
    assert seen[0] == ["s0", "s1"]
    for name in ("s0", "s1", "s2", "s3", "s4"):
        planner.remove(name)
    assert planner.next_images() == ["large"]


@settings(max_examples=30)
@given(st.data())
def test_every_image_is_planned_in_the_end(data):
    """Whatever sizes, tenants and selections: each image takes all its steps."""
    draw = data.draw
    batching = draw(st.sampled_from(["mixed", "bucket"]))
    planner = Planner(PlanLimits(max_tokens=100, max_images=3, batching=batching))
    left, requests = {}, {}
    for index in range(draw(st.integers(1, 8))):
        name = f"r{index}"
        requests[name] = flux_request(
            name,
            tenant=draw(st.sampled_from("ab")),
            selection=draw(st.sampled_from([(), (("a", 1.0),), (("a", 0.5),)])),
        )
        left[name] = draw(st.integers(1, 4))
        planner.add(requests[name], (draw(st.sampled_from([32, 64])),), draw(st.integers(1, 120)))
    for _ in range(sum(left.values())):
        if not left:
            break
        chosen = planner.next_images()
        assert chosen and len(chosen) <= 3
        if batching == "bucket":
            assert len({requests[name].selection for name in chosen}) == 1
        for name in chosen:
            left[name] -= 1
            if not left[name]:
                del left[name]
                planner.remove(name)
        planner.check_integrity()
    assert not left and not len(planner)


def test_an_aborted_image_is_in_no_further_forward(engine):
    engine.add(flux_request("x", steps=5))
    engine.add(flux_request("y", steps=2))
    engine.step()
    engine.abort("x")
    engine.abort("x")
    assert [event.request_id for event in engine.step()] == ["y", "y"]
    assert not engine.has_work


def test_a_failing_image_fails_alone(engine, monkeypatch):
    """A forward with it fails; then each image has one of its own."""
    expected = draw_all(engine, [flux_request("y", steps=2)])["y"]
    forward = engine.family.forward

    def fails_on_x(rows):
        if any(row.sampling.request.request_id == "x" for row in rows):
            raise RuntimeError("out of memory")
        return forward(rows)

    monkeypatch.setattr(engine.family, "forward", fails_on_x)
    engine.add(flux_request("x", steps=2))
    engine.add(flux_request("y", steps=2))
    events = [*engine.step(), *engine.step()]
    failed = [event for event in events if event.error is not None]
    assert [event.request_id for event in failed] == ["x"]
    assert "out of memory" in str(failed[0].error)
    pixels = [event.pixels for event in events if event.pixels is not None]
    assert torch.equal(pixels[0], expected)
    assert not engine.has_work


def test_an_image_of_nan_is_an_error(engine, monkeypatch):
    forward = engine.family.forward
    monkeypatch.setattr(
        engine.family, "forward", lambda rows: [p * torch.nan for p in forward(rows)]
    )
    engine.add(flux_request("x", steps=1))
    error = engine.step()[-1].error
    assert "NaN" in str(error) and not isinstance(error, InvalidRequest)
    for fields, text in (
        ({"guidance_scale": 90.0}, r"decrease guidance_scale \(90\)"),
        ({"selection": (("a", 50.0),)}, r"decrease the weights of the adapters \(50\)"),
    ):
        engine.add(flux_request("y", steps=1, **fields))
        error = engine.step()[-1].error
        with pytest.raises(InvalidRequest, match=text):
            raise error


def test_a_removed_adapter_is_freed_after_its_last_image(engine):
    engine.add(flux_request("x", steps=3, selection=(("a", 1.0),)))
    engine.step()
    engine.remove_adapter("a")
    assert "a" in engine.adapters
    with pytest.raises(AdapterNotFound):
        engine.add(flux_request("y", selection=(("a", 1.0),)))
    finish(engine)
    assert "a" not in engine.adapters
    with pytest.raises(AdapterNotFound):
        engine.remove_adapter("a")


def test_prompts_are_encoded_once_for_each_text_encoder_selection(engine):
    prompts = engine.prompts

    def draw(*selections):
        requests = [
            flux_request(f"x{i}", prompt="a hill", steps=1, seed=0, selection=s)
            for i, s in enumerate(selections)
        ]
        before = prompts.num_misses
        pixels = draw_all(engine, requests)
        return prompts.num_misses - before, pixels

    # An adapter without a text encoder shares the base's text.
    assert draw((), (("a", 1.0),), (("a", 0.5),))[0] == 1
    missed, pixels = draw((("t", 1.0),), (("t", 0.5),), (("t", 1.0), ("a", 1.0)))
    assert missed == 2
    again = draw((("t", 1.0),), (("t", 0.5),), (("t", 1.0), ("a", 1.0)))
    assert again[0] == 0
    assert all(torch.equal(pixels[name], again[1][name]) for name in pixels)
    assert prompts.used_bytes > 0
    engine.remove_adapter("t")
    assert len(prompts) == 1


def test_the_prompt_cache_keeps_to_its_budget(engine):
    engine.prompts._budget_bytes = 3 * 16 * 32 * 4
    for index in range(5):
        draw_all(engine, [flux_request("x", prompt=f"hill {index}", steps=1)])
    assert engine.prompts.used_bytes <= engine.prompts._budget_bytes
    assert len(engine.prompts) < 5


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"width": 30}, InvalidRequest, "multiple of 4.*nearest is 32"),
        ({"selection": (("x", 1.0),)}, AdapterNotFound, "No adapter x"),
        ({"selection": (("a", 1.0), ("a", 0.5))}, InvalidRequest, "twice"),
        ({"sampler": "ddim"}, InvalidRequest, "no sampler 'ddim'"),
    ],
)
def test_bad_requests_are_refused_and_leave_nothing(engine, fields, error, text):
    with pytest.raises(error, match=text):
        engine.add(flux_request("x", **fields))
    engine.check_integrity()
    assert not engine.has_work


def test_a_request_id_is_used_once(engine):
    engine.add(flux_request("x"))
    with pytest.raises(LoramuxError, match="in use"):
        engine.add(flux_request("x"))
    engine.abort("x")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt": " "}, "prompt"),
        ({"steps": 0}, "num_inference_steps"),
        ({"steps": 201}, "in 1 to 200"),
        ({"seed": -1}, "seed"),
        ({"guidance_scale": float("nan")}, "guidance_scale"),
        ({"true_cfg_scale": -1.0}, "true_cfg_scale"),
    ],
)
def test_fields_of_requests_are_checked(fields, text):
    with pytest.raises(InvalidRequest, match=text):
        flux_request("x", **fields)


SAMPLERS = ["euler_a", "heun", "ddim", "ddpm", "dpmpp_2m_karras", "dpmpp_2m_sde", "unipc", "lcm"]


@pytest.mark.slow
def test_samplers_of_sdxl_draw_what_they_draw_alone():
    """Each sampler in one batch with the others equals the stock pipeline with this sampler."""
    from tests.stock_pipeline import StockPipeline

    engine = ImageEngine(shared_pipeline("sdxl"))
    requests = [request_for("sdxl", name, sampler=name, steps=4) for name in SAMPLERS]
    stock = StockPipeline("sdxl", [])
    got = draw_all(engine, requests)
    for request in requests:
        off = (got[request.request_id] - stock.draw(request)).abs().max()
        assert off < 1e-5, request.sampler
