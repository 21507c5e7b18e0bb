"""State machine: arrivals, loads, failures, aborts, deadlines and page exhaustion."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from loramux.errors import DoesNotFit, InvalidRequest
from loramux.types.request import TokenEvent
from tests.unit.scheduler.scheduler_factory import Guesses, World, hashed

THREE = (("x", 1.0), ("y", 1.0), ("z", 1.0))
selections = st.sampled_from(
    [
        (),
        (),
        (("x", 1.0),),
        (("x", 0.5),),
        (("y", 1.0),),
        (("z", 1.0),),
        (("bad", 1.0),),
        (("x", 1.0), ("y", 1.0)),
        (("w", 1.0), ("z", 1.0)),
        (("w", 0.5), ("x", -1.0)),
        (("y", 1.0), ("z", 1.0)),
        THREE,
        (("x", 1.0), ("bad", 1.0)),
    ]
)


class SchedulerMachine(RuleBasedStateMachine):
    """The world checks integrity and the KV that attention would read, around each step.

    Drafts are right and wrong at random: each answer must be the one of the model alone.
    """

    @initialize(
        num_pages=st.sampled_from([9, 14, 40]),
        schedule=st.sampled_from(["fair", "fcfs"]),
        has_prefixes=st.booleans(),
        max_loras=st.sampled_from([None, 2]),
        max_sequences=st.sampled_from([1, 3, 6]),
        load_s=st.sampled_from([0.0, 0.3]),
        runs_ahead=st.booleans(),
        draft_seed=st.sampled_from([None, 1, 2, 3]),
    )
    def begin(self, num_pages: int, load_s: float, draft_seed: int | None, **settings: Any) -> None:
        self.world = World(
            drafts=None if draft_seed is None else Guesses(hashed, draft_seed),
            model=hashed,
            num_pages=num_pages,
            load_s=load_s,
            max_wait_s=0.35,
            max_batch_tokens=12,
            max_model_len=32,
            **settings,
        )
        self.count = 0
        self.open: dict[str, set[int]] = {}
        self.answers: dict[tuple[str, int], list[int]] = {}
        self.limits: dict[tuple[str, int], int] = {}

    @rule(
        start=st.integers(0, 2),
        num_prompt=st.integers(1, 15),
        max_tokens=st.integers(0, 12),
        n=st.sampled_from([1, 1, 2, 3]),
        selection=selections,
        adapter_start=st.sampled_from([0, 0, 1, 3, 4, 6, 8, 9]),
        tenant=st.sampled_from(["", "a", "b"]),
        shares=st.sampled_from([(1.0, 1.0), (3.0, 1.0), (1.0, 0.5)]),
        timeout_s=st.sampled_from([None, None, 0.4, 2.0]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
    )
    def add(
        self, start: int, num_prompt: int, n: int, adapter_start: int, **fields: object
    ) -> None:
        self.count += 1
        name = str(self.count)
        shares = fields.pop("shares")
        assert isinstance(shares, tuple)
        self.limits |= {(name, index): int(str(fields["max_tokens"])) for index in range(n)}
        try:
            self.world.add(
                name,
                list(range(start, start + num_prompt)),
                n=n,
                adapter_start=min(adapter_start, num_prompt - 1),
                tenant_share=shares[0],
                adapter_share=shares[1],
                **fields,
            )
        except (DoesNotFit, InvalidRequest):
            assert fields["selection"] == THREE, "two adapters fit"
        else:
            self.open[name] = set(range(n))
            for index in range(n):
                self.answers[name, index] = list(range(start, start + num_prompt))

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.take(self.world.step())

    @rule()
    def time_passes(self) -> None:
        self.world.now += 0.5

    @precondition(lambda self: self.open)
    @rule(data=st.data(), in_step=st.booleans())
    def abort(self, data: st.DataObject, in_step: bool) -> None:
        if in_step:
            self.world.begin()
        name = data.draw(st.sampled_from(sorted(self.open)))
        self.world.scheduler.abort(name)
        del self.open[name]
        if in_step:
            self.take([e for e in self.world.end() if e.request_id != name])

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def stop_string(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        index = data.draw(st.sampled_from(sorted(self.open[name])))
        self.world.scheduler.finish(name, index)
        self.close(name, index)

    def take(self, events: list[TokenEvent]) -> None:
        for event in events:
            name, index = event.request_id, event.index
            assert index in self.open[name], "an event after the end"
            if event.token_id is not None:
                known = self.answers[name, index]
                assert event.token_id == hashed(known), "drafts changed an answer"
                known.append(event.token_id)
                self.limits[name, index] -= 1
                assert self.limits[name, index] >= 0
                assert (event.finish_reason == "stop") == (event.token_id == 99)
            assert event.error_code in (None, "timeout", "adapter"), event.error
            if event.error_code == "adapter":
                assert event.error == "bad is broken."
            if event.finish_reason is not None:
                self.close(name, index)

    def close(self, name: str, index: int) -> None:
        self.open[name].discard(index)
        if not self.open[name]:
            del self.open[name]

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for _ in range(3000):
            if not self.world.scheduler.has_work:
                break
            self.step(1)
        assert not self.open, "a request never ended"
        assert self.world.scheduler.leases() == {} == self.world.scheduler.waiting_adapters()
        assert self.world.scheduler.claims() == {}
        self.world.adapters.poll(self.world.now + 1.0)
        assert self.world.reclaimer.num_available == self.world.pages.num_pages


SchedulerMachine.TestCase.settings = settings(suppress_health_check=[HealthCheck.too_slow])
TestSchedulerMachine = SchedulerMachine.TestCase
