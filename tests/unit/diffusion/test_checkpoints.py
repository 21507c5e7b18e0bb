"""Image models that are one file with all components, as A1111 and ComfyUI keep them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

from loramux.diffusion.engine import ImageEngine
from loramux.diffusion.options import PipelineFiles
from loramux.diffusion.pipeline import load_pipeline
from loramux.errors import UnsupportedModel
from loramux.models.hub.single_file import components_in, parts_of
from tests.checkpoint_factory import sdxl_checkpoint
from tests.image_factory import draw_all, make_pipeline, request_for


def drawn(pipe) -> torch.Tensor:
    return draw_all(ImageEngine(pipe), [request_for("sdxl", "x", prompt="a red hill")])["x"]


@pytest.fixture(scope="module")
def stock():
    """Return a pipeline with encoders of two widths, as in the real model: the converter tells them
    apart by it.
    """
    pipe = make_pipeline("sdxl", seed=3)
    config = CLIPTextConfig.from_dict(
        pipe.text_encoder_2.config.to_dict() | {"hidden_size": 48, "projection_dim": 48}
    )
    pipe.text_encoder_2 = CLIPTextModelWithProjection(config).eval()
    unet = dict(pipe.unet.config) | {
        "cross_attention_dim": 32 + 48,
        "projection_class_embeddings_input_dim": 48 + 6 * 8,
    }
    torch.manual_seed(3)
    pipe.unet = type(pipe.unet).from_config(unet).eval()
    return pipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory, stock) -> Path:
    """Return the configuration and the tokenizers, without weights."""
    place = tmp_path_factory.mktemp("config") / "sdxl"
    stock.save_pretrained(place)
    for weights in place.rglob("*.safetensors"):
        weights.unlink()
    return place


@pytest.fixture(scope="module")
def file(tmp_path_factory, stock) -> Path:
    place = tmp_path_factory.mktemp("file") / "sdxl.safetensors"
    save_file(sdxl_checkpoint(stock), place)
    return place


def test_a_file_with_all_components_needs_a_configuration_alone(file, folder, stock):
    assert parts_of(file) == {"vae", "clip_l", "clip_g"}
    given = components_in(folder / "model_index.json", parts_of(file))
    assert sorted(given) == ["text_encoder", "text_encoder_2", "unet", "vae"]
    pipe = load_pipeline(file, files=PipelineFiles(config=str(folder)))
    for name in given:
        mine, theirs = getattr(pipe, name).state_dict(), getattr(stock, name).state_dict()
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], value) for key, value in theirs.items()), name
    assert torch.equal(drawn(pipe), drawn(stock))


def test_a_component_that_the_file_lacks_is_that_of_the_folder(tmp_path, file, folder, stock):
    whole = load_file(file)
    part = tmp_path / "no-vae.safetensors"
    save_file({k: v for k, v in whole.items() if not k.startswith("first_stage_model.")}, part)
    with pytest.raises(UnsupportedModel, match="vae has no safetensors weights"):
        load_pipeline(part, files=PipelineFiles(config=str(folder)))
    place = shutil.copytree(folder, tmp_path / "sdxl")
    other = make_pipeline("sdxl", seed=4).vae
    other.save_pretrained(place / "vae")
    pipe = load_pipeline(part, files=PipelineFiles(config=str(place)))
    key = "decoder.conv_in.weight"
    assert torch.equal(pipe.vae.state_dict()[key], other.state_dict()[key])
    key = "conv_in.weight"
    assert torch.equal(pipe.unet.state_dict()[key], stock.unet.state_dict()[key])


@pytest.mark.parametrize("lost", ["model.diffusion_model.out.2.weight", "conditioner.embedders.1."])
def test_a_file_that_is_not_whole_is_refused(tmp_path, file, folder, lost):
    broken = tmp_path / "broken.safetensors"
    tensors = load_file(file)
    gone = [key for key in tensors if key.startswith(lost)][-1]
    save_file({key: value for key, value in tensors.items() if key != gone}, broken)
    with pytest.raises(UnsupportedModel):
        load_pipeline(broken, files=PipelineFiles(config=str(folder)))


def test_a_family_whose_files_diffusers_does_not_read_is_refused(tmp_path):
    make_pipeline("wan").save_pretrained(tmp_path / "wan")
    whole = tmp_path / "wan.safetensors"
    save_file({"vae.x": torch.ones(1), "model.diffusion_model.x": torch.ones(1)}, whole)
    with pytest.raises(UnsupportedModel, match="diffusers reads no file with all components"):
        load_pipeline(whole, files=PipelineFiles(config=str(tmp_path / "wan")))


def test_a_file_without_a_header_is_refused(tmp_path):
    for content in (b"", b"x", b"\xff" * 20, b"\x04" + b"\0" * 7 + b"nope"):
        (tmp_path / "x.safetensors").write_bytes(content)
        with pytest.raises(UnsupportedModel, match="cannot be read as a .safetensors file"):
            parts_of(tmp_path / "x.safetensors")
