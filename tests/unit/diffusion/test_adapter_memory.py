"""Adapters of images in the tiers: loads, leases, evictions, refusals; what images see of it."""

from __future__ import annotations

import gc
import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from loramux.diffusion.adapter import Kronecker, LowRank
from loramux.diffusion.engine import ImageEngine
from loramux.diffusion.job import JobState
from loramux.diffusion.memory import MemoryOptions
from loramux.diffusion.planner import PlanLimits
from loramux.diffusion.stats import adapter_uses, engine_stats
from loramux.errors import AdapterNotFound, AdapterRefused, DoesNotFit
from tests.image_factory import (
    ATTENTION,
    TEXT,
    draw_all,
    finish,
    make_adapter,
    make_pipeline,
    peft_tensors,
    request_for,
    shared_pipeline,
)
from tests.memory_factory import ManualExecutor

PAGE = 4096


def small_adapter(name, rank=1):
    """Return an adapter of one page."""
    return make_adapter(shared_pipeline("flux"), name, ("attn.to_q",), rank=rank)


def small_engine(num_pages, *, host_pages=64, limits=None, **options):
    memory = MemoryOptions(
        device_bytes=num_pages * PAGE, host_bytes=host_pages * PAGE, page_bytes=PAGE
    )
    return ImageEngine(make_pipeline("flux"), limits, memory=memory, **options)


@pytest.fixture
def make_engine():
    """Make engines that have no hook left once their adapters are removed."""
    made = []

    def make(*args, **options):
        made.append(small_engine(*args, **options))
        return made[-1]

    yield make
    for engine in made:
        for cid in engine.adapters:
            engine.remove_adapter(cid)
        engine.check_integrity()
        assert not any(module._forward_hooks for module in engine.net.modules())
        engine.close()


def flux_request(request_id, *names, **fields):
    fields = {"steps": 2, "seed": 3, "prompt": "a hill"} | fields
    selection = tuple((name, 1.0) for name in sorted(names))
    return request_for("flux", request_id, selection=selection, **fields)


def stored(folder, name, *, rank=1):
    path = Path(folder) / f"{name}.safetensors"
    save_file(peft_tensors(small_adapter(name, rank)), path)
    return path


def test_weights_come_to_the_device_with_the_first_image(make_engine, tmp_path):
    engine = make_engine(4)
    card = engine.register_adapter(stored(tmp_path, "a"))
    assert card.num_bytes < PAGE and card.num_modules == {"transformer": 2}
    assert not engine.memory.residency.resident
    first, second = (flux_request(name, card.cid, steps=1) for name in ("first", "second"))
    facts = {}
    for request in (first, second):
        engine.add(request)
        while engine.has_work:
            for event in engine.step():
                if event.is_last:
                    facts[event.request_id] = event.facts
    assert facts["first"].tier_found == "host" and facts["second"].tier_found == "device"
    assert facts["first"].load_s > 0 and facts["second"].load_s == 0
    (use,) = adapter_uses(engine)
    assert (use.tier, use.hits, use.misses) == ("device", 1, 1)
    assert {tier.tier: tier.num_adapters for tier in engine_stats(engine).tiers} == {
        "device": 1,
        "host": 1,
    }


def test_images_go_on_while_an_adapter_is_loaded(make_engine):
    loads = ManualExecutor()
    engine = make_engine(4, loads=loads)
    engine.add_adapter(small_adapter("a"))
    engine.add(flux_request("base", steps=5))
    engine.add(flux_request("cold", "a", steps=1))
    assert [event.request_id for event in engine.step()] == ["base"]
    assert engine.state_of("cold") is JobState.LOADING
    assert engine.waiting_adapters() == {"a": 1}
    engine.step()
    loads.run_all()
    assert {event.request_id for event in engine.step()} == {"base", "cold"}
    finish(engine)


def test_an_adapter_that_is_too_large_is_refused_when_it_is_registered(make_engine, tmp_path):
    pipe = shared_pipeline("flux")
    engine = make_engine(1)
    path = tmp_path / "large.safetensors"
    save_file(peft_tensors(make_adapter(pipe, "large", ATTENTION, rank=8)), path)
    with pytest.raises(DoesNotFit, match="--image-adapter-memory"):
        engine.register_adapter(path)
    assert not engine.adapters


def test_a_file_that_was_replaced_fails_its_images_alone(make_engine, tmp_path):
    engine = make_engine(4)
    card = engine.register_adapter(stored(tmp_path, "a"))
    engine.memory.tiers.host.drop(card.cid)
    stored(tmp_path, "a", rank=2)
    engine.add(flux_request("bad", card.cid))
    engine.add(flux_request("good"))
    events = []
    while engine.has_work:
        events += engine.step()
        engine.check_integrity()
    errors = {event.request_id: event.error for event in events if event.error is not None}
    assert list(errors) == ["bad"] and isinstance(errors["bad"], AdapterRefused)
    assert "replaced" in str(errors["bad"])
    assert any(event.request_id == "good" and event.pixels is not None for event in events)


def test_a_running_image_keeps_its_adapters_and_a_waiting_one_gets_them_next(make_engine):
    """With room for one adapter, images with two adapters follow each other."""
    engine = make_engine(1)
    for name in "ab":
        engine.add_adapter(small_adapter(name))
    order = []
    engine.add(flux_request("a1", "a", steps=3, tenant="x"))
    engine.step()
    engine.add(flux_request("b1", "b", steps=1, tenant="y"))
    engine.add(flux_request("a2", "a", steps=1, tenant="x"))
    while engine.has_work:
        order += [event.request_id for event in engine.step() if event.is_last]
        engine.check_integrity()
    assert order == ["a1", "b1", "a2"]
    assert engine_stats(engine).num_adapter_evictions == 2


def test_a_sum_that_can_never_fit_is_refused_and_one_beside_pins_fails(make_engine):
    engine = make_engine(3)
    for name in "abcd":
        engine.add_adapter(small_adapter(name))
    with pytest.raises(DoesNotFit):
        engine.add(flux_request("x", *"abcd"))
    engine.memory.residency.pin("d", is_pinned=True)
    engine.step()
    engine.add(flux_request("x", *"abc"))
    engine.add(flux_request("y", "a", steps=1))
    events = []
    while engine.has_work:
        events += engine.step()
        engine.check_integrity()
    ends = {event.request_id: event.error for event in events if event.is_last}
    assert isinstance(ends["x"], DoesNotFit) and "pinned" in str(ends["x"])
    assert ends["y"] is None
    assert "d" in engine.memory.residency.resident


def test_a_removed_adapter_leaves_all_tiers_after_its_last_image(make_engine):
    engine = make_engine(4)
    engine.add_adapter(make_adapter(shared_pipeline("flux"), "t", ("to_q", *TEXT), rank=1))
    engine.add(flux_request("x", "t", steps=3))
    engine.step()
    engine.remove_adapter("t")
    engine.step()
    assert "t" in engine.memory.residency.resident
    with pytest.raises(AdapterNotFound):
        engine.add(flux_request("y", "t"))
    finish(engine)
    assert not engine.memory.residency.resident and not engine.adapters
    assert engine.memory.tiers.host.used_bytes == 0
    assert engine.memory.tier.pages.num_free == 4


def test_buckets_draw_what_mixed_forwards_draw(make_engine, monkeypatch):
    """Each forward of a bucket has one selection, weights included."""
    selections = [(), (("a", 1.0),), (("a", 0.5),), (("a", 1.0), ("b", -0.5))]
    requests = [
        request_for("flux", f"{i}-{j}", steps=2, selection=selection)
        for i, selection in enumerate(selections)
        for j in range(2)
    ]
    drawn, seen = {}, {"mixed": [], "bucket": []}
    for batching in ("mixed", "bucket"):
        engine = make_engine(4, limits=PlanLimits(batching=batching))
        for name in "ab":
            engine.add_adapter(small_adapter(name))
        forward = engine.family.forward

        def spy(rows, forward=forward, batching=batching):
            seen[batching].append({row.sampling.request.selection for row in rows})
            return forward(rows)

        monkeypatch.setattr(engine.family, "forward", spy)
        drawn[batching] = draw_all(engine, requests)
    assert max(map(len, seen["mixed"])) == 4
    assert all(len(selections) == 1 for selections in seen["bucket"])
    assert len(seen["bucket"]) == 8
    for name, pixels in drawn["mixed"].items():
        assert float((pixels - drawn["bucket"][name]).abs().max()) < 1e-5


def test_new_images_and_decoding_delay_others_by_little(make_engine, monkeypatch):
    """A step encodes the prompts of two images at most, and decodes one group."""
    engine = make_engine(4)
    engine.add(flux_request("old", steps=4))
    engine.step()
    for index in range(6):
        engine.add(flux_request(f"new{index}", steps=1, prompt=f"hill {index}"))
    encoded, decoded = [], []
    encode, images = engine.family.encode, engine.family.images
    monkeypatch.setattr(engine.family, "encode", lambda *a: encoded.append(1) or encode(*a))
    monkeypatch.setattr(engine.family, "images", lambda *a: decoded.append(len(a[0])) or images(*a))
    before = 0
    while engine.has_work:
        engine.step()
        assert len(encoded) - before <= 2
        before = len(encoded)
    assert sum(decoded) == 7 and len(encoded) == 6


NUM_REGISTERED, NUM_USED, NUM_PLACES = 200, 40, 12


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Files of 200 adapters."""
    folder = tmp_path_factory.mktemp("many")
    # Adapters differ by the sum of the characters of their names.
    return [stored(folder, chr(0x4E00 + index)) for index in range(NUM_REGISTERED)]


def test_forty_of_two_hundred_adapters_in_a_pool_for_twelve(make_engine, many):
    """Every image is the same as in an engine with room for all; the tiers keep their budgets."""
    engine = make_engine(NUM_PLACES, host_pages=2, limits=PlanLimits(max_images=8))
    roomy = make_engine(NUM_REGISTERED)
    cids = [engine.register_adapter(path).cid for path in many]
    assert len(engine.adapters) == NUM_REGISTERED
    used = cids[:: NUM_REGISTERED // NUM_USED]
    for path in many[:: NUM_REGISTERED // NUM_USED]:
        roomy.register_adapter(path)
    requests = [flux_request(f"{i}", cid, steps=1) for i, cid in enumerate(used)]
    expected = draw_all(roomy, requests, check=False)
    got = draw_all(engine, requests, check=False)
    engine.check_integrity()
    for name, pixels in expected.items():
        assert float((pixels - got[name]).abs().max()) < 1e-5
    stats = engine_stats(engine)
    device, host = stats.tiers
    assert stats.num_adapter_loads >= NUM_USED
    assert stats.num_adapter_evictions >= NUM_USED - NUM_PLACES
    assert len(engine.memory.residency.resident) <= NUM_PLACES
    assert device.used_bytes <= device.budget_bytes and host.used_bytes <= host.budget_bytes


@pytest.mark.slow
def test_memory_does_not_grow_over_five_hundred_images(make_engine, many):
    engine = make_engine(NUM_PLACES, host_pages=4)
    used = [engine.register_adapter(path).cid for path in many][:NUM_USED]
    choices = random.Random(0)

    def draw(count):
        requests = [
            flux_request(f"{i}", choices.choice(used), steps=1, prompt=f"hill {i}")
            for i in range(count)
        ]
        draw_all(engine, requests, check=False)
        gc.collect()
        return resident_bytes()

    before = draw(100)
    after = draw(400)
    assert after - before < 40 * 2**20
    assert engine_stats(engine).num_adapter_evictions > 100
    engine.check_integrity()


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def not_zeroed(num_elements, dtype):
    return torch.full((num_elements,), torch.nan, dtype=dtype)


def changed(adapter, change):
    """Return the same with other deltas in every other module."""
    components = {
        component: {
            path: change(pair) if number % 2 else pair
            for number, (path, pair) in enumerate(modules.items())
        }
        for component, modules in adapter.components.items()
    }
    return replace(adapter, components=components)


def with_rows(pair):
    return replace(pair, dora=torch.randn(3, len(pair.b)))


def with_bias(pair):
    return replace(pair, bias=torch.randn(len(pair.b)))


def bias_alone(pair):
    return LowRank(pair.a[:0], pair.b[:, :0], bias=torch.randn(len(pair.b)))


def factors(pair):
    """Return a part of a product, whose first row is not one of the module."""
    _, columns, *kernel = pair.a.shape
    right = torch.randn(5, columns // 2, *kernel)
    bias = torch.randn(len(pair.b))
    return Kronecker(torch.randn(len(pair.b), 2), right, len(pair.b), 3, bias)


PARTS = ("a", "b", "left", "right", "dora", "bias", "num_rows", "skip")


@pytest.mark.parametrize("change", [None, with_rows, with_bias, bias_alone, factors])
def test_a_packed_adapter_is_the_one_of_its_file(make_engine, change):
    """Convolutions and text encoders included, and also after a way through the disk tier."""
    from loramux.diffusion.lora_files.names import PipelineNames
    from loramux.diffusion.packing import ImagePacking

    pipe = shared_pipeline("sdxl")
    names = PipelineNames(pipe, "unet", ("text_encoder", "text_encoder_2"))
    # The columns of DoRA are longer than such a page and lie over several.
    packing = ImagePacking(names.targets, torch.float32, page_bytes=256, allocate=not_zeroed)
    adapter = make_adapter(pipe, "c", (*ATTENTION, *TEXT, "conv1", "conv_in"), rank=3)
    if change is not None:
        adapter = changed(adapter, change)
    image = packing.pack(adapter)
    keys = json.loads(json.dumps((image.layout.key, image.layout.extras.key)))
    layout = packing.dense.layout_of(*keys)
    assert layout.key == image.layout.key and layout.extras == image.layout.extras
    found = packing.unpack(layout, image.buffer)
    assert found.keys() == adapter.components.keys()
    for component, modules in adapter.components.items():
        assert found[component].keys() == modules.keys()
        for path, pair in modules.items():
            other = found[component][path]
            assert type(other) is type(pair)
            for part in PARTS:
                one, two = getattr(pair, part, None), getattr(other, part, None)
                assert type(one) is type(two), part
                assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two
    half = ImagePacking(names.targets, torch.float16)
    large = make_adapter(pipe, "l", ("to_q",), rank=1)
    next(iter(large.components["unet"].values())).b.mul_(1e9)
    with pytest.raises(AdapterRefused, match="too large"):
        half.pack(large)
