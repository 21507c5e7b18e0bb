"""Dense families and text parts of vision models with adapters, against PEFT."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from loramux.engine.engine import Engine
from loramux.errors import UnsupportedModel
from loramux.models.folder import describe_model
from loramux.types.request import Selection
from tests.device_factory import device_engine
from tests.engine_factory import make_engine, make_prompt, make_request, run_all
from tests.kinds_factory import greedy, logits_of, randomize
from tests.model_factory import (
    VISION_FAMILIES,
    save_hf_folder,
    tiny_transformers_model,
    tiny_vision_model,
)

SPLIT = {"attention": ["q_proj", "k_proj", "v_proj", "o_proj"], "mlp": ["gate_proj", "up_proj"]}
PHI = {"attention": ["qkv_proj", "o_proj"], "mlp": ["gate_up_proj", "down_proj"]}
GLM = {"attention": SPLIT["attention"], "mlp": PHI["mlp"]}
PROJECTIONS = {
    "phi3": PHI,
    "phi4_mini": PHI,
    "granite": SPLIT,
    "smollm3": SPLIT,
    "olmo2": SPLIT,
    "glm4": GLM,
    "ministral": SPLIT,
    "ministral3": SPLIT,
}
# These differ in the fused linears, the row order, the norms and the multipliers.
FAST = ("phi4_mini", "olmo2", "glm4")
LENGTHS = (23, 5, 40, 1, 17, 9, 30)


def family_params() -> list[Any]:
    return [
        name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in PROJECTIONS
    ]


def adapter_configs(groups: dict[str, list[str]]) -> dict[str, tuple[str, dict[str, Any]]]:
    """PEFT's config class and fields by the name of the adapter."""
    every = [name for names in groups.values() for name in names]
    return {
        "attention": ("LoraConfig", {"r": 3, "target_modules": groups["attention"]}),
        "mlp": ("LoraConfig", {"r": 8, "target_modules": groups["mlp"]}),
        "dora": ("LoraConfig", {"r": 5, "target_modules": every, "use_dora": True}),
        "lora_bias": ("LoraConfig", {"r": 2, "target_modules": every, "lora_bias": True}),
        "saved": (
            "LoraConfig",
            {
                "r": 2,
                "target_modules": groups["mlp"],
                "modules_to_save": [groups["attention"][0]],
            },
        ),
        "lokr": ("LoKrConfig", {"r": 2, "alpha": 4, "target_modules": every}),
        "ia3": (
            "IA3Config",
            {"target_modules": every, "feedforward_modules": [groups["mlp"][-1]]},
        ),
    }


class Scene:
    """A model, its folder, and PEFT's models of adapters on it."""

    def __init__(
        self, model: Any, folder: Path, configs: dict[str, tuple[str, dict[str, Any]]]
    ) -> None:
        import peft

        self.model = model
        self.folder = save_hf_folder(model, folder / "base")
        self.folders: dict[str, Path] = {}
        self.oracles: dict[str, Any] = {"": model}
        for seed, (name, (kind, fields)) in enumerate(configs.items()):
            config = getattr(peft, kind)(task_type="CAUSAL_LM", **fields)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                adapted = peft.get_peft_model(type(model).from_pretrained(self.folder), config)
                randomize(adapted, seed)
                adapted.save_pretrained(folder / name)
            self.folders[name] = folder / name
            self.oracles[name] = adapted.eval()
        self.prompts = {
            name: make_prompt(length, seed=length)
            for name, length in zip(self.oracles, (12, *LENGTHS), strict=False)
        }

    def selections(self, engine: Engine) -> dict[str, Selection]:
        found: dict[str, Selection] = {"": ()}
        for name, folder in self.folders.items():
            found[name] = ((engine.register_adapter(folder).cid, 1.0),)
        return found


def check_logits(engine: Engine, scene: Scene) -> None:
    selections = scene.selections(engine)
    batch = [(scene.prompts[name], selection) for name, selection in selections.items()]
    for name, logits in zip(selections, engine.prompt_logits(batch), strict=True):
        expected = logits_of(scene.oracles[name], scene.prompts[name])
        torch.testing.assert_close(
            logits, expected, atol=1e-4, rtol=1e-4, msg=lambda m, n=name: f"{n or 'base'}: {m}"
        )
        if name:
            base = logits_of(scene.model, scene.prompts[name])
            assert (expected - base).abs().max() > 1e-3, f"{name} has no effect"


def check_greedy(engine: Engine, scene: Scene) -> None:
    """Prefill in chunks first, then prefixes from the cache."""
    selections = scene.selections(engine)
    expected = {
        name or "base": greedy(scene.oracles[name], scene.prompts[name], 4) for name in selections
    }
    for _ in range(2):
        requests = [
            make_request(name or "base", scene.prompts[name], selection, max_tokens=4)
            for name, selection in selections.items()
        ]
        assert run_all(engine, requests) == expected


@pytest.fixture(scope="module", params=family_params())
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    family: str = request.param
    model = tiny_transformers_model(family)
    return Scene(model, tmp_path_factory.mktemp(family), adapter_configs(PROJECTIONS[family]))


@pytest.mark.parametrize("reference", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_adapters_of_all_kinds_in_one_batch_equal_peft(reference: bool, scene: Scene) -> None:
    engine = make_engine(
        scene.model,
        scene.folder,
        device_memory_bytes=32 * 2**20,
        reference_kernels=reference,
        max_batch_tokens=16,
    )
    check_logits(engine, scene)
    check_greedy(engine, scene)


@pytest.mark.slow
def test_the_kernels_of_a_gpu_equal_peft(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="no Triton on this machine")
    engine, _ = device_engine(monkeypatch, scene.model, scene.folder, max_sequences=8)
    check_logits(engine, scene)
    check_greedy(engine, scene)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_the_text_part_of_a_vision_model_is_served_with_adapters_of_both_classes(
    family: str, tmp_path: Path
) -> None:
    text = r".*language_model.*\.{}"
    scene = Scene(
        tiny_vision_model(family),
        tmp_path,
        {
            "attention": ("LoraConfig", {"r": 3, "target_modules": text.format("(q|v)_proj")}),
            "patterns": (
                "LoraConfig",
                {
                    "r": 4,
                    "target_modules": text.format("(o|down)_proj"),
                    "rank_pattern": {r"language_model.*\.o_proj": 2},
                },
            ),
            "ia3": (
                "IA3Config",
                {
                    "target_modules": text.format("(k|down)_proj"),
                    "feedforward_modules": text.format("down_proj"),
                },
            ),
        },
    )
    engine = make_engine(scene.model, scene.folder, max_batch_tokens=16)
    check_logits(engine, scene)
    check_greedy(engine, scene)


def test_tensors_for_the_image_encoder_are_left_out_with_a_warning(tmp_path: Path) -> None:
    model = tiny_vision_model("gemma3_vl")
    names = {"r": 2, "target_modules": ["q_proj"]}
    scene = Scene(model, tmp_path, {"both": ("LoraConfig", names)})
    engine = make_engine(model, scene.folder)
    check_logits(engine, scene)
    found = engine.memory.catalog.inspect(scene.folders["both"])
    assert any("image encoder" in warning for warning in found.warnings)


def test_a_vision_model_with_another_text_part_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["Mistral3ForConditionalGeneration"], '
        '"text_config": {"model_type": "gpt_oss"}}'
    )
    with pytest.raises(UnsupportedModel, match=r"gpt_oss.*ministral3"):
        describe_model(tmp_path)
