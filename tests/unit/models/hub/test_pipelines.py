"""Pipelines of diffusers from a local hub: which files are fetched, and what is refused first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from loramux.config.images import ImageConfig
from loramux.errors import InvalidRequest, ModelNotFetched, UnsupportedModel
from loramux.models.hub.pipeline_files import weights_of
from loramux.models.locate import locate_image_model, located_images
from tests.hub_server import HubRepository, HubServer

INDEX = {
    "_class_name": "FluxPipeline",
    "_diffusers_version": "0.42.1",
    "image_encoder": [None, None],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "transformer": ["diffusers", "FluxTransformer2DModel"],
}
DENOISER = "transformer/diffusion_pytorch_model"
SMALL = {
    "model_index.json": json.dumps(INDEX).encode(),
    "scheduler/scheduler_config.json": b"{}",
    "text_encoder/config.json": b"{}",
    "tokenizer/vocab.json": b"{}",
    "tokenizer/merges.txt": b"",
    "transformer/config.json": b"{}",
}
PLAIN = {
    "text_encoder/model.safetensors": b"text" * 300,
    f"{DENOISER}-00001-of-00002.safetensors": b"one" * 300,
    f"{DENOISER}-00002-of-00002.safetensors": b"two" * 300,
    f"{DENOISER}.safetensors.index.json": b"{}",
}
HALF = {
    "text_encoder/model.fp16.safetensors": b"half" * 200,
    f"{DENOISER}.fp16.safetensors": b"half of it" * 200,
}
NOT_NEEDED = {
    "README.md": b"# hi",
    "flux1-dev.safetensors": b"all of it again",
    "text_encoder/pytorch_model.bin": b"pickle",
    "transformer/onnx/model.onnx": b"onnx",
    "safety_checker/model.safetensors": b"no part of the index",
}


@pytest.fixture(autouse=True)
def repositories(hub: HubServer) -> None:
    other = SMALL | {"model_index.json": json.dumps(INDEX | {"_class_name": "XPipeline"}).encode()}
    hub.repositories = {
        "acme/flux": HubRepository(
            {"main": SMALL | PLAIN | HALF | NOT_NEEDED, "v1": SMALL | PLAIN, "half": SMALL | HALF}
        ),
        "acme/other": HubRepository({"main": other | PLAIN}),
        "acme/lora": HubRepository({"main": {"pytorch_lora_weights.safetensors": b"x"}}),
        "acme/pickles": HubRepository({"main": SMALL | {"text_encoder/model.bin": b"x"}}),
    }


def header(*names: str) -> bytes:
    """Return a .safetensors file that has tensors of these names and no values."""
    entries = {name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def found(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("model", "variant", "weights"),
    [
        ("acme/flux", None, PLAIN),
        ("hf:acme/flux@v1", None, PLAIN),
        ("acme/flux@half", None, HALF),
        ("acme/flux@half", "fp16", HALF),
    ],
)
def test_a_pipeline_is_fetched_with_the_files_that_are_read(model, variant, weights):
    assert found(locate_image_model(model, variant=variant)) == SMALL | weights


def test_a_variant_is_fetched_without_the_plain_files():
    index = {name: body for name, body in PLAIN.items() if name.endswith(".json")}
    assert found(locate_image_model("acme/flux", variant="fp16")) == SMALL | HALF | index


def test_it_is_found_again_without_the_hub(hub, monkeypatch):
    folder = locate_image_model("acme/flux@v1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert locate_image_model("acme/flux@v1") == folder
    with pytest.raises(ModelNotFetched, match="not in the cache"):
        locate_image_model("acme/other")
    (folder / f"{DENOISER}-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelNotFetched, match="1 of 2 files"):
        locate_image_model("acme/flux@v1")


@pytest.mark.parametrize(
    ("model", "variant", "text"),
    [
        ("acme/other", None, "class XPipeline are not served.*FluxPipeline.*Nothing else"),
        ("acme/lora", None, "has no model_index.json.*--image-lora"),
        ("acme/pickles", None, "text_encoder has no safetensors weights"),
        ("acme/flux@v1", "fp16", "no component has weights of the variant 'fp16'|variant"),
        ("acme/flux:a.gguf", None, "no image model"),
        ("/nowhere/at/all", None, "no image model"),
    ],
)
def test_what_cannot_be_served_is_refused_before_its_weights_are_fetched(hub, model, variant, text):
    with pytest.raises(UnsupportedModel, match=f"(?i){text}"):
        locate_image_model(model, variant=variant)
    assert not hub.storage.seen


def test_a_component_without_the_variant_has_its_plain_files():
    names = ["a/config.json", "b/config.json", "a/model.fp16.safetensors", "b/model.safetensors"]
    chosen = names[2:]
    assert weights_of(names, ["a", "b"], "fp16") == (chosen, "fp16")
    assert weights_of(names, ["a", "b"], None) == (chosen, "fp16")
    two = [*names, "a/model.bf16.safetensors"]
    with pytest.raises(UnsupportedModel, match="variants bf16, fp16: choose one"):
        weights_of(two, ["a", "b"], None)


def test_a_single_file_needs_a_configuration_and_a_folder_none(tmp_path):
    file = tmp_path / "sdxl.safetensors"
    file.write_bytes(header("input_blocks.0.0.weight"))
    with pytest.raises(InvalidRequest, match="--image-config, such as.*fetched from the hub"):
        located_images(ImageConfig(image_model=str(file)))
    given = located_images(ImageConfig(image_model=str(file), image_config="acme/flux@v1"))
    assert given.image_model == str(file)
    assert given.image_config is not None and found(Path(given.image_config)) == SMALL | PLAIN
    whole = tmp_path / "whole.safetensors"
    whole.write_bytes(header("model.diffusion_model.x", "text_encoders.clip_l.x"))
    given = located_images(ImageConfig(image_model=str(whole), image_config="acme/flux@main"))
    assert given.image_config is not None
    index = {name: body for name, body in PLAIN.items() if name.endswith(".json")}
    assert found(Path(given.image_config)) == SMALL | index
    with pytest.raises(InvalidRequest, match="is a folder"):
        located_images(ImageConfig(image_model=str(tmp_path), image_config="acme/flux"))
