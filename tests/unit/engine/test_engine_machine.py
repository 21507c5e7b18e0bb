"""Requests, aborts, stops and too little memory in any order: nothing is lost, ever."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loramux.engine.engine import Engine
from loramux.errors import DoesNotFit, InvalidRequest
from loramux.types.composition import compose
from tests.adapter_factory import lora_config_dict, lora_tensors, write_adapter
from tests.engine_factory import make_engine, make_prompt, make_request
from tests.kinds_factory import make_kind
from tests.memory_factory import InlineExecutor
from tests.model_factory import tiny_transformers_model

NUM_LOW_RANK = 4
# A full head takes 16 pages, both of a larger vocabulary 34.
KINDS = ("dora", "saved_head", "trained_tokens", "ia3", "saved_norms", "added_tokens")
NUM_ADAPTERS = NUM_LOW_RANK + len(KINDS)


def build() -> tuple[Engine, list[str]]:
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    with tempfile.TemporaryDirectory() as folder:
        # One page is 16 tokens; 48 pages are about three adapters and a few sequences.
        engine = make_engine(
            model,
            Path(folder) / "model",
            device_memory_bytes=48 * 2 * 16 * 2 * 16 * 4,
            max_batch_tokens=24,
            max_sequences=5,
            loads=InlineExecutor(),
        )
        folders = [
            write_adapter(
                Path(folder) / str(seed),
                lora_config_dict(r=1 + seed, target_modules=["q_proj", "v_proj"]),
                lora_tensors(model.config, seed=seed, r=1 + seed),
            )
            for seed in range(NUM_LOW_RANK)
        ]
        folders += [make_kind(name, model, Path(folder) / name) for name in KINDS]
        cids = [engine.register_adapter(path).cid for path in folders]
        # The folder is deleted: from now on the adapters come from host memory.
        for cid in cids:
            assert engine.residency.load_now([cid])
            engine.residency.release([cid])
    return engine, cids


ENGINE, CIDS = build()
ONLY_ALONE = {cid: ENGINE.catalog.get(cid).only_alone for cid in CIDS}


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.engine = ENGINE
        self.open: dict[str, set[int]] = {}
        self.count = 0

    @rule(
        length=st.integers(1, 90),
        max_tokens=st.integers(0, 40),
        n=st.integers(1, 3),
        adapters=st.lists(st.integers(0, NUM_ADAPTERS - 1), unique=True, max_size=3),
    )
    def add(self, length: int, max_tokens: int, n: int, adapters: list[int]) -> None:
        self.count += 1
        name = str(self.count)
        selection = compose((CIDS[number], 1.0 - number) for number in adapters)
        request = make_request(
            name, make_prompt(length, seed=self.count), selection, max_tokens=max_tokens, n=n
        )
        try:
            self.engine.add(request)
        except DoesNotFit:
            assert len(selection) > 1, "a single adapter fits"
        except InvalidRequest as error:
            assert error.param == "adapters" and any(ONLY_ALONE[cid] for cid, _ in selection)
        else:
            self.open[name] = set(range(n))

    @rule(times=st.integers(1, 5))
    def step(self, times: int) -> None:
        for _ in range(times):
            for event in self.engine.step():
                assert event.error is None
                if event.finish_reason is not None:
                    self.end_choice(event.request_id, event.index)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        self.engine.abort(name)
        del self.open[name]

    @precondition(lambda self: self.open)
    @rule(data=st.data(), index=st.integers(0, 2))
    def stop_string(self, data: st.DataObject, index: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        self.engine.finish(name, index)
        if index in self.open[name]:
            self.end_choice(name, index)

    def end_choice(self, name: str, index: int) -> None:
        self.open[name].remove(index)
        if not self.open[name]:
            del self.open[name]

    @invariant()
    def everything_is_accounted_for(self) -> None:
        self.engine.check_integrity()

    def teardown(self) -> None:
        for _ in range(2000):
            if not self.engine.has_work:
                break
            self.step(1)
            self.engine.check_integrity()
        assert not self.open, "a request never ended"
        # All is idle, and leaves for the next run.
        assert self.engine.memory.reclaimer.reclaim(self.engine.pages.num_pages)


EngineMachine.TestCase.settings = settings(
    max_examples=20,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestEngineMachine = EngineMachine.TestCase
