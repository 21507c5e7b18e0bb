"""Loading pipelines: variants of weights, single files, data types, and a hub's own folder."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import save_file

from loramux.diffusion.engine import ImageEngine
from loramux.diffusion.families.find import FAMILIES
from loramux.diffusion.options import ImageEngineOptions, PipelineFiles
from loramux.diffusion.pipeline import load_pipeline
from loramux.errors import UnsupportedModel
from loramux.models.locate import locate_image_model
from loramux.types.image import PIPELINE_CLASSES
from tests.hub_server import HubRepository, hub_for_client
from tests.image_factory import draw_all, make_pipeline, request_for


def drawn(pipe) -> torch.Tensor:
    return draw_all(ImageEngine(pipe), [request_for("flux", "x")])["x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("pipeline") / "flux"
    make_pipeline("flux").save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def expected(folder):
    return drawn(load_pipeline(folder))


def test_a_folder_with_one_variant_alone_is_loaded(tmp_path, expected):
    make_pipeline("flux").save_pretrained(tmp_path / "half", variant="fp16")
    assert not list((tmp_path / "half").rglob("*model.safetensors"))
    for variant in (None, "fp16"):
        pipe = load_pipeline(tmp_path / "half", files=PipelineFiles(variant=variant))
        assert torch.equal(drawn(pipe), expected)
    with pytest.raises(UnsupportedModel, match="variant"):
        load_pipeline(tmp_path / "half", files=PipelineFiles(variant="bf16"))


def test_the_data_type_is_that_of_all_components(folder):
    pipe = load_pipeline(folder, dtype="bfloat16")
    assert {pipe.transformer.dtype, pipe.text_encoder_2.dtype, pipe.vae.dtype} == {torch.bfloat16}


def test_a_denoiser_of_a_single_file_takes_the_place_of_the_folders(tmp_path, folder, expected):
    other = make_pipeline("flux", seed=1)
    file = tmp_path / "denoiser.safetensors"
    save_file(other.transformer.state_dict(), file)
    got = drawn(load_pipeline(file, files=PipelineFiles(config=str(folder))))
    pipe = make_pipeline("flux")
    pipe.transformer = other.transformer
    assert torch.equal(got, drawn(pipe)) and not torch.equal(got, expected)


def test_a_pipeline_of_the_hub_draws_what_its_folder_draws(folder, expected, monkeypatch, tmp_path):
    files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.*")}
    with hub_for_client(monkeypatch, tmp_path) as hub:
        hub.repositories = {"acme/flux": HubRepository({"main": files})}
        fetched = locate_image_model("acme/flux")
    assert torch.equal(drawn(load_pipeline(fetched)), expected)
    shutil.rmtree(fetched)


def test_settings_reach_the_engine_process(tmp_path):
    options = ImageEngineOptions(
        model=tmp_path, dtype="bfloat16", files=PipelineFiles(variant="fp16", is_offloaded=True)
    )
    assert ImageEngineOptions.from_wire(options.to_wire()) == options


def test_the_classes_that_are_fetched_are_those_of_the_families():
    assert [family.pipeline_class for family in FAMILIES] == list(PIPELINE_CLASSES)
