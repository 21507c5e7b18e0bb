"""Every combination method against PEFT's `add_weighted_adapter`."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from loramux.adapters.combine.combine import combine, write_combined
from loramux.adapters.combine.pruning import mask_key, random_mask
from loramux.adapters.peft.reader import CheckedAdapter, read_adapter
from loramux.adapters.peft.unbound import read_without_base
from loramux.adapters.recipe import METHODS, CombinationOptions, make_recipe
from tests.adapter_factory import (
    load_with_peft,
    make_peft_adapter,
    tiny_base_info,
    tiny_llama,
    tiny_llama_config,
)
from tests.engine_factory import make_engine, make_prompt
from tests.kinds_factory import logits_of

CONFIG = tiny_llama_config(num_hidden_layers=2)
Deltas = dict[str, tuple[torch.Tensor, torch.Tensor]]
DENSITY, SEED = 0.6, 7
NUM_RANDOM = 200
ADAPTERS: dict[str, dict[str, Any]] = {
    "a": {"target_modules": ["q_proj", "v_proj"], "lora_alpha": 8},
    "b": {"target_modules": ["q_proj", "o_proj"], "lora_alpha": 3},
    "c": {"target_modules": ["q_proj", "v_proj", "down_proj"], "lora_alpha": 4, "use_rslora": True},
    # Other ranks, by module.
    "d": {
        "target_modules": ["q_proj", "v_proj"],
        "r": 6,
        "rank_pattern": {"q_proj": 3, "layers.1.self_attn.v_proj": 2},
        "alpha_pattern": {"v_proj": 5},
    },
    "e": {"target_modules": ["q_proj", "o_proj"], "r": 2},
    # PEFT cannot combine it: it looks for the union of the names in all layers.
    "f": {"target_modules": ["k_proj", "o_proj"], "r": 5, "layers_to_transform": [1]},
}


@dataclass
class Scene:
    model: torch.nn.Module
    folders: dict[str, Path]
    adapters: dict[str, CheckedAdapter]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    model = tiny_llama(CONFIG)
    root = tmp_path_factory.mktemp("parts")
    folders = {
        name: make_peft_adapter(root / name, model, seed=seed, **settings)
        for seed, (name, settings) in enumerate(ADAPTERS.items())
    }
    adapters = {name: read_without_base(folder) for name, folder in folders.items()}
    return Scene(model, folders, adapters)


def options_of(method: str, *, density: float = DENSITY, **more: Any) -> CombinationOptions:
    found = METHODS[method]
    return CombinationOptions(
        method=method,
        density=None if found.pruning == "none" else density,
        seed=SEED if found.pruning == "random" else None,
        **more,
    )


def combine_with_peft(
    scene: Scene, names: Sequence[str], weights: Sequence[float], options: CombinationOptions
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return A and B of each module; PEFT's scale of the result is not applied.

    A faulty copy of `use_rslora` makes that scale other than 1.
    """
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(tiny_llama(CONFIG), scene.folders[names[0]], names[0])
        for name in names[1:]:
            model.load_adapter(scene.folders[name], name)
        # In float32 the error of PEFT's SVD is larger than the tolerance.
        model.double()
        model.add_weighted_adapter(
            list(names),
            list(weights),
            "merged",
            combination_type=options.method,
            svd_rank=options.svd_rank,
            density=options.density,
            majority_sign_method=options.majority_sign_method or "total",
        )
    layers = {
        name.removeprefix("base_model.model."): layer
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer) and "merged" in layer.lora_A
    }
    return {
        name: (
            layer.lora_A["merged"].weight.data.float(),
            layer.lora_B["merged"].weight.data.float(),
        )
        for name, layer in layers.items()
    }


def combine_here(
    scene: Scene,
    names: Sequence[str],
    weights: Sequence[float],
    options: CombinationOptions,
    folder: Path,
) -> CheckedAdapter:
    """Write the combination and read it back as the engine does."""
    adapters = {scene.adapters[name].cid: scene.adapters[name] for name in names}
    recipe = make_recipe(list(adapters), weights, options)
    folder.mkdir()
    write_combined(folder, combine(recipe, adapters))
    found = read_adapter(folder, tiny_base_info(CONFIG))
    assert all(module.scale == 1 for module in found.modules)
    return found


def assert_same_deltas(
    found: CheckedAdapter, expected: dict[str, tuple[torch.Tensor, torch.Tensor]]
) -> None:
    deltas = {name: b @ a for name, (a, b) in expected.items()}
    used = {name: delta for name, delta in deltas.items() if delta.any()}
    assert {module.target.path for module in found.modules} == used.keys()
    for module in found.modules:
        expected_delta = used[module.target.path]
        torch.testing.assert_close(module.b @ module.a, expected_delta, rtol=1e-5, atol=1e-5)


@pytest.fixture
def same_masks(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give PEFT the masks of loramux in the order in which PEFT draws them."""

    def use(names: Sequence[str], tensors: Sequence[str], density: float = DENSITY) -> None:
        def masks() -> Iterator[tuple[bytes, int]]:
            paths = [target.path for target in tiny_base_info(CONFIG).targets]
            for path in paths:
                for tensor in tensors:
                    for name in names:
                        adapter = scene.adapters[name]
                        if any(module.target.path == path for module in adapter.modules):
                            yield mask_key(SEED, adapter.cid, path, tensor)

        keys = masks()

        def bernoulli(probabilities: torch.Tensor) -> torch.Tensor:
            bits = random_mask(probabilities.numel(), density, next(keys))
            return bits.reshape(probabilities.shape).to(probabilities.dtype)

        monkeypatch.setattr(torch, "bernoulli", bernoulli)

    return use


@pytest.mark.parametrize(
    ("method", "sign_method"),
    [(method, None) for method in METHODS]
    + [(method, "frequency") for method in METHODS if METHODS[method].votes],
)
def test_equal_ranks(
    method: str, sign_method: str | None, scene: Scene, tmp_path: Path, same_masks: Any
) -> None:
    options = options_of(method, majority_sign_method=sign_method)
    names, weights = ["a", "b", "c"], [0.7, -0.4, 1.3]
    if METHODS[method].pruning == "random":
        same_masks(names, ["delta"] if METHODS[method].on_deltas else ["A", "B"])
    expected = combine_with_peft(scene, names, weights, options)
    found = combine_here(scene, names, weights, options, tmp_path / "merged")
    assert_same_deltas(found, expected)
    if METHODS[method].needs_equal_ranks:
        for module in found.modules:
            a, b = expected[module.target.path]
            torch.testing.assert_close(module.a, a, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(module.b, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", [m for m in METHODS if not METHODS[m].needs_equal_ranks])
def test_other_ranks_and_patterns(
    method: str, scene: Scene, tmp_path: Path, same_masks: Any
) -> None:
    names, weights = ["a", "d", "e"], [0.5, 0.0, -2.0]
    if METHODS[method].pruning == "random":
        same_masks(names, ["delta"])
    options = options_of(method)
    expected = combine_with_peft(scene, names, weights, options)
    found = combine_here(scene, names, weights, options, tmp_path / "merged")
    assert_same_deltas(found, expected)


@pytest.mark.parametrize("method", ["linear", "ties", "dare_ties", "cat"])
def test_zero_weights(method: str, scene: Scene, tmp_path: Path, same_masks: Any) -> None:
    names, weights = ["a", "b", "c"], [0.0, 1.0, -0.5]
    if METHODS[method].pruning == "random":
        same_masks(names, ["A", "B"])
    options = options_of(method)
    expected = combine_with_peft(scene, names, weights, options)
    found = combine_here(scene, names, weights, options, tmp_path / "merged")
    assert_same_deltas(found, expected)


def test_svd_rank_is_the_rank_of_the_result(scene: Scene, tmp_path: Path) -> None:
    for method in ("svd", "ties_svd"):
        options = options_of(method, svd_rank=3)
        expected = combine_with_peft(scene, ["a", "b"], [1.0, 0.5], options)
        found = combine_here(scene, ["a", "b"], [1.0, 0.5], options, tmp_path / method)
        assert {module.rank for module in found.modules} == {3}
        assert_same_deltas(found, expected)


def test_peft_loads_the_result(scene: Scene, tmp_path: Path) -> None:
    found = combine_here(scene, ["c", "d", "f"], [1, 1, 1], options_of("cat"), tmp_path / "merged")
    layers = load_with_peft(tmp_path / "merged", scene.model)
    assert layers.keys() == {module.target.path for module in found.modules}
    for module in found.modules:
        layer = layers[module.target.path]
        parts = [
            part.scale * part.b @ part.a
            for name in ("c", "d", "f")
            for part in scene.adapters[name].modules
            if part.target.path == module.target.path
        ]
        delta = layer.get_delta_weight("default")
        torch.testing.assert_close(delta, sum(parts), rtol=1e-5, atol=1e-5)


def logits_with(model: torch.nn.Module, deltas: Deltas, tokens: tuple[int, ...]) -> torch.Tensor:
    """Return the logits of the base with PEFT's result added to its weights."""
    changed = copy.deepcopy(model)
    for path, (a, b) in deltas.items():
        weight: torch.Tensor = changed.get_submodule(path).weight
        weight.data += b @ a
    return logits_of(changed, tokens)


@pytest.mark.slow
def test_random_combinations(scene: Scene, tmp_path: Path, same_masks: Any) -> None:
    """The tensors of each, and the logits of all of them served in one batch."""
    draw = random.Random(0)
    engine = make_engine(scene.model, tmp_path / "model", device_memory_bytes=64 * 2**20)
    batch, logits = [], []
    for index in range(NUM_RANDOM):
        method = METHODS[draw.choice(list(METHODS))]
        names = ["a", "b", "c"] if method.needs_equal_ranks else ["a", "b", "c", "d", "e"]
        # PEFT applies another method to a single adapter, so that there are at least two.
        chosen = draw.sample(names, draw.randint(2, min(4, len(names))))
        weights = [draw.choice([0.0, 1.0, draw.uniform(-2, 2)]) for _ in chosen]
        weights[0] = weights[0] or 1.0
        density = draw.uniform(0.2, 1)
        sign_method = draw.choice(["total", "frequency"]) if method.votes else None
        options = options_of(method.name, density=density, majority_sign_method=sign_method)
        if method.pruning == "random":
            same_masks(chosen, ["delta"] if method.on_deltas else ["A", "B"], density)
        expected = combine_with_peft(scene, chosen, weights, options)
        found = combine_here(scene, chosen, weights, options, tmp_path / str(index))
        assert_same_deltas(found, expected)
        cid = engine.register_adapter(tmp_path / str(index)).cid
        prompt = make_prompt(draw.randint(1, 6), seed=index, vocab_size=CONFIG.vocab_size)
        batch.append((prompt, ((cid, 1.0),)))
        logits.append(logits_with(scene.model, expected, prompt))
    for found_logits, expected_logits in zip(engine.prompt_logits(batch), logits, strict=True):
        torch.testing.assert_close(found_logits, expected_logits, rtol=1e-4, atol=1e-4)
