"""Engines that merge while they serve: their answers must be those of engines that never do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from loramux.engine.engine import Engine
from loramux.lora.merge_controller import MergeController, common_selection
from loramux.lora.merge_policy import MergeRules, MergeState
from loramux.types.request import Request, Selection
from loramux.types.step import StepPlan, StepResult
from tests.adapter_factory import lora_config_dict, lora_tensors, make_peft_adapter, write_adapter
from tests.chunk_factory import make_chunk
from tests.engine_factory import cpu_runner, make_engine, make_prompt, make_request, run_all
from tests.model_factory import tiny_transformers_model
from tests.unit.lora.test_merge import ALL_LINEAR, base_digest, source_of

# The first merge is free by this guess, so that it begins as soon as an adapter dominates.
RULES = MergeRules(
    window_steps=8, min_samples=2, probe_every=4, rest_steps=16, assumed_cost_steps=0
)
LIMIT = 2**24


class Serving:
    """An engine whose every step passes through a controller, on a clock of its own.

    A forward takes `merged_s` or `plain_s`, and each look at the clock a millisecond: three sites
    a step fit into the time that building may take.
    """

    def __init__(self, engine: Engine, *, limit: int = LIMIT, merged_s: float = 0.009) -> None:
        self.engine = engine
        self.plain_s, self.merged_s = 0.010, merged_s
        self.now_s = 0.0
        self.seen: list[tuple[MergeState, Selection | None, bool]] = []
        self.context = cpu_runner(engine)._lora
        self.controller = MergeController(
            self.context, source_of(engine), byte_limit=limit, rules=RULES, clock=self.read_clock
        )
        self.run_plain: Callable[[StepPlan], StepResult] = engine.executor.run
        engine.executor.run = self.run  # type: ignore[method-assign]

    def read_clock(self) -> float:
        self.now_s += 0.001
        return self.now_s

    def run(self, plan: StepPlan) -> StepResult:
        with self.controller.step(plan):
            merged = self.context.merged is not None
            self.seen.append((self.controller.state, common_selection(plan), merged))
            self.now_s += self.merged_s if merged else self.plain_s
            result = self.run_plain(plan)
        self.controller.check_integrity()
        return result

    def merge(self, selection: Selection, name: str = "merge") -> None:
        """Serve nothing but this selection until it is merged."""
        for number in range(5):
            request = make_request(
                f"{name}{number}", (5, 6, 7), selection, max_tokens=12, ignore_eos=True
            )
            run_all(self.engine, [request])
            if self.controller.state is MergeState.MERGED:
                break
        assert self.controller.state is MergeState.MERGED
        assert self.controller.selection == selection


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_transformers_model("llama")


@pytest.fixture(scope="module")
def folders(model: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [
        make_peft_adapter(root / str(i), model, seed=i, r=4 + i, target_modules=ALL_LINEAR)
        for i in range(3)
    ]


@pytest.fixture(params=["packed", "plain"])
def pack_weights(request: pytest.FixtureRequest) -> bool:
    return request.param == "packed"


@pytest.fixture
def serving(model: Any, tmp_path: Path) -> Serving:
    return Serving(make_engine(model, tmp_path / "model"))


def select(engine: Engine, folder: Path, weight: float = 1.0) -> Selection:
    return ((engine.register_adapter(folder).cid, weight),)


def requests_of(selection: Selection, count: int, name: str) -> list[Request]:
    return [
        make_request(
            f"{name}{i}", make_prompt(5 + 4 * i, seed=i), selection, max_tokens=40, ignore_eos=True
        )
        for i in range(count)
    ]


def test_answers_before_during_and_after_a_merge_are_the_same(
    model: Any, tmp_path: Path, folders: list[Path], pack_weights: bool
) -> None:
    engine = make_engine(model, tmp_path, pack_weights=pack_weights)
    selection = select(engine, folders[0])
    expected = run_all(engine, requests_of(selection, 3, "a"))
    before = base_digest(engine)
    serving = Serving(engine)
    assert run_all(engine, requests_of(selection, 3, "a")) == expected
    assert serving.controller.num_bytes > 0
    states = [state for state, _, _ in serving.seen]
    assert {MergeState.WATCHING, MergeState.BUILDING, MergeState.MERGED} <= set(states)
    assert run_all(engine, requests_of(selection, 1, "a"))["a0"] == expected["a0"]
    run_all(engine, requests_of((), 1, "base"))
    assert serving.controller.state is MergeState.WATCHING and serving.controller.num_bytes == 0
    assert run_all(engine, requests_of(selection, 3, "a")) == expected
    assert base_digest(engine) == before


def test_merged_and_unmerged_steps_take_turns(serving: Serving, folders: list[Path]) -> None:
    """One step in four is a probe, and steps of others never see the merged weights."""
    selection = select(serving.engine, folders[0])
    serving.merge(selection)
    serving.seen.clear()
    run_all(serving.engine, requests_of(selection, 1, "a"))
    turns = [merged for _, _, merged in serving.seen]
    assert turns.count(False) == len(turns) // 4
    assert serving.controller.num_merged_steps >= turns.count(True) > 0


def test_mixed_steps_during_a_merge_are_right(
    model: Any, tmp_path: Path, folders: list[Path], pack_weights: bool
) -> None:
    """One adapter all the time, and among it short requests of others, each as if it were alone."""
    engine = make_engine(model, tmp_path, pack_weights=pack_weights)
    main = select(engine, folders[0])
    others = [select(engine, folders[1]), (), select(engine, folders[0], 0.5)]
    long = requests_of(main, 2, "main")
    short = [
        make_request(f"short{i}", make_prompt(3 + i, seed=i), others[i % 3], max_tokens=2)
        for i in range(6)
    ]
    alone = {r.request_id: run_all(engine, [r])[r.request_id] for r in [*long, *short]}
    serving = Serving(engine)
    serving.merge(main)
    serving.seen.clear()
    answers: dict[str, list[int]] = {name: [] for name in alone}
    for request in long:
        engine.add(request)
    while engine.has_work:
        if len(serving.seen) % 6 == 2 and short:
            engine.add(short.pop())
        for event in engine.step():
            assert event.error is None and event.token_id is not None
            answers[event.request_id].append(event.token_id)
        engine.check_integrity()
    assert answers == alone and not short
    assert {state for state, _, _ in serving.seen} == {MergeState.MERGED}
    turns = [(user, merged) for _, user, merged in serving.seen]
    assert turns.count((None, False)) >= 10 and turns.count((main, True)) >= 10
    assert all(user == main for user, merged in turns if merged)


def test_an_adapter_evicted_while_merged_takes_its_merge_along(
    model: Any, tmp_path: Path, folders: list[Path]
) -> None:
    engine = make_engine(model, tmp_path / "model", device_memory_bytes=300_000, eviction="lru")
    selection = select(engine, folders[0])
    expected = run_all(engine, requests_of(selection, 1, "a"))
    serving = Serving(engine)
    serving.merge(selection)
    for seed in range(10, 20):
        tensors = lora_tensors(model.config, seed=seed, names=tuple(ALL_LINEAR))
        config = lora_config_dict(target_modules=ALL_LINEAR)
        other = select(engine, write_adapter(tmp_path / str(seed), config, tensors))
        engine.prompt_logits([((1, 2, 3), other)])
    assert selection[0][0] not in engine.residency and serving.controller.num_bytes > 0
    run_all(engine, [make_request("base", (1, 2, 3), max_tokens=1)])
    assert serving.controller.state is MergeState.WATCHING and serving.controller.num_bytes == 0
    assert run_all(engine, requests_of(selection, 1, "a")) == expected


def test_a_forgotten_adapter_is_freed_at_once_and_may_come_back(
    serving: Serving, folders: list[Path]
) -> None:
    engine = serving.engine
    selection = select(engine, folders[0])
    expected = run_all(engine, requests_of(selection, 1, "a"))
    serving.merge(selection)
    serving.controller.forget("another")
    assert serving.controller.num_bytes > 0
    assert engine.forget_adapter(selection[0][0])
    serving.controller.forget(selection[0][0])
    assert serving.controller.num_bytes == 0 and serving.controller.selection is None
    serving.controller.check_integrity()
    assert select(engine, folders[0]) == selection
    assert run_all(engine, requests_of(selection, 1, "a")) == expected


def test_an_adapter_that_leaves_while_it_is_being_merged_stops_the_merge(
    serving: Serving, folders: list[Path]
) -> None:
    engine = serving.engine
    selection = select(engine, folders[0])
    engine.add(make_request("a", (5, 6, 7), selection, max_tokens=100, ignore_eos=True))
    while serving.controller.state is not MergeState.BUILDING:
        engine.step()
    engine.step()
    engine.abort("a")
    while engine.has_work:
        engine.step()
    assert engine.forget_adapter(selection[0][0])
    run_all(engine, [make_request("base", (1, 2, 3), max_tokens=1)])
    assert serving.controller.state is MergeState.WATCHING and serving.controller.num_bytes == 0


def test_two_adapters_that_dominate_by_turns_are_merged_by_turns(
    serving: Serving, folders: list[Path]
) -> None:
    engine = serving.engine
    users = [select(engine, folders[0]), select(engine, folders[1])]
    expected = [run_all(engine, requests_of(user, 2, "r")) for user in users]
    for turn in range(4):
        user = users[turn % 2]
        assert run_all(engine, requests_of(user, 2, "r")) == expected[turn % 2]
        assert serving.controller.selection == user


def test_a_weighted_set_is_merged_as_a_whole(serving: Serving, folders: list[Path]) -> None:
    engine = serving.engine
    first, second = (select(engine, folder)[0][0] for folder in folders[:2])
    selection: Selection = ((first, 0.75), (second, -0.5))
    expected = run_all(engine, requests_of(selection, 2, "a"))
    serving.merge(selection)
    assert run_all(engine, requests_of(selection, 2, "a")) == expected
    assert serving.seen[-2][2] or serving.seen[-1][2]


def test_no_step_builds_more_than_its_share(serving: Serving, folders: list[Path]) -> None:
    engine = serving.engine
    sizes: list[int] = []
    engine.add(make_request("a", (5,), select(engine, folders[0]), max_tokens=60, ignore_eos=True))
    while engine.has_work:
        engine.step()
        weights = serving.controller._weights
        sizes.append(0 if weights is None else len(weights.sites))
    steps = [after - before for before, after in zip(sizes, sizes[1:], strict=False)]
    assert max(sizes) == len(serving.context.bases) and max(steps) == 3


@pytest.mark.parametrize("limit", [0, 100_000])
def test_what_is_over_the_limit_is_never_begun(
    limit: int, model: Any, tmp_path: Path, folders: list[Path]
) -> None:
    serving = Serving(make_engine(model, tmp_path), limit=limit)
    run_all(serving.engine, requests_of(select(serving.engine, folders[0]), 2, "a"))
    assert {state for state, _, _ in serving.seen} == {MergeState.WATCHING}


def test_a_merge_that_is_slower_is_dropped(model: Any, tmp_path: Path, folders: list[Path]) -> None:
    serving = Serving(make_engine(model, tmp_path), merged_s=0.011)
    selection = select(serving.engine, folders[0])
    run_all(serving.engine, requests_of(selection, 1, "a"))
    assert MergeState.RESTING in {state for state, _, _ in serving.seen}


def test_a_forward_that_fails_leaves_nothing_merged(serving: Serving, folders: list[Path]) -> None:
    """A probe of the base between steps must not be answered by merged weights."""
    selection = select(serving.engine, folders[0])
    (base,) = serving.engine.prompt_logits([((5, 6, 7), ())])
    serving.merge(selection)
    plan = StepPlan((make_chunk(0, (5,), 0, [10_000_000], selection),))
    merged = []
    for turn in range(4):
        with pytest.raises(IndexError), serving.controller.step(plan):
            merged.append(serving.context.merged is not None)
            serving.run_plain(plan)
        assert serving.context.merged is None
        run_all(serving.engine, [make_request(str(turn), (5,), selection, max_tokens=1)])
    assert merged.count(True) == 3
    assert torch.equal(serving.engine.prompt_logits([((5, 6, 7), ())])[0], base)
