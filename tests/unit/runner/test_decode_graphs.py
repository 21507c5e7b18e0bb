from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from loramux.engine.engine import Engine
from loramux.lora.graph_lora import BASE_MODE, LoraMode
from loramux.memory.device import GraphMaker
from loramux.runner.decode_graphs import BATCH_SIZES, DecodeLimits
from loramux.runner.gpu_runner import GpuRunner
from loramux.types.request import Selection
from loramux.types.step import StepPlan
from tests.adapter_factory import ATTENTION, make_peft_adapter
from tests.chunk_factory import make_chunk
from tests.device_factory import (
    ALL_LINEAR,
    decode,
    device_engine,
    last_launch,
    lease,
    mixed_selections,
    row,
    two_adapters,
)
from tests.engine_factory import make_prompt, make_request, run_all
from tests.lora_factory import (
    AUGMENTED,
    AUGMENTED_ATTENTION,
    AUGMENTED_NARROW,
    LORA_MODES,
    SEGMENTED,
    SEGMENTED_ATTENTION,
)
from tests.model_factory import tiny_transformers_model

pytest.importorskip("triton", reason="no Triton on this machine")

AUGMENTED_RANKS = {AUGMENTED: 128, AUGMENTED_ATTENTION: 128, AUGMENTED_NARROW: 256}
# Of steps with few rows, for which a tail has one width.
OF_FEW_ROWS = [mode for mode in (*LORA_MODES, BASE_MODE) if mode != AUGMENTED_NARROW]
OF_ATTENTION = (SEGMENTED_ATTENTION, AUGMENTED_ATTENTION)


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (5, [1, 2, 4, 5]), (999, list(BATCH_SIZES))])
def test_batch_sizes_end_with_the_largest_possible_batch(most: int, sizes: list[int]) -> None:
    assert DecodeLimits(max_sequences=most, max_pages=1).batch_sizes == sizes


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        *(
            pytest.param("llama", mode, marks=pytest.mark.slow if mode in OF_ATTENTION else ())
            for mode in LORA_MODES
        ),
        ("gemma3", AUGMENTED),
        pytest.param("gemma3", SEGMENTED, marks=pytest.mark.slow),
    ],
)
def test_a_decode_step_equals_its_sequences_computed_one_by_one(
    family: str, mode: LoraMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model(family)
    places = ATTENTION if mode in OF_ATTENTION else ALL_LINEAR
    folders = two_adapters(model, tmp_path, places=places)
    settings = {"max_sequences": 6, "lora_augmented_ranks": AUGMENTED_RANKS.get(mode, 0)}
    engine, runner = device_engine(monkeypatch, model, tmp_path / "model", **settings)
    selections = mixed_selections(engine, folders)[:5]
    lease(engine, *selections)
    last = engine.pages.num_pages - 1
    pages = [[last - 2 * i, last - 2 * i - 1] for i in range(len(selections))]
    lengths = [3, 17, 9, 16, 1]
    prompts = [
        make_chunk(i, make_prompt(lengths[i], seed=i), 0, pages[i], selection)
        for i, selection in enumerate(selections)
    ]
    runner.run(StepPlan(tuple(prompts)))
    # One is a padding row short of the size that fits.
    chunks = [decode(i, 40 + i, lengths[i], pages[i], s) for i, s in enumerate(selections)]
    result = runner.run(StepPlan(tuple(chunks)))
    (launch,) = runner.trace()
    assert (launch.kind, launch.key) == ("decode", (6, mode))
    for chunk in chunks:
        logits = runner.logits(StepPlan((chunk,)))[chunk.sequence_id][0]
        found = launch.logits[chunk.sequence_id].float()
        torch.testing.assert_close(found, logits, atol=1e-4, rtol=1e-4)
        assert result.accepted[chunk.sequence_id] == [int(logits.argmax())]


ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": list(ATTENTION)},
    "query": {"target_modules": ["q_proj"], "r": 20},
    "all": {"target_modules": list(ALL_LINEAR)},
    "late": {"target_modules": ["down_proj"], "layers_to_transform": [1]},
}


def steps_of_kinds(
    runner: GpuRunner,
    selections: dict[str, Selection],
    pages: dict[str, list[int]],
    modes: tuple[LoraMode, LoraMode],
) -> dict[str, torch.Tensor]:
    """Step of one mode after another; the logits of their last rows, by adapter."""
    found = {}
    whole, partial = modes
    for names, mode in (
        (["attention", "query"], partial),
        (["attention", "query", "all"], whole),
        (["base", "query"], partial),
        (["base", "late"], whole),
        (["late", "attention"], whole),
    ):
        chunks = [decode(i, 40, 5, pages[name], selections[name]) for i, name in enumerate(names)]
        # Twice: an adapter is brought to the tail when it is asked for again.
        for _ in range(2):
            runner.run(StepPlan(tuple(chunks)))
        _, launched, graph_logits = last_launch(runner)
        assert launched == mode
        for i, name in enumerate(names):
            logits = graph_logits[i].float()
            torch.testing.assert_close(logits, found.setdefault(name, logits.clone()))
    return found


@pytest.mark.parametrize(
    "modes",
    [(SEGMENTED, SEGMENTED_ATTENTION), (AUGMENTED, AUGMENTED_ATTENTION)],
    ids=["segmented", "augmented"],
)
def test_every_mode_gives_the_logits_of_peft(
    modes: tuple[LoraMode, LoraMode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an adapter of the MLP, were it in one layer alone, in a graph that leaves it out."""
    from peft import PeftModel

    model = tiny_transformers_model("llama", num_hidden_layers=2)
    folders = {
        name: make_peft_adapter(tmp_path / name, model, seed=seed, **config)
        for seed, (name, config) in enumerate(ADAPTERS.items())
    }
    engine, runner = device_engine(
        monkeypatch,
        model,
        tmp_path / "model",
        max_sequences=3,
        lora_augmented_ranks=AUGMENTED_RANKS.get(modes[0], 0),
    )
    selections: dict[str, Selection] = {
        name: ((engine.register_adapter(folder).cid, 1.0),) for name, folder in folders.items()
    }
    selections["base"] = ()
    lease(engine, *selections.values())
    last = engine.pages.num_pages - 1
    pages = {name: [last - i] for i, name in enumerate(selections)}
    prompt = make_prompt(5, seed=3)
    for name, selection in selections.items():
        runner.logits(StepPlan((make_chunk(0, prompt, 0, pages[name], selection),)))
    found = steps_of_kinds(runner, selections, pages, modes)
    assert set(found) == set(selections)
    for name, logits in found.items():
        oracle: Any = copy.deepcopy(model)
        if name != "base":
            oracle = PeftModel.from_pretrained(oracle, folders[name])
        with torch.inference_mode():
            expected = oracle(torch.tensor([[*prompt, 40]])).logits[0, -1]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    # The last step's list in a graph that is not for it: there something is left out indeed.
    _, _, graph_logits = last_launch(runner)
    before = torch.stack([*graph_logits.values()])
    runner.decode_graphs.graphs.get((2, modes[1]))()
    assert (torch.stack([*graph_logits.values()]) - before).abs().max() > 1e-2


def test_device_and_full_sampler_in_one_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    runner = device_engine(monkeypatch, model, tmp_path, max_sequences=4)[1]
    samples = [row(temperature=0.9), row(top_p=0.5, temperature=1.0), row(logprobs=1)]
    chunks = [make_chunk(i, (8,), 0, [i], (), sample=sample) for i, sample in enumerate(samples)]
    together = runner.run(StepPlan(tuple(chunks)))
    assert last_launch(runner)[0] == "decode"
    # Prompt log-probabilities: no graph computes them.
    apart = []
    for chunk in chunks:
        scored = make_chunk(9, (8, 5), 0, [9], following=(5,))
        apart.append(runner.run(StepPlan((chunk, scored))))
        assert [launch.kind for launch in runner.trace()] == [None]
    assert together.accepted == {i: result.accepted[i] for i, result in enumerate(apart)}
    assert list(together.logprobs) == [2]


def test_capture_makes_every_size_and_reports_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    runner = device_engine(monkeypatch, model, tmp_path, max_sequences=3, max_batch_tokens=40)[1]
    told: list[float] = []
    runner.capture(lambda _, share: told.append(share))
    assert told == pytest.approx([number / 27 for number in range(1, 28)])
    for graphs in (runner.prefill_graphs, runner.decode_graphs):
        assert list(graphs.graphs.made) == graphs.keys
    assert list(runner.prefill_graphs.graphs.made) == [
        (n, mode) for n in (40, 32) for mode in (*LORA_MODES, BASE_MODE)
    ]
    assert list(runner.decode_graphs.graphs.made) == [
        (n, mode) for n in (3, 2, 1) for mode in OF_FEW_ROWS
    ]


def test_capture_largest_makes_the_largest_graph_of_every_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    runner = device_engine(monkeypatch, model, tmp_path, max_sequences=3, max_batch_tokens=40)[1]
    runner.prefill_graphs.graphs.made.clear()
    runner.decode_graphs.graphs.made.clear()
    runner.capture_largest()
    assert list(runner.prefill_graphs.graphs.made) == [
        (40, mode) for mode in (*LORA_MODES, BASE_MODE)
    ]
    assert list(runner.decode_graphs.graphs.made) == [(3, mode) for mode in OF_FEW_ROWS]


class RunsWhenMade(GraphMaker):
    """Captures cost something, as on a GPU: what is made has run."""

    def __init__(self, runs: list[str]) -> None:
        super().__init__(torch.device("cpu"))
        self._runs = runs

    @property
    def has_run(self) -> bool:
        return True

    def make(self, work: Any) -> Any:
        self._runs.append("made")
        work()
        return lambda: (self._runs.append("replayed"), work())


def costly_captures(runner: GpuRunner) -> list[str]:
    """Forget all graphs, and make captures costly; returns the list of captures and replays."""
    runs: list[str] = []
    for graphs in (runner.decode_graphs, runner.prefill_graphs):
        graphs.graphs.made.clear()
        graphs.graphs.maker = RunsWhenMade(runs)
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("augmented_ranks", [0, 32])
def test_steps_without_their_graph_run_on_a_larger_one_until_it_is_captured(
    augmented_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    folders = two_adapters(model, tmp_path)
    settings = {
        "max_sequences": 3,
        "max_batch_tokens": 40,
        "lora_augmented_ranks": augmented_ranks,
    }

    def answers(engine: Engine) -> Any:
        chosen = [((engine.register_adapter(folder).cid, 1.0),) for folder in folders]
        return run_all(
            engine,
            [
                make_request(f"{i}", make_prompt(9 - 4 * i, seed=i), selection, max_tokens=4 + i)
                for i, selection in enumerate([*chosen, ()])
            ],
        )

    expected = answers(device_engine(monkeypatch, model, tmp_path / "a", **settings)[0])
    engine, runner = device_engine(monkeypatch, model, tmp_path / "b", **settings)
    runs = costly_captures(runner)
    runner.capture_largest()
    assert not runner.is_lacking
    num_largest = runs.count("made")
    monkeypatch.setattr("loramux.engine.engine._PREPARE_INTERVAL_S", 0.0)
    assert answers(engine) == expected, "captures between steps change no token"
    assert runs.count("replayed") > 0
    assert runs.count("made") > num_largest, "what the steps lacked is captured"
    engine.prepare_all()
    assert not runner.is_lacking
    for graphs in (runner.decode_graphs, runner.prefill_graphs):
        assert set(graphs.graphs.made) == set(graphs.keys)
    num_made = runs.count("made")
    assert answers(engine) == expected
    assert runs.count("made") == num_made


def test_idle_captures_begin_with_the_smallest_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    settings = {"max_sequences": 2, "max_batch_tokens": 33, "lora_augmented_ranks": 0}
    engine, runner = device_engine(monkeypatch, model, tmp_path, **settings)
    costly_captures(runner)
    runner.capture_largest()
    assert engine.prepare_next()
    made = set(runner.decode_graphs.graphs.made) - set(runner.decode_graphs.largest)
    assert {size for size, _ in made} == {1}
    assert not runner.prepare_next(only_wanted=True), "no step has lacked anything"


def test_without_memory_for_more_graphs_steps_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    settings = {"max_sequences": 2, "max_batch_tokens": 33, "lora_augmented_ranks": 0}
    engine, runner = device_engine(monkeypatch, model, tmp_path, **settings)
    costly_captures(runner)
    runner.capture_largest()

    def fail(_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(RunsWhenMade, "make", lambda self, work: fail(work))
    monkeypatch.setattr("loramux.engine.engine._PREPARE_INTERVAL_S", 0.0)
    answers = run_all(engine, [make_request("one", make_prompt(3, seed=1), max_tokens=4)])
    assert len(answers["one"]) == 4
    assert not runner.is_lacking and not engine.prepare_next()


def test_a_graph_captured_in_a_step_runs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's has run when it is made. Again, it would take its own tokens for the last step's."""
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    runner = device_engine(monkeypatch, model, tmp_path, max_sequences=2, max_batch_tokens=40)[1]
    runs = costly_captures(runner)
    first = make_chunk(0, (8, 9), 0, [0], (), sample=row())
    for _ in range(2):
        runner.run(StepPlan((first,)))
        runner.run(StepPlan((decode(0, 3, 2, [0], ()),)))
    assert runs == ["made", "made", "replayed", "replayed"]
