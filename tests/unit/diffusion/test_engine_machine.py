"""Random orders of requests, loads, evictions, pins and removals: the images do not change."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loramux.diffusion.engine import ImageEngine
from loramux.diffusion.memory import MemoryOptions
from loramux.diffusion.planner import PlanLimits
from loramux.errors import AdapterNotFound, DoesNotFit
from tests.image_factory import draw_all, make_adapter, make_pipeline, request_for, shared_pipeline
from tests.memory_factory import ManualExecutor

PAGE = 4096
NAMES = "abcde"
ADAPTERS = {
    name: make_adapter(shared_pipeline("flux"), name, ("attn.to_q",), rank=1 + index % 2)
    for index, name in enumerate(NAMES)
}
# Sums of up to two adapters.
SELECTIONS = [
    (),
    *(((name, 1.0),) for name in NAMES),
    (("a", 0.5), ("b", -0.5)),
    (("c", 1.0), ("e", 0.25)),
]
ALONE: dict[object, torch.Tensor] = {}


def request_of(request_id, selection, steps, tenant=""):
    return request_for(
        "flux", request_id, prompt="hill", seed=1, steps=steps, selection=selection, tenant=tenant
    )


def drawn_alone(selection, steps):
    """Return the image of an engine of its own."""
    if (selection, steps) not in ALONE:
        engine = ImageEngine(make_pipeline("flux"))
        for cid, _ in selection:
            engine.add_adapter(ADAPTERS[cid])
        ALONE[selection, steps] = draw_all(engine, [request_of("x", selection, steps)])["x"]
    return ALONE[selection, steps]


class EngineMachine(RuleBasedStateMachine):
    """An engine whose pool has room for three adapters, and its host tier for two."""

    def __init__(self):
        super().__init__()
        self.loads = ManualExecutor()
        memory = MemoryOptions(device_bytes=3 * PAGE, host_bytes=2 * PAGE, page_bytes=PAGE)
        limits = PlanLimits(max_images=3)
        self.engine = ImageEngine(make_pipeline("flux"), limits, memory=memory, loads=self.loads)
        for adapter in ADAPTERS.values():
            self.engine.add_adapter(adapter)
        self.open = {}
        self.removed = set()
        self.count = 0

    @rule(
        selection=st.sampled_from(SELECTIONS),
        steps=st.integers(1, 3),
        tenant=st.sampled_from("xy"),
    )
    def add(self, selection, steps, tenant):
        self.count += 1
        request = request_of(f"r{self.count}", selection, steps, tenant)
        if self.removed.isdisjoint(request.cids):
            self.engine.add(request)
            self.open[request.request_id] = (selection, steps)
        else:
            with pytest.raises(AdapterNotFound):
                self.engine.add(request)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        self.engine.abort(request_id)
        del self.open[request_id]

    @rule()
    def step(self):
        for event in self.engine.step():
            if not event.is_last:
                continue
            selection, steps = self.open.pop(event.request_id)
            if event.error is not None:
                # Beside pinned adapters a sum may have no room.
                assert isinstance(event.error, DoesNotFit), event.error
                assert len(selection) == 2
                continue
            off = (event.pixels - drawn_alone(selection, steps)).abs().max()
            assert float(off) < 1e-5, (selection, steps)

    @precondition(lambda self: self.loads.jobs)
    @rule()
    def load(self):
        self.loads.run_one()

    @rule(count=st.integers(1, 3))
    def evict(self, count):
        self.engine.memory.tier.reclaimer.reclaim(count)

    @rule(name=st.sampled_from(NAMES), is_pinned=st.booleans())
    def pin(self, name, is_pinned):
        if name in self.removed:
            return
        try:
            self.engine.memory.residency.pin(name, is_pinned=is_pinned)
        except DoesNotFit:
            assert is_pinned

    @rule(name=st.sampled_from(NAMES))
    def remove(self, name):
        if name not in self.removed:
            self.engine.remove_adapter(name)
            self.removed.add(name)

    @rule(name=st.sampled_from(NAMES))
    def register(self, name):
        self.engine.add_adapter(ADAPTERS[name])
        self.removed.discard(name)

    @invariant()
    def is_sound(self):
        self.engine.check_integrity()

    def teardown(self):
        for _ in range(400):
            if not self.engine.has_work:
                break
            self.loads.run_all()
            self.step()
        assert not self.open and not self.engine.has_work


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=8, stateful_step_count=25, deadline=None)
