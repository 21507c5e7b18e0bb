"""Adapters of an original model, served over a checkpoint with folded scales."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from loramux.engine.engine import Engine
from loramux.errors import UnsupportedModel
from tests.engine_factory import make_engine, make_prompt
from tests.kinds_factory import kinds_of, load_kind, logits_of, make_kind
from tests.model_factory import save_hf_folder, tiny_transformers_model
from tests.quantised_factory import CASES, configure, quantise_folder
from tests.unit.engine import test_dense_families as families

ORIGINAL, SERVED = "acme/original", "acme/original-awq"


def spread(size: int, alpha: float, seed: int) -> torch.Tensor:
    """Scales as AWQ makes them: a power of the activations' size, normalised."""
    found = torch.rand(size, generator=torch.Generator().manual_seed(seed)).mul(4).exp() ** alpha
    return found / (found.max() * found.min()).sqrt()


@torch.no_grad()
def fold(model: Any, alpha: float) -> Any:
    """Return the same function with scales folded into norms, rows and columns."""
    folded = copy.deepcopy(model)
    plus = 1.0 if "Gemma" in type(model).__name__ else 0.0
    for number, layer in enumerate(folded.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        mlp_norm = getattr(layer, "pre_feedforward_layernorm", layer.post_attention_layernorm)
        groups = [(mlp_norm, [mlp.gate_proj, mlp.up_proj])] if hasattr(mlp, "up_proj") else []
        if hasattr(attention, "q_proj"):
            readers = [attention.q_proj, attention.k_proj, attention.v_proj]
            groups.append((layer.input_layernorm, readers))
        else:
            groups.append((layer.input_layernorm, [attention.qkv_proj]))
            groups.append((layer.post_attention_layernorm, [mlp.gate_up_proj]))
        for place, (norm, linears) in enumerate(groups):
            s = spread(len(norm.weight), alpha, 10 * number + place)
            norm.weight.copy_((norm.weight + plus) / s - plus)
            for linear in linears:
                linear.weight.mul_(s)
        up = mlp.up_proj if hasattr(mlp, "up_proj") else mlp.gate_up_proj
        fold_rows(up, mlp.down_proj, spread(mlp.down_proj.in_features, alpha, 10 * number + 7))
        if attention.o_proj.in_features == getattr(attention, "v_proj", up).out_features:
            s = spread(attention.o_proj.in_features, alpha, 10 * number + 8)
            fold_rows(attention.v_proj, attention.o_proj, s)
    return folded


def fold_rows(producer: Any, consumer: Any, s: torch.Tensor) -> None:
    """Divide the last rows of a linear by s, and multiply the columns of the next one."""
    producer.weight[-len(s) :] /= s[:, None]
    if producer.bias is not None:
        producer.bias[-len(s) :] /= s
    consumer.weight.mul_(s)


class Scene:
    """An original model, its folded form, and adapters trained on the original."""

    def __init__(self, family: str, alpha: float, folder: Path, kinds: list[str], **sizes: Any):
        self.model = tiny_transformers_model(family, num_hidden_layers=2, **sizes)
        self.model.name_or_path = ORIGINAL
        self.original = save_hf_folder(self.model, folder / "original")
        self.folded = fold(self.model, alpha)
        self.served = save_hf_folder(self.folded, folder / SERVED.partition("/")[2])
        self.folders = {
            kind: make_kind(kind, self.model, folder / kind, seed=number)
            for number, kind in enumerate(kinds)
        }
        self.prompts = {kind: make_prompt(6, seed=number) for number, kind in enumerate(kinds)}

    def logits(self, engine: Engine) -> dict[str, torch.Tensor]:
        chosen = {
            kind: ((engine.register_adapter(folder).cid, 1.0),)
            for kind, folder in self.folders.items()
        }
        batch = [(make_prompt(6, seed=99), ())]
        batch += [(self.prompts[kind], selection) for kind, selection in chosen.items()]
        return dict(zip(["", *chosen], engine.prompt_logits(batch), strict=True))

    def expected(self, kind: str) -> torch.Tensor:
        if not kind:
            return logits_of(self.model, make_prompt(6, seed=99))
        return logits_of(load_kind(kind, self.model, self.folders[kind]), self.prompts[kind])

    def worst(self, engine: Engine) -> dict[str, float]:
        """Largest difference of a logit to the original's, by adapter."""
        found = self.logits(engine)
        sizes = {kind: self.expected(kind) for kind in found}
        return {
            kind: float((found[kind][:, : one.shape[1]] - one).abs().max())
            for kind, one in sizes.items()
        }


SLOW = [("llama31", 0.5), ("gemma2", 0.8), ("llama31", 1.0)]


@pytest.mark.parametrize(
    ("family", "alpha"),
    [("llama31", 0.8), *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)],
)
def test_all_kinds_of_adapters_of_the_original_are_exact(
    family: str, alpha: float, tmp_path: Path
) -> None:
    scene = Scene(family, alpha, tmp_path, kinds_of(family))
    settings = {"device_memory_bytes": 32 * 2**20, "original": str(scene.original)}
    worst = scene.worst(make_engine(scene.folded, scene.served, **settings))
    assert max(worst.values()) < 1e-4, worst


def test_the_answers_move_without_the_original(tmp_path: Path) -> None:
    scene = Scene("llama31", 0.8, tmp_path, ["lora", "dora"])
    worst = scene.worst(make_engine(scene.folded, scene.served))
    assert worst[""] < 1e-4
    assert min(worst["lora"], worst["dora"]) > 0.05, worst


@pytest.mark.parametrize(
    ("family", "groups"),
    [("phi3", families.PHI), pytest.param("qwen2", families.SPLIT, marks=pytest.mark.slow)],
    ids=["phi3", "qwen2"],
)
def test_fused_projections_and_values_that_no_heads_share(
    family: str, groups: dict[str, list[str]], tmp_path: Path
) -> None:
    """Without shared heads AWQ also folds values into o_proj."""
    model = tiny_transformers_model(family, num_hidden_layers=2, num_key_value_heads=4)
    served = save_hf_folder(fold(model, 0.7), tmp_path / "served")
    scene = families.Scene(model, tmp_path, families.adapter_configs(groups))
    engine = make_engine(model, served, original=str(scene.folder), device_memory_bytes=2**24)
    folded = engine.catalog.rules.folded
    assert folded is not None
    assert ((0, "o_proj") in folded.inputs) == (family == "qwen2")
    families.check_logits(engine, scene)


def warnings_of(engine: Engine, folder: Path) -> str:
    return " ".join(engine.memory.catalog.inspect(folder).warnings)


def test_a_quantised_base_without_its_original_is_warned_about(tmp_path: Path) -> None:
    scene = Scene("llama31", 0.8, tmp_path, ["lora"])
    quantise_folder(scene.served, CASES["awq"])
    engine = make_engine(scene.folded, scene.served)
    text = warnings_of(engine, scene.folders["lora"])
    assert "AWQ int4) may have folded scales" in text
    assert "--original" in text
    fitted = make_engine(scene.folded, scene.served, original=str(scene.original))
    assert "fitted to the scales" in warnings_of(fitted, scene.folders["lora"])
    unfolded = save_hf_folder(scene.model, tmp_path / "plain")
    quantise_folder(unfolded, CASES["awq"])
    plain = make_engine(scene.model, unfolded, original=str(scene.original))
    assert plain.catalog.rules.folded is None
    assert "scales" not in warnings_of(plain, scene.folders["lora"])


def test_the_effect_over_codes_is_that_of_the_original(tmp_path: Path) -> None:
    """The scales of norms stay exact, and those of rows are fitted through the noise."""
    scene = Scene("llama31", 0.8, tmp_path, ["lora"])
    dense = quantise_folder(scene.served, CASES["packed_8_bits"])
    scene.folded.load_state_dict(dense)
    broken = make_engine(scene.folded, scene.served)
    fitted = make_engine(scene.folded, scene.served, original=str(scene.original))

    def effect(engine: Engine) -> torch.Tensor:
        selection = ((engine.register_adapter(scene.folders["lora"]).cid, 1.0),)
        prompt = scene.prompts["lora"]
        with_adapter, base = engine.prompt_logits([(prompt, selection), (prompt, ())])
        return with_adapter - base

    plain = logits_of(scene.model, scene.prompts["lora"])
    expected = scene.expected("lora") - plain
    errors = [float((effect(one) - expected).norm() / expected.norm()) for one in (broken, fitted)]
    assert errors[1] < 0.1 * errors[0], errors


def test_an_adapter_of_the_checkpoint_itself_is_left_as_it_is(tmp_path: Path) -> None:
    scene = Scene("llama31", 0.8, tmp_path, [])
    scene.folded.name_or_path = SERVED
    folder = make_kind("lora", scene.folded, tmp_path / "own")
    engine = make_engine(scene.folded, scene.served, original=str(scene.original))
    selection = ((engine.register_adapter(folder).cid, 1.0),)
    prompt = make_prompt(6, seed=1)
    (found,) = engine.prompt_logits([(prompt, selection)])
    expected = logits_of(load_kind("lora", scene.folded, folder), prompt)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_another_model_is_refused(tmp_path: Path) -> None:
    scene = Scene("llama31", 0.5, tmp_path, [])
    other = tiny_transformers_model("llama31", seed=5, num_hidden_layers=2)
    other = save_hf_folder(other, tmp_path / "other")
    with pytest.raises(UnsupportedModel, match="another weight than that of the served model"):
        make_engine(scene.folded, scene.served, original=str(other))
    configure(other, intermediate_size=128)
    with pytest.raises(UnsupportedModel, match="not the original.*intermediate_size"):
        make_engine(scene.folded, scene.served, original=str(other))
    quantise_folder(scene.original, CASES["awq"])
    with pytest.raises(UnsupportedModel, match="quantised itself"):
        make_engine(scene.folded, scene.served, original=str(scene.original))


def test_packed_images_on_disk_are_not_mixed(tmp_path: Path) -> None:
    """A server with --original must not load images that another wrote without it."""
    scene = Scene("llama31", 0.8, tmp_path, ["lora"])
    for original in (None, str(scene.original)):
        engine = make_engine(
            scene.folded, scene.served, original=original, disk_folder=str(tmp_path / "disk")
        )
        found = engine.memory.catalog.identify(scene.folders["lora"])
        engine.memory.write_disk(found)
    images = [path for path in (tmp_path / "disk").rglob("*") if found.card.cid[-8:] in path.name]
    assert len(images) == 2
    assert len({path.parent for path in images}) == 2
    assert len({path.parent.name for path in images}) == 1


def test_the_folder_of_the_tests_is_folded(tmp_path: Path) -> None:
    scene = Scene("llama31", 0.8, tmp_path, [])
    before, after = (
        load_file(folder / "model.safetensors")["model.layers.0.input_layernorm.weight"]
        for folder in (scene.original, scene.served)
    )
    assert (before / after).max() > 1.5
