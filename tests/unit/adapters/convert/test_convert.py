"""Conversions of pickles, old tensor names, dtypes and PiSSA; PEFT is the reference."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from loramux.adapters.convert.convert import Conversion, convert_adapter
from loramux.adapters.convert.load import is_pickle
from loramux.adapters.convert.names import translate_names
from loramux.adapters.convert.unpickle import read_tensors
from loramux.adapters.peft.doctor import examine
from loramux.errors import AdapterRefused, InvalidRequest
from tests.adapter_factory import (
    load_with_peft,
    lora_config_dict,
    lora_tensors,
    tiny_base_info,
    tiny_llama,
    tiny_llama_config,
    write_adapter,
)

CONFIG = tiny_llama_config(num_hidden_layers=2)
BASE = tiny_base_info(CONFIG)


def convert(source: Path, **options: Any) -> Conversion:
    folder = source.with_name(f"{source.name}-converted")
    folder.mkdir()
    done = convert_adapter(source, folder, **options)
    report = examine(folder, BASE)
    assert report.ok, report.refusal
    assert report.cid == done.adapter.cid
    return done


def write_pickle(folder: Path, content: object, **fields: Any) -> Path:
    write_adapter(folder, lora_config_dict(**fields), None)
    torch.save(content, folder / "adapter_model.bin")
    return folder


def assert_tensors(done: Conversion, tensors: dict[str, torch.Tensor]) -> None:
    for module in done.adapter.modules:
        prefix = f"base_model.model.{module.target.path}"
        torch.testing.assert_close(module.a, tensors[f"{prefix}.lora_A.weight"])
        torch.testing.assert_close(module.b, tensors[f"{prefix}.lora_B.weight"])
    assert 2 * len(done.adapter.modules) == len(tensors)


@pytest.mark.slow
def test_a_pickle_becomes_safetensors(tmp_path: Path) -> None:
    tensors = lora_tensors(CONFIG)
    source = write_pickle(tmp_path / "plain", tensors)
    assert examine(source, BASE).refusal is not None
    done = convert(source)
    assert_tensors(done, tensors)
    assert done.changes == ("Wrote the tensors of the pickle adapter_model.bin as safetensors.",)


def test_a_pickle_under_the_name_of_safetensors_is_found(tmp_path: Path) -> None:
    source = write_pickle(tmp_path / "odd", {})
    renamed = (source / "adapter_model.bin").rename(source / "adapter_model.safetensors")
    assert is_pickle(renamed)
    (source / "adapter_model.safetensors").write_bytes(pickle.dumps({}))
    assert is_pickle(renamed)
    (source / "adapter_model.safetensors").write_bytes(b"\x80\x05\0\0\0\0\0\0{}")
    assert not is_pickle(renamed), "0x580 is a possible length of a safetensors header"


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_code_in_a_pickle_is_not_run(tmp_path: Path) -> None:
    proof = tmp_path / "ran"
    source = write_pickle(tmp_path / "hostile", {"x": Hostile(proof)})
    with pytest.raises(AdapterRefused, match="cannot be read as tensors alone") as caught:
        convert(source)
    assert caught.value.code == "pickle"
    assert not proof.exists()


def test_a_pickle_holds_named_tensors_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"

    def read(content: object) -> dict[str, torch.Tensor]:
        torch.save(content, path)
        return read_tensors(str(path))

    shared = torch.arange(6.0).reshape(2, 3)
    found = read({"state_dict": {"x": shared, "y": shared.T}})
    assert torch.equal(found["x"], shared) and torch.equal(found["y"], shared.T)
    for content in ([1, 2], {"x": 3}, torch.ones(2)):
        with pytest.raises(TypeError):
            read(content)


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.{}.lora_{}.weight",
        "base_model.model.{}.lora_{}.sql-tuned.weight",
        "base_model.model.{}.lora_{}",
        "{}.lora_{}.weight",
        "module.base_model.model.{}.lora_{}.default.weight",
        "base_model.model.base_model.model.{}.lora_{}.weight",
        "_orig_mod.base_model.model.{}.lora_{}.weight",
        "base_model.model._orig_mod.{}.lora_{}.weight",
    ],
)
def test_old_names_become_those_of_peft(name: str, tmp_path: Path) -> None:
    tensors = lora_tensors(CONFIG)
    old = {}
    for new, tensor in tensors.items():
        path, _, half = new.removeprefix("base_model.model.").partition(".lora_")
        old[name.format(path, half[0])] = tensor
    done = convert(write_adapter(tmp_path / "old", lora_config_dict(), old))
    assert_tensors(done, tensors)
    assert bool(done.changes) == (old.keys() != tensors.keys())


@pytest.mark.parametrize(
    ("start", "targets"),
    [
        ("layers", ["q_proj", "v_proj"]),
        ("model.language_model.layers", r".*language_model\.layers\.\d+\.self_attn\.[qv]_proj"),
        ("language_model.model.layers", ["q_proj", "v_proj"]),
    ],
)
def test_layers_of_other_wrappers_are_renamed(start: str, targets: object, tmp_path: Path) -> None:
    tensors = lora_tensors(CONFIG)
    old = {name.replace("model.model.layers", f"model.{start}"): t for name, t in tensors.items()}
    source = write_adapter(tmp_path / "old", lora_config_dict(target_modules=targets), old)
    done = convert(source)
    assert_tensors(done, tensors)
    moved = [change for change in done.changes if "target_modules" in change]
    assert bool(moved) == isinstance(targets, str)


def test_several_adapters_or_two_names_of_a_tensor_are_refused() -> None:
    name = "base_model.model.x.lora_A.{}weight"
    for names in ((name.format("a."), name.format("b.")), (name.format("a."), name.format(""))):
        with pytest.raises(AdapterRefused) as caught:
            translate_names(names)
        assert caught.value.code == "duplicate_tensors"


def test_missing_targets_are_taken_from_the_file(tmp_path: Path) -> None:
    source = write_adapter(
        tmp_path / "old", lora_config_dict(target_modules=None), lora_tensors(CONFIG)
    )
    assert "target_modules" in convert(source).changes[0]


def test_dtypes(tmp_path: Path) -> None:
    eighth = {n: t.to(torch.float8_e4m3fn) for n, t in lora_tensors(CONFIG).items()}
    done = convert(write_adapter(tmp_path / "fp8", lora_config_dict(), eighth))
    assert done.changes == ("Converted float8_e4m3fn tensors to bfloat16.",)
    assert_tensors(done, {name: tensor.to(torch.bfloat16) for name, tensor in eighth.items()})
    double = {name: tensor.double() for name, tensor in lora_tensors(CONFIG).items()}
    folder = write_adapter(tmp_path / "f64", lora_config_dict(), double)
    assert_tensors(convert(folder, dtype="float32"), lora_tensors(CONFIG))
    large = {name: tensor * 1e6 for name, tensor in double.items()}
    with pytest.raises(AdapterRefused, match="too large for float16"):
        convert(write_adapter(tmp_path / "large", lora_config_dict(), large), dtype="float16")
    whole = {name: tensor.to(torch.int8) for name, tensor in double.items()}
    with pytest.raises(AdapterRefused) as caught:
        convert(write_adapter(tmp_path / "int8", lora_config_dict(), whole))
    assert caught.value.code == "bad_dtype"


@pytest.mark.parametrize("start", ["pissa", "olora"])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_a_trained_pissa_becomes_a_lora_of_the_original_base(
    start: str, use_rslora: bool, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model

    model = tiny_llama(CONFIG)
    with warnings.catch_warnings():
        # PEFT itself cannot convert rsLoRA with a rank_pattern.
        warnings.simplefilter("ignore")
        config = LoraConfig(
            r=4,
            lora_alpha=6,
            target_modules=["q_proj", "v_proj"],
            rank_pattern={"v_proj": 2},
            init_lora_weights=start,
            use_rslora=use_rslora,
        )
        tuned = get_peft_model(copy.deepcopy(model), config)
    tuned.peft_config["default"].init_lora_weights = True
    tuned.save_pretrained(tmp_path / "initial", save_embedding_layers=False)
    tuned.peft_config["default"].init_lora_weights = start
    generator = torch.Generator().manual_seed(0)
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    tuned.save_pretrained(tmp_path / "trained", save_embedding_layers=False)

    done = convert(tmp_path / "trained", initial=tmp_path / "initial")
    assert {module.rank for module in done.adapter.modules} == {8, 4}
    expected = tuned.merge_and_unload()
    layers = load_with_peft(tmp_path / "trained-converted", model)
    for path, layer in layers.items():
        weight = model.get_submodule(path).weight + layer.get_delta_weight("default")
        torch.testing.assert_close(weight, expected.get_submodule(path).weight, rtol=0, atol=1e-5)
    assert len(layers) == len(done.adapter.modules)


def test_what_no_conversion_can_repair_is_refused(tmp_path: Path) -> None:
    tensors = lora_tensors(CONFIG)

    def code_of(name: str, initial: Path | None = None, **fields: Any) -> str:
        source = write_adapter(tmp_path / name, lora_config_dict(**fields), tensors)
        with pytest.raises(AdapterRefused) as caught:
            convert(source, initial=initial)
        assert caught.value.fix
        return str(caught.value.code)

    other = write_adapter(tmp_path / "other", lora_config_dict(lora_alpha=1), tensors)
    assert code_of("alone", init_lora_weights="pissa") == "changes_base"
    assert code_of("loftq", init_lora_weights="loftq") == "changes_base"
    assert code_of("another", init_lora_weights="pissa", initial=other) == "wrong_rank"
    assert code_of("dora", use_dora=True) == "parts_beside"
    assert code_of("saved", modules_to_save=["lm_head"]) == "parts_beside"
    plain = write_adapter(tmp_path / "plain", lora_config_dict(), tensors)
    with pytest.raises(InvalidRequest, match="nothing to subtract"):
        convert(plain, initial=other)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "adapter_config.json").write_text(json.dumps(lora_config_dict()))
    with pytest.raises(AdapterRefused, match="neither"):
        convert(tmp_path / "empty")
