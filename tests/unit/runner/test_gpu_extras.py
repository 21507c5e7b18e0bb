"""Adapters with extras on the GPU's runner, against models with merged weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from loramux.engine.engine import Engine
from loramux.lora.device_extras import ExtrasUse
from loramux.lora.graph_lora import BASE_MODE, LoraMode, LoraPath
from loramux.memory.device import GraphMaker
from loramux.runner.gpu_runner import BatchLimits, GpuRunner
from loramux.types.request import Selection
from loramux.types.step import BeforeChoice, InFlightStep, StepPlan
from tests.chunk_factory import make_chunk
from tests.device_factory import decode, device_engine, last_launch, lease, row, runner_with
from tests.engine_factory import make_prompt, make_request, run_all
from tests.extras_factory import one
from tests.extras_models import Adapter, merged_model, random_adapters, register
from tests.model_factory import tiny_transformers_model

pytest.importorskip("triton", reason="no Triton on this machine")

SETTINGS: dict[str, Any] = {"max_sequences": 10, "max_batch_tokens": 64}
SUM: Selection = (("dora", 0.5), ("ranks", -1.5))


def sum_of(adapters: dict[str, Adapter], selection: Selection) -> list[tuple[Adapter, float]]:
    return [(adapters[name], weight) for name, weight in selection]


def expected_logits(
    model: Any, adapters: dict[str, Adapter], selection: Selection, tokens: Sequence[int]
) -> Tensor:
    """Logits of the last token."""
    oracle = merged_model(copy.deepcopy(model), sum_of(adapters, selection))
    with torch.inference_mode():
        logits: Tensor = oracle(torch.tensor([[*tokens]])).logits[0, -1]
    return logits


def padded(logits: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(logits, (0, width - len(logits)), value=float("-inf"))


class Scene:
    """Sequences of several selections, with their prompts computed in one step."""

    def __init__(
        self, runner: GpuRunner, engine: Engine, selections: Sequence[Selection], vocab: int
    ) -> None:
        last = engine.pages.num_pages - 1
        self.runner = runner
        self.selections = selections
        self.prompts = [
            make_prompt(3 + i, seed=i, vocab_size=vocab) for i in range(len(selections))
        ]
        self.pages = [[last - i] for i in range(len(selections))]

    def prefill(self) -> dict[int, list[int]]:
        chunks = [
            make_chunk(i, prompt, 0, self.pages[i], self.selections[i], sample=row())
            for i, prompt in enumerate(self.prompts)
        ]
        return self.runner.run(StepPlan(tuple(chunks))).accepted

    def decode(self, token: int) -> tuple[dict[int, list[int]], dict[int, Tensor]]:
        """Return the tokens of a decode step, and its logits by sequence."""
        chunks = [
            decode(i, token, len(prompt), self.pages[i], self.selections[i])
            for i, prompt in enumerate(self.prompts)
        ]
        tokens = self.runner.run(StepPlan(tuple(chunks))).accepted
        return tokens, last_launch(self.runner)[2]


@pytest.mark.parametrize("family", ["llama31", "gemma2"])
def test_a_mixed_batch_equals_merged_models(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model(family, num_hidden_layers=2)
    engine, runner = device_engine(monkeypatch, model, tmp_path / "model", **SETTINGS)
    adapters = random_adapters(engine.catalog.base)
    names = [name for name in adapters if name != "wide"]
    register(engine, adapters)
    selections: list[Selection] = [*map(one, names), (), SUM, one("dora")]
    lease(engine, *selections)
    scene = Scene(runner, engine, selections, vocab=256)
    prefilled = scene.prefill()
    tokens, logits = scene.decode(40)
    _, mode, _ = last_launch(runner)
    assert mode.path is LoraPath.SEGMENTED
    assert mode.extras == ~ExtrasUse.WIDE & ~ExtrasUse.NONE
    for number, selection in enumerate(selections):
        prompt = scene.prompts[number]
        first = expected_logits(model, adapters, selection, prompt)
        assert prefilled[number] == [int(first.argmax())], selection
        expected = expected_logits(model, adapters, selection, [*prompt, 40])
        expected = padded(expected, 256)
        torch.testing.assert_close(logits[number].float(), expected, atol=2e-4, rtol=2e-4)
        assert tokens[number] == [int(expected.argmax())]
        # Without graphs.
        chunk = make_chunk(0, (*prompt, 40), 0, scene.pages[number], selection)
        whole = runner.logits(StepPlan((chunk,)))[0][-1]
        torch.testing.assert_close(whole, expected, atol=2e-4, rtol=2e-4)


def test_an_added_vocabulary_widens_the_logits_of_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    engine, runner = device_engine(monkeypatch, model, tmp_path / "model", **SETTINGS)
    adapters = random_adapters(engine.catalog.base)
    register(engine, adapters)
    selections: list[Selection] = [one("wide"), (), one("dora")]
    lease(engine, *selections)
    scene = Scene(runner, engine, selections, vocab=256)
    # An added token in the prompt.
    scene.prompts[0] = (*scene.prompts[0], 260)
    chunks = [
        make_chunk(i, prompt, 0, scene.pages[i], selections[i], sample=row(logprobs=3))
        for i, prompt in enumerate(scene.prompts)
    ]
    found = runner.run(StepPlan(tuple(chunks)))
    logits = runner.logits(StepPlan(tuple(chunks)))
    for number, prompt in enumerate(scene.prompts):
        expected = padded(expected_logits(model, adapters, selections[number], prompt), 263)
        torch.testing.assert_close(logits[number][-1], expected, atol=2e-4, rtol=2e-4)
        assert found.accepted[number] == [int(expected.argmax())]
        (described,) = found.logprobs[number]
        assert described.logprob == pytest.approx(float(expected.log_softmax(-1).max()), abs=1e-4)
    alone = runner.logits(StepPlan((chunks[1],)))
    assert alone[1].shape[1] == 256


def test_prompt_logprobs_are_those_of_the_own_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    engine, runner = device_engine(monkeypatch, model, tmp_path / "model", **SETTINGS)
    adapters = random_adapters(engine.catalog.base)
    register(engine, adapters)
    selections: list[Selection] = [one("full"), (), one("ranks")]
    lease(engine, *selections)
    scene = Scene(runner, engine, selections, vocab=200)
    chunks = [
        make_chunk(
            *(i, prompt, 0, scene.pages[i], selections[i]),
            following=prompt[1:],
        )
        for i, prompt in enumerate(scene.prompts)
    ]  # fmt: skip
    result = runner.run(StepPlan(tuple(chunks)))
    for number, prompt in enumerate(scene.prompts):
        logits = expected_logits(model, adapters, selections[number], prompt[:-1])
        last = result.logprobs[number][-1]
        assert last.logprob == pytest.approx(float(logits.log_softmax(-1)[prompt[-1]]), abs=2e-4)


class CostlyMaker(GraphMaker):
    """Captures cost something, as on a GPU: what is made has run."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    @property
    def has_run(self) -> bool:
        return True

    def make(self, work: Any) -> Any:
        work()
        return work


def test_graphs_are_captured_when_steps_have_such_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before that, steps run without a graph; those of other adapters do not change."""
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    settings = {**SETTINGS, "max_sequences": 3, "lora_augmented_ranks": 0}
    engine, runner = device_engine(monkeypatch, model, tmp_path / "model", **settings)
    for graphs in (runner.decode_graphs, runner.prefill_graphs):
        graphs.graphs.maker = CostlyMaker()
    runner.capture_largest()
    adapters = random_adapters(engine.catalog.base)
    register(engine, adapters)
    plain, dora = make_request("p", make_prompt(3, seed=1)), one("dora")
    run_all(engine, [plain])
    kinds = (runner.decode_graphs, runner.prefill_graphs)
    assert not any(mode.extras for graphs in kinds for _, mode in graphs.graphs.made)
    uses = ExtrasUse.LINEARS | ExtrasUse.NORMS
    launched: list[str | None] = []
    launch = runner.launch

    def watch(plan: StepPlan, before_choice: BeforeChoice | None = None) -> InFlightStep:
        step = launch(plan, before_choice)
        launched.extend(one.kind for one in runner.trace())
        return step

    monkeypatch.setattr(runner, "launch", watch)
    request = make_request("d", make_prompt(3, seed=1), dora, max_tokens=5)
    monkeypatch.setattr("loramux.engine.engine._PREPARE_INTERVAL_S", 1e9)
    expected = run_all(engine, [request])
    assert set(launched) == {None} and len(launched) >= 5, "without graphs"
    mode = LoraMode(LoraPath.SEGMENTED, extras=uses)
    while runner.prepare_next(only_wanted=True):
        pass
    made = runner.decode_graphs.graphs.made
    assert {key for key in made if key[1].extras} == {(1, mode)}
    assert (32, mode) in runner.prefill_graphs.graphs.made
    launched.clear()
    again = make_request("d", make_prompt(3, seed=1), dora, max_tokens=5, seed=9)
    assert run_all(engine, [again]) == expected
    assert None not in launched and launched[0] == "prefill"
    run_all(engine, [make_request("q", make_prompt(4, seed=2))])
    assert last_launch(runner)[1] == BASE_MODE


@pytest.mark.slow
def test_all_kernels_in_the_interpreter_equal_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loramux.kernels.gpu.extras import ops

    model = tiny_transformers_model("llama", num_hidden_layers=1)
    engine, runner = device_engine(monkeypatch, model, tmp_path / "model", **SETTINGS)
    adapters = random_adapters(engine.catalog.base)
    register(engine, adapters)
    selections: list[Selection] = [one("full"), one("rows"), SUM, ()]
    lease(engine, *selections)
    limits = BatchLimits(max_batch_tokens=32, max_sequences=4, max_pages=1)
    fast = runner_with(runner, limits, extras=ops)
    found = []
    for one_runner in (runner, fast):
        scene = Scene(one_runner, engine, selections, vocab=256)
        found.append((scene.prefill(), *scene.decode(40)))
    assert found[0][:2] == found[1][:2]
    for number in range(len(selections)):
        torch.testing.assert_close(found[1][2][number], found[0][2][number], atol=1e-4, rtol=1e-4)


def test_names_of_modes_name_the_parts() -> None:
    mode = LoraMode(LoraPath.SEGMENTED, extras=ExtrasUse.NORMS | ExtrasUse.HEAD)
    assert str(mode) == "segmented norms head"
