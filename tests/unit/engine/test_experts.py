"""Mixtures of experts with adapters on attention, router and experts, against PEFT."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loramux.engine.build import load_base
from loramux.engine.engine import Engine
from loramux.errors import AdapterRefused, UnsupportedModel
from loramux.models.folder import describe_model
from tests.engine_factory import cpu_config, make_engine
from tests.kinds_factory import logits_of
from tests.unit.engine.test_dense_families import Scene, check_greedy, check_logits

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "num_experts_per_tok": 2,
    "eos_token_id": None,
}
FUSED = ["experts.gate_up_proj", "experts.down_proj"]
ATTENTION = ["q_proj", "v_proj", "o_proj"]
BY_NAME = ["gate_proj", "up_proj", "down_proj"]


def model_of(family: str, **overrides: Any) -> Any:
    import transformers

    made = {
        "qwen3_moe": ("Qwen3Moe", {"num_experts": 6, "moe_intermediate_size": 20, "head_dim": 16}),
        "mixtral": ("Mixtral", {"num_local_experts": 4, "rope_theta": 10_000.0}),
        "olmoe": ("Olmoe", {"num_experts": 5, "norm_topk_prob": False}),
    }
    name, settings = made[family]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **settings, **overrides})
    torch.manual_seed(3)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Routers that prefer some experts clearly, and outputs that differ.
            scale = 0.5 if parameter_name.endswith("gate.weight") else 0.15
            if parameter.ndim > 1:
                parameter.normal_(0, scale)
    return model


def configs(family: str) -> dict[str, tuple[str, dict[str, Any]]]:
    names = ["w1", "w2", "w3"] if family == "mixtral" else BY_NAME
    return {
        "attention": ("LoraConfig", {"r": 3, "target_modules": ATTENTION}),
        "experts": ("LoraConfig", {"r": 2, "target_modules": [], "target_parameters": FUSED}),
        "one": ("LoraConfig", {"r": 5, "target_modules": [], "target_parameters": FUSED[1:]}),
        "router": (
            "LoraConfig",
            {"r": 1, "target_modules": [], "target_parameters": ["gate.weight"]},
        ),
        "mixed": (
            "LoraConfig",
            {"r": 4, "target_modules": ATTENTION, "target_parameters": ["experts.gate_up_proj"]},
        ),
        "names": ("LoraConfig", {"r": 3, "lora_alpha": 5, "target_modules": names}),
        "all": ("LoraConfig", {"r": 2, "target_modules": "all-linear", "use_rslora": True}),
    }


FAMILIES = (
    "qwen3_moe",
    pytest.param("mixtral", marks=pytest.mark.slow),
    pytest.param("olmoe", marks=pytest.mark.slow),
)


@pytest.fixture(scope="module", params=FAMILIES)
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    family: str = request.param
    return Scene(model_of(family), tmp_path_factory.mktemp(family), configs(family))


def engine_of(scene: Scene, **settings: Any) -> Engine:
    return make_engine(scene.model, scene.folder, device_memory_bytes=64 * 2**20, **settings)


def test_adapters_of_all_places_in_one_batch_equal_peft(scene: Scene) -> None:
    """Base rows and ranks 1 to 8, prompts in chunks, prefixes from the cache."""
    engine = engine_of(scene, max_batch_tokens=16)
    check_logits(engine, scene)
    check_greedy(engine, scene)


@torch.no_grad()
def test_int8_experts_equal_their_dequantised_weights(scene: Scene) -> None:
    engine = engine_of(scene, quantization="int8")
    model = copy.deepcopy(scene.model)
    for layer in model.model.layers:
        attention, experts = layer.self_attn, layer.mlp.experts
        linears = [getattr(attention, f"{name}_proj").weight for name in "qkvo"]
        for weight in (*linears, experts.gate_up_proj, experts.down_proj):
            scales = weight.abs().amax(-1, keepdim=True) / 127
            weight.copy_((weight / scales).round() * scales)
    prompt = scene.prompts["attention"]
    (found,) = engine.prompt_logits([(prompt, ())])
    torch.testing.assert_close(found, logits_of(model, prompt), atol=1e-4, rtol=1e-4)


def per_expert_files(scene: Scene, folder: Path) -> Path:
    """Return the adapter `experts` as PEFT on transformers 4 writes it: a pair for each expert."""
    given = scene.folders["experts"]
    tensors = load_file(given / "adapter_model.safetensors")
    config = json.loads((given / "adapter_config.json").read_text())
    base = describe_model(scene.folder)
    rank, made = config["r"], {}
    gated = [spec for spec in base.linears if spec.expert is not None and spec.is_gated]
    down = [spec for spec in base.linears if spec.expert is not None and not spec.is_gated]
    for layer in range(base.num_layers):
        prefix = f"base_model.model.model.layers.{layer}."
        for place, specs in (("experts.base_layer", gated), ("experts", down)):
            a, b = (tensors[f"{prefix}mlp.{place}.lora_{half}.weight"] for half in "AB")
            for number, spec in enumerate(specs):
                own_a = a[number * rank : (number + 1) * rank]
                own_b = b[:, number :: len(specs)]
                for projection in spec.members:
                    path = f"{prefix}{spec.block}.{projection.name}"
                    made[f"{path}.lora_A.weight"] = own_a.clone()
                    made[f"{path}.lora_B.weight"] = own_b[projection.rows].clone()
    folder.mkdir()
    names = sorted(
        {name.rpartition(".")[2] for spec in (*gated, *down) for name in spec.projections}
    )
    config |= {"target_modules": names, "target_parameters": None}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(made, folder / "adapter_model.safetensors")
    return folder


def swapped_files(scene: Scene, folder: Path) -> Path:
    """Return the adapter `experts` as PEFT before 0.19.1 wrote it: A over the outputs."""
    given = scene.folders["experts"]
    tensors = load_file(given / "adapter_model.safetensors")
    config = json.loads((given / "adapter_config.json").read_text())
    rank, made = config["r"], {}
    for name, a in tensors.items():
        if ".lora_A." not in name:
            continue
        b = tensors[name.replace("lora_A", "lora_B")]
        a = a.view(-1, rank, a.shape[1])
        b = b.view(b.shape[0], rank, -1)
        # A of expert e is the transpose of its B, and the other way round.
        made[name] = b.permute(2, 1, 0).reshape(-1, b.shape[0]).contiguous()
        made[name.replace("lora_A", "lora_B")] = (
            a.permute(2, 1, 0).reshape(a.shape[2], -1).contiguous()
        )
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(made, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("rewrite", [per_expert_files, swapped_files])
def test_other_layouts_of_the_same_adapter(rewrite: Any, scene: Scene, tmp_path: Path) -> None:
    engine = engine_of(scene)
    prompt = scene.prompts["experts"]
    cid = engine.register_adapter(rewrite(scene, tmp_path / "files")).cid
    (found,) = engine.prompt_logits([(prompt, ((cid, 1.0),))])
    expected = logits_of(scene.oracles["experts"], prompt)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_sums_of_adapters_equal_the_sum_of_their_deltas(scene: Scene) -> None:
    engine = engine_of(scene)
    found, weights = scene.selections(engine), {"attention": 0.5, "experts": 1.5}
    prompt = scene.prompts["experts"]
    selection = tuple(sorted((found[name][0][0], weight) for name, weight in weights.items()))
    summed = copy.deepcopy(scene.model)
    base = scene.model.state_dict()
    for name, weight in weights.items():
        merged = copy.deepcopy(scene.oracles[name]).merge_and_unload().state_dict()
        for key, value in summed.state_dict().items():
            value += weight * (merged[key] - base[key])
    (logits,) = engine.prompt_logits([(prompt, selection)])
    expected = logits_of(summed, prompt)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"r": 3}, "rank 3"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "does not target"),
        ({"target_parameters": [*FUSED, "gate.weight"]}, "no tensors"),
        ({"target_parameters": ["experts.bias"]}, "experts.bias"),
        ({"use_dora": True}, "use_dora"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(
    change: dict[str, Any], match: str, scene: Scene, tmp_path: Path
) -> None:
    given = scene.folders["experts"]
    config = json.loads((given / "adapter_config.json").read_text()) | change
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(given / "adapter_model.safetensors")
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(AdapterRefused, match=match):
        engine_of(scene).register_adapter(tmp_path)


def test_square_experts_take_the_orientation_of_the_others(tmp_path: Path) -> None:
    """Gate and up have as many outputs together as inputs; down shows which of them A is over."""
    scene = Scene(
        model_of("qwen3_moe", moe_intermediate_size=24, num_hidden_layers=1),
        tmp_path,
        {
            "experts": ("LoraConfig", {"r": 2, "target_modules": [], "target_parameters": FUSED}),
            "one": ("LoraConfig", {"r": 2, "target_modules": [], "target_parameters": FUSED[:1]}),
        },
    )
    engine, prompt = engine_of(scene), scene.prompts["experts"]
    expected = logits_of(scene.oracles["experts"], prompt)
    for folder in (scene.folders["experts"], swapped_files(scene, tmp_path / "swapped")):
        cid = engine.register_adapter(folder).cid
        (found,) = engine.prompt_logits([(prompt, ((cid, 1.0),))])
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(AdapterRefused, match="as many inputs as outputs"):
        engine.register_adapter(scene.folders["one"])


def test_fused_experts_on_a_dense_base_are_refused(scene: Scene, tmp_path: Path) -> None:
    from tests.model_factory import tiny_transformers_model

    engine = make_engine(tiny_transformers_model("llama"), tmp_path / "base")
    with pytest.raises(AdapterRefused, match="does not have as experts"):
        engine.register_adapter(scene.folders["experts"])


@pytest.mark.parametrize(
    ("change", "match"),
    [({"mlp_only_layers": [0]}, "mlp_only_layers"), ({"num_experts_per_tok": 9}, "chooses 9 of")],
)
def test_models_that_are_not_computed_are_refused(
    change: dict[str, Any], match: str, scene: Scene, tmp_path: Path
) -> None:
    config = json.loads((scene.folder / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=match):
        describe_model(tmp_path)


def test_experts_need_a_cpu(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAMUX_KERNELS", "triton")
    with pytest.raises(UnsupportedModel, match="--device cpu"):
        load_base(scene.folder, cpu_config())


def test_the_number_of_parameters_counts_all_experts(scene: Scene) -> None:
    expected = sum(parameter.numel() for parameter in scene.model.parameters())
    assert describe_model(scene.folder).num_parameters == pytest.approx(expected, rel=0.02)
