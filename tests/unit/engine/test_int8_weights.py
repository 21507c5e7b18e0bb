"""Weights kept as int8: adapters of all kinds over them equal PEFT over the dequantised base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loramux.engine.engine import Engine
from loramux.errors import InvalidRequest
from loramux.models.int8_linear import Int8Linear
from tests.device_factory import device_engine
from tests.engine_factory import cpu_runner, make_engine
from tests.kinds_factory import logits_of
from tests.model_factory import save_hf_folder, tiny_transformers_model
from tests.unit.engine.test_dense_families import (
    PROJECTIONS,
    SPLIT,
    Scene,
    adapter_configs,
    check_greedy,
    check_logits,
)

GROUPS = {**PROJECTIONS, "llama": SPLIT, "qwen2": SPLIT}
# Fused projections with a row order, and biases.
FAMILIES = ("qwen2", "phi4_mini")


def dequantised(weight: torch.Tensor) -> torch.Tensor:
    scales = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scales).round() * scales


@pytest.fixture(scope="module", params=FAMILIES)
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """Return the oracles have dequantised weights; `folder` has those of the checkpoint."""
    family: str = request.param
    folder = tmp_path_factory.mktemp(family)
    model = tiny_transformers_model(family)
    original = save_hf_folder(model, folder / "original")
    with torch.no_grad():
        for block in (b for layer in model.model.layers for b in (layer.self_attn, layer.mlp)):
            for module in block.modules():
                if isinstance(module, torch.nn.Linear):
                    module.weight.copy_(dequantised(module.weight))
    made = Scene(model, folder, adapter_configs(GROUPS[family]))
    made.folder = original
    return made


def engine_of(scene: Scene, **settings: Any) -> Engine:
    return make_engine(
        scene.model,
        scene.folder,
        quantization="int8",
        device_memory_bytes=32 * 2**20,
        max_batch_tokens=16,
        **settings,
    )


@pytest.mark.parametrize(
    "reference", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["reference", "compiled"]
)
def test_adapters_of_all_kinds_equal_peft_over_the_dequantised_base(
    reference: bool, scene: Scene
) -> None:
    engine = engine_of(scene, reference_kernels=reference)
    bases = cpu_runner(engine).lora.bases
    assert all(isinstance(linear, Int8Linear) for linear in bases.values())
    check_logits(engine, scene)
    check_greedy(engine, scene)


def test_sums_beside_other_rows(scene: Scene) -> None:
    """The sum of two adapters differs from the base by the sum of what each changes alone."""
    engine = engine_of(scene, reference_kernels=True)
    found = scene.selections(engine)
    (first, _), (second, _) = found["attention"][0], found["mlp"][0]
    weights = dict.fromkeys((first, second), 0.5)
    both = tuple(sorted(weights.items()))
    prompt = scene.prompts["attention"]
    batch = [(prompt, both), (prompt, ()), (scene.prompts["dora"], found["dora"])]
    merged = logits_of_sum(scene, ("attention", "mlp"), 0.5, prompt)
    summed, base, _ = engine.prompt_logits(batch)
    torch.testing.assert_close(summed, merged, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(base, logits_of(scene.model, prompt), atol=1e-4, rtol=1e-4)


def logits_of_sum(
    scene: Scene, names: tuple[str, ...], weight: float, prompt: tuple[int, ...]
) -> torch.Tensor:
    import copy

    model = copy.deepcopy(scene.model)
    with torch.no_grad():
        for name in names:
            for path, module in scene.oracles[name].named_modules():
                if hasattr(module, "get_delta_weight"):
                    target = model.get_submodule(path.removeprefix("base_model.model."))
                    target.weight += weight * module.get_delta_weight("default")
    return logits_of(model, prompt)


def test_a_merge_reads_dequantised_rows(scene: Scene) -> None:
    engine = engine_of(scene, merge="auto")
    selection = scene.selections(engine)["attention"]
    prompt = scene.prompts["attention"]
    apart = engine.prompt_logits([(prompt, selection)])[0]
    assert engine.merge is not None
    source = engine.merge._source
    num_bytes = source.num_bytes(selection)
    merged = {site: source.merged(site, selection) for site in source.touched(selection)}
    assert num_bytes == sum(linear.num_bytes for linear in merged.values())
    context = cpu_runner(engine).lora
    context.merged = merged
    try:
        alone = engine.prompt_logits([(prompt, selection)])[0]
    finally:
        context.merged = None
    torch.testing.assert_close(alone, apart, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_the_runner_of_a_gpu_computes_with_the_method(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="no Triton on this machine")
    engine, _ = device_engine(
        monkeypatch, scene.model, scene.folder, max_sequences=8, quantization="int8"
    )
    check_logits(engine, scene)
    check_greedy(engine, scene)


def test_rows_of_zeros_and_bfloat16(tmp_path: Path) -> None:
    model = tiny_transformers_model("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[3] = 0
    engine = make_engine(model, tmp_path, quantization="int8", dtype="bfloat16")
    prompt = (5, 6, 7, 9)
    (found,) = engine.prompt_logits([(prompt, ())])
    expected = logits_of(model, prompt)
    assert found.isfinite().all()
    assert (found - expected).norm() < 0.1 * expected.norm()


def test_another_format_is_refused() -> None:
    from loramux.config.engine import EngineConfig

    with pytest.raises(InvalidRequest, match="none, int8"):
        EngineConfig(quantization="int3")
