"""GPU op sets: steps on augmented weights against steps on the segmented path."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loramux.kernels.gpu.lora_augmented.tables import AugmentedLaunch
from loramux.kernels.reference import elementwise as reference
from loramux.lora.graph_lora import BASE_MODE, LoraMode
from loramux.models.architectures import linears_of, parse_config
from loramux.models.layers import Linear
from loramux.runner.gemm.dispatch import GemmDispatcher
from loramux.runner.gpu_ops import (
    GpuLinear,
    SegmentedLinearOps,
)
from loramux.runner.gpu_runner import BatchLimits, GpuRunner
from loramux.types.request import Selection
from loramux.types.step import BeforeChoice, InFlightStep, StepPlan
from tests.adapter_factory import make_peft_adapter
from tests.augmented_factory import ROW, TILE
from tests.chunk_factory import make_chunk
from tests.device_factory import (
    ALL_LINEAR,
    SplitKGemms,
    decode,
    device_engine,
    last_launch,
    lease,
    mixed_selections,
    reference_engine,
    runner_with,
    two_adapters,
)
from tests.engine_factory import make_prompt, make_request, run_all
from tests.lora_factory import AUGMENTED, AUGMENTED_ATTENTION, SEGMENTED, SEGMENTED_ATTENTION
from tests.model_factory import tiny_config, tiny_transformers_model

pytest.importorskip("triton", reason="no Triton on this machine")

QKV, OUT, GATE_UP, DOWN = range(4)

NUM_REPEATS = 2
APART = replace(TILE, fuses_norm=False)
"""Norms and adapters of o and down."""


def use(runner: GpuRunner, launch: AugmentedLaunch) -> None:
    assert runner.decode_graphs.lora.augmented is not None
    runner.decode_graphs.lora.augmented.launch_of = lambda _: launch


def modes_of(runner: GpuRunner, monkeypatch: pytest.MonkeyPatch) -> list[LoraMode]:
    """Return the modes of all decode graphs that run from now on."""
    found: list[LoraMode] = []
    launch = runner.launch

    def watch(plan: StepPlan, before_choice: BeforeChoice | None = None) -> InFlightStep:
        step = launch(plan, before_choice)
        found.extend(one.key[1] for one in runner.trace() if one.kind == "decode" and one.key)
        return step

    monkeypatch.setattr(runner, "launch", watch)
    return found


@pytest.mark.parametrize(
    ("family", "launch", "in_parts"),
    [
        ("llama", ROW, False),
        ("qwen2", TILE, False),
        ("gemma3", APART, True),
        pytest.param("gemma3", ROW, False, marks=pytest.mark.slow),
        pytest.param("gemma3", APART, False, marks=pytest.mark.slow),
        pytest.param("llama", APART, False, marks=pytest.mark.slow),
        pytest.param("qwen2", TILE, True, marks=pytest.mark.slow),
    ],
)
def test_a_step_on_augmented_weights_equals_its_rows_computed_one_by_one(
    family: str,
    launch: AugmentedLaunch,
    in_parts: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_transformers_model(family)
    folders = two_adapters(model, tmp_path)
    engine, runner = device_engine(monkeypatch, model, tmp_path / "model", max_sequences=6)
    use(runner, launch)
    modes = modes_of(runner, monkeypatch)
    selections = mixed_selections(engine, folders)[:5]
    lease(engine, *selections)
    last = engine.pages.num_pages - 1
    pages = [[last - 2 * i, last - 2 * i - 1] for i in range(len(selections))]
    lengths = [3, 17, 9, 16, 1]
    prompts = [
        make_chunk(i, make_prompt(lengths[i], seed=i), 0, pages[i], selection)
        for i, selection in enumerate(selections)
    ]
    runner.logits(StepPlan(tuple(prompts)))
    # One is a padding row short of the size that fits.
    chunks = [decode(i, 40 + i, lengths[i], pages[i], s) for i, s in enumerate(selections)]
    plain, in_two = runner._decoder.gemms, SplitKGemms(2)
    runner._decoder.gemms = in_two if in_parts else plain
    for _ in range(NUM_REPEATS):
        result = runner.run(StepPlan(tuple(chunks)))
    runner._decoder.gemms = plain
    has_augmented = [n > model.config.hidden_size for n in in_two.num_outputs]
    # The adapters of the first step come by SGMV: they need GEMMs without split-K.
    assert has_augmented == [True] * (2 * model.config.num_hidden_layers if in_parts else 0)
    assert modes == [SEGMENTED] * (NUM_REPEATS - 1) + [AUGMENTED]
    _, _, graph_logits = last_launch(runner)
    for chunk in chunks:
        logits = runner.logits(StepPlan((chunk,)))[chunk.sequence_id][0]
        found = graph_logits[chunk.sequence_id].float()
        torch.testing.assert_close(found, logits, atol=1e-4, rtol=1e-4)
        assert result.accepted[chunk.sequence_id] == [int(logits.argmax())]


@pytest.mark.parametrize(
    ("launch", "in_parts"),
    [
        (ROW, False),
        (TILE, False),
        (APART, True),
        pytest.param(APART, False, marks=pytest.mark.slow),
        pytest.param(ROW, True, marks=pytest.mark.slow),
    ],
    ids=["rows", "tiles", "apart split-K", "apart", "rows split-K"],
)
def test_all_kernels_in_the_interpreter_equal_the_reference(
    launch: AugmentedLaunch, in_parts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loramux.kernels.gpu import elementwise as fused_triton
    from loramux.kernels.gpu import sampling as sampling_triton
    from loramux.kernels.gpu.lora import segmented as lora_triton
    from loramux.kernels.gpu.lora_augmented import ops as augmented_gpu

    model = tiny_transformers_model("llama", num_hidden_layers=1, vocab_size=64)
    few = make_peft_adapter(tmp_path / "few", model, r=3, seed=1)
    everywhere = make_peft_adapter(
        tmp_path / "everywhere", model, r=3, seed=2, target_modules=list(ALL_LINEAR)
    )
    engine, runner = device_engine(
        monkeypatch, model, tmp_path / "model", max_sequences=2, lora_augmented_ranks=16
    )
    selections: dict[LoraMode, Selection] = {
        AUGMENTED_ATTENTION: ((engine.register_adapter(few).cid, 1.0),),
        AUGMENTED: ((engine.register_adapter(everywhere).cid, 1.0),),
    }
    lease(engine, *selections.values())
    fast = runner_with(
        runner,
        BatchLimits(max_batch_tokens=8, max_sequences=2, max_pages=2),
        elementwise=fused_triton,
        lora=lora_triton,
        sampling=sampling_triton,
        augmented=augmented_gpu,
    )
    use(fast, launch)
    if in_parts:
        fast._decoder.gemms = SplitKGemms(4)
    modes = modes_of(fast, monkeypatch)
    last = engine.pages.num_pages - 1
    for mode, selection in selections.items():
        step = StepPlan((decode(0, 7, 0, [last], selection), decode(1, 8, 0, [last - 1], ())))
        expected = runner.run(step).accepted
        for _ in range(NUM_REPEATS):
            assert fast.run(step).accepted == expected
        assert modes[-1] == mode
        found, known = (last_launch(one)[2] for one in (fast, runner))
        torch.testing.assert_close(found, known, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_adapters_beyond_device_capacity_get_the_tokens_of_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks change hands, adapters leave the device, and batches have more than the tail holds."""
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    folders = two_adapters(model, tmp_path)
    folders += [make_peft_adapter(tmp_path / f"{r}", model, r=r, seed=r) for r in (1, 5, 200)]
    settings: dict[str, Any] = {"max_batch_tokens": 24, "max_sequences": 3}
    answers = []
    for number, engine in enumerate(
        (
            reference_engine(model, tmp_path / "model", **settings),
            device_engine(
                monkeypatch,
                model,
                tmp_path / "model",
                max_active_adapters=3,
                lora_augmented_ranks=48,
                **settings,
            )[0],
        )
    ):
        cids = [engine.register_adapter(folder).cid for folder in folders]
        chosen: list[Selection] = [((cid, 1.0),) for cid in cids]
        chosen += [((cids[0], 0.5), (cids[2], 2.0)), (), ((cids[3], 1.0),)]
        requests = [
            make_request(f"r{i}", make_prompt(3 + i, seed=i), s, max_tokens=6 + 2 * (i % 3))
            for i, s in enumerate(chosen * 2)
        ]
        if number:
            runner: Any = engine.executor
            modes = modes_of(runner, monkeypatch)
        answers.append(run_all(engine, requests))
        # Alone in its batch, with more ranks than the appended rows hold.
        both = ((cids[1], 1.0), (cids[-1], 1.0))
        alone = make_request("alone", make_prompt(3, seed=9), both, max_tokens=4)
        answers[-1] |= run_all(engine, [alone])
    assert answers[0] == answers[1]
    assert set(modes) >= {AUGMENTED, SEGMENTED}
    cache = runner.decode_graphs.lora.augmented.cache
    cache.check_integrity()
    assert cache.num_copies > 4


def test_an_adapter_that_leaves_the_device_leaves_the_augmented_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks would be those of the adapter that gets its slot."""
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    folder = make_peft_adapter(tmp_path / "a", model, r=4)
    engine, runner = device_engine(monkeypatch, model, tmp_path / "model", max_sequences=2)
    cid = engine.register_adapter(folder).cid
    request = make_request("r", make_prompt(3, seed=1), ((cid, 1.0),), max_tokens=5)
    run_all(engine, [request])
    assert runner.decode_graphs.lora.augmented is not None
    cache = runner.decode_graphs.lora.augmented.cache
    assert len(cache.held) == 1
    assert engine.forget_adapter(cid)
    assert cache.held == {} and cid not in runner.directory


def test_without_appended_rows_there_are_no_augmented_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    runner = device_engine(monkeypatch, model, tmp_path, max_sequences=1, lora_augmented_ranks=0)[1]
    runner.capture()
    modes = (SEGMENTED, SEGMENTED_ATTENTION, BASE_MODE)
    assert list(runner.decode_graphs.graphs.made) == [(1, mode) for mode in modes]


def gpu_linear(linear: Linear, layer: int, site: int) -> GpuLinear:
    config = parse_config({**tiny_config("llama").to_dict(), "architectures": ["LlamaForCausalLM"]})
    made = GpuLinear.of(config, layer, linears_of(config)[site], linear)
    assert made.index == site
    return made


def test_linears_without_adapters_launch_no_lora_kernels() -> None:
    launched: list[tuple[str, int, int]] = []

    class Step:
        def covers(self, site: int) -> bool:
            return site in (QKV, OUT)

        def shrink(self, x: torch.Tensor, layer: int, site: int) -> None:
            launched.append(("shrink", layer, site))

        def expand(self, y: torch.Tensor, layer: int, site: int) -> None:
            launched.append(("expand", layer, site))

        def expand_swiglu(
            self, y: torch.Tensor, activation: str, layer: int, site: int
        ) -> torch.Tensor:
            raise AssertionError("gate and up are not covered")

    linear, x = Linear(4, 6, dtype=torch.float32), torch.randn(2, 4)
    torch.nn.init.normal_(linear.weight)
    for site in (QKV, OUT, GATE_UP, DOWN):
        ops = SegmentedLinearOps(reference, Step(), GemmDispatcher(None))
        y = ops.linear(gpu_linear(linear, 3, site), x)
        torch.testing.assert_close(y, linear(x))
    assert launched == [(name, 3, site) for site in (QKV, OUT) for name in ("shrink", "expand")]


def test_o_and_down_may_be_split_k_gemms() -> None:
    """Unless SGMV kernels add adapters to their output."""

    class Step:
        def covers(self, site: int) -> bool:
            return site == OUT

        def shrink(self, x: torch.Tensor, layer: int, site: int) -> None: ...

        def expand(self, y: torch.Tensor, layer: int, site: int) -> None: ...

        def expand_swiglu(
            self, y: torch.Tensor, activation: str, layer: int, site: int
        ) -> torch.Tensor:
            raise AssertionError("gate and up are not covered")

    linear, x = Linear(4, 6, dtype=torch.float32), torch.randn(2, 4)
    torch.nn.init.normal_(linear.weight)
    found = {}
    for step in (None, Step()):
        ops = SegmentedLinearOps(reference, step, SplitKGemms(2))
        found[step is None] = [
            ops.linear(gpu_linear(linear, 0, site), x).ndim for site in (QKV, OUT, GATE_UP, DOWN)
        ]
    assert found == {True: [2, 3, 2, 3], False: [2, 2, 2, 3]}


@pytest.mark.parametrize("covered", [(), (QKV,), (GATE_UP,)])
def test_gate_up_uses_the_swiglu_gemm_unless_adapters_are_added(
    covered: tuple[int, ...],
) -> None:
    class Step:
        def covers(self, site: int) -> bool:
            return site in covered

        def shrink(self, x: torch.Tensor, layer: int, site: int) -> None: ...

        def expand(self, y: torch.Tensor, layer: int, site: int) -> None:
            raise AssertionError("with the activation, not alone")

        def expand_swiglu(
            self, y: torch.Tensor, activation: str, layer: int, site: int
        ) -> torch.Tensor:
            return reference.activate_mul(y + 1, activation)

    class FusedSwiglu(GemmDispatcher):
        def linear_swiglu(self, *args: object) -> torch.Tensor:
            return asked.pop()

    linear, x, asked = Linear(4, 6, dtype=torch.float32), torch.randn(2, 4), [torch.zeros(2, 3)]
    torch.nn.init.normal_(linear.weight)
    gate_up = gpu_linear(linear, 0, GATE_UP)
    found = SegmentedLinearOps(reference, Step(), FusedSwiglu(None)).glu(gate_up, x, "silu")
    if GATE_UP in covered:
        torch.testing.assert_close(found, reference.activate_mul(linear(x) + 1, "silu"))
    assert (found == 0).all() != (GATE_UP in covered)
    apart = SegmentedLinearOps(reference, None, GemmDispatcher(None)).glu(gate_up, x, "silu")
    torch.testing.assert_close(apart, reference.activate_mul(linear(x), "silu"))
