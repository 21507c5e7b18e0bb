"""`ImagePipeline`, `loramux draw` and `loramux doctor --image-model` on a model in a folder."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

from loramux import Drawing, ImagePipeline
from loramux.cli.main import app
from loramux.config.images import ImageLora, parse_image_lora, parse_size
from loramux.errors import AdapterNotFound, AdapterRefused, InvalidRequest, UnsupportedModel
from tests.image_factory import rand_tensors

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Return the model and adapters of examples/images."""
    folder = tmp_path_factory.mktemp("images")
    script = ROOT / "examples" / "images" / "make_tiny_model.py"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(script), str(folder)])
        runpy.run_path(str(script), run_name="__main__")
    return folder


@pytest.fixture(scope="module")
def pipeline(tiny):
    made = ImagePipeline(tiny / "model")
    made.add_adapter("ink", tiny / "ink.safetensors")
    made.add_adapter("night", tiny / "night.safetensors")
    return made


SMALL = {"width": 32, "height": 32, "steps": 2, "seed": 1, "max_sequence_length": 16}


def test_drawings_of_one_call_are_those_of_single_calls(pipeline):
    wanted = [
        Drawing(prompt="a cat", **SMALL),
        Drawing(prompt="a cat", adapters={"ink": 0.6}, **SMALL),
        Drawing(prompt="a cat", adapters={"ink": 0.5, "night": -0.5}, **SMALL),
    ]
    steps = []
    together = pipeline.draw(wanted, on_progress=lambda *step: steps.append(step))
    assert [drawn.facts.max_images for drawn in together] == [3, 3, 3]
    assert sorted(steps) == [(i, step, 2) for i in range(3) for step in (1, 2)]
    for drawing, drawn in zip(wanted, together, strict=True):
        alone = pipeline.draw(drawing)[0]
        assert float((alone.pixels - drawn.pixels).abs().max()) < 1e-5
    assert len({drawn.digest for drawn in together}) == 3


def test_an_image_is_saved_with_its_pixels(pipeline, tmp_path):
    drawn = pipeline.draw(Drawing(prompt="a cat", **SMALL))[0]
    drawn.save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as saved:
        assert np.array_equal(np.asarray(saved), drawn.array)
    assert drawn.digest.startswith("sha256:")


def test_a_random_seed_draws_the_image_again(pipeline):
    fields = SMALL | {"seed": None}
    first = pipeline.draw(Drawing(prompt="a cat", **fields))[0]
    again = pipeline.draw(Drawing(prompt="a cat", **(fields | {"seed": first.seed})))[0]
    assert first.digest == again.digest


def test_the_base_is_not_changed_by_adapters(tiny):
    plain = ImagePipeline(tiny / "model")
    digest, image = plain.digest, plain.draw(Drawing(prompt="x", **SMALL))[0].digest
    plain.add_adapter("ink", tiny / "ink.safetensors")
    plain.draw(Drawing(prompt="x", adapters={"ink": 2.0}, **SMALL))
    del plain.__dict__["digest"]
    assert plain.digest == digest
    assert plain.draw(Drawing(prompt="x", **SMALL))[0].digest == image


def test_unknown_names_and_wrong_files_are_refused(pipeline, tiny, tmp_path):
    with pytest.raises(AdapterNotFound, match="Did you mean ink"):
        pipeline.draw(Drawing(prompt="x", adapters={"inkk": 1.0}))
    with pytest.raises(InvalidRequest, match="already"):
        pipeline.add_adapter("ink", tiny / "night.safetensors")
    save_file({"what": rand_tensors(2)}, tmp_path / "x.safetensors")
    with pytest.raises(AdapterRefused, match="belong to no module"):
        pipeline.add_adapter("x", tmp_path / "x.safetensors")
    assert list(pipeline.adapters) == ["ink", "night"]
    with pytest.raises(UnsupportedModel, match=r"no model_index\.json"):
        ImagePipeline(tmp_path)
    (tmp_path / "model_index.json").write_text('{"_class_name": "PixArtAlphaPipeline"}')
    with pytest.raises(UnsupportedModel, match="PixArtAlphaPipeline are not served"):
        ImagePipeline(tmp_path)


def test_a_failed_call_leaves_no_images_behind(pipeline):
    with pytest.raises(InvalidRequest, match="multiple of 4"):
        pipeline.draw(["a cat", Drawing(prompt="x", **(SMALL | {"width": 33}))])
    assert not pipeline.engine.has_work


def run(*words):
    return CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "240"})


def test_doctor_describes_an_image_adapter(tiny):
    result = run("doctor", tiny / "ink.safetensors", "--image-model", tiny / "model")
    assert result.exit_code == 0, result.output
    for text in ("LoRA; names of diffusers", "2 modules of transformer", "4 (2 modules)"):
        assert text in result.stdout
    assert "ink drawing" in result.stdout
    assert "OK: this adapter can be served." in result.stdout
    as_json = run("doctor", tiny / "night.safetensors", "--image-model", tiny / "model", "--json")
    found = json.loads(as_json.stdout)
    assert found["ok"] and found["formats"] == ["kohya"] and found["ranks"] == {"8": 2}
    assert len(found["effects"]) == 3 and min(found["effects"]) > 1e-3


def test_doctor_refuses_with_the_code(tiny, tmp_path):
    save_file({"lora_unet_input_blocks_4_x.alpha": rand_tensors(1)}, tmp_path / "sd.safetensors")
    path = tmp_path / "sd.safetensors"
    result = run("doctor", path, "--image-model", tiny / "model", "--no-probe")
    assert result.exit_code == 1
    assert "REFUSED (other_family)" in result.stdout and "Fix:" in result.stdout
    as_json = run("doctor", path, "--image-model", tiny / "model", "--json")
    assert json.loads(as_json.stdout)["refusal"]["code"] == "other_family"
    lost = run("doctor", path, "--image-model", tmp_path)
    assert lost.exit_code == 1 and "unsupported_model" in lost.stdout


def test_draw_writes_an_image(tiny, tmp_path):
    out = tmp_path / "fox.png"
    loras = ["--image-lora", f"ink={tiny / 'ink.safetensors'}@0.8"]
    common = ["--image-model", tiny / "model", *loras, "--size", "32x32", "--steps", 2]
    result = run("draw", "a fox", *common, "--seed", 3, "--adapter", "ink:0.6", "--out", out)
    assert result.exit_code == 0, result.output
    with Image.open(out) as image:
        assert image.size == (32, 32)
    pipeline = ImagePipeline(tiny / "model")
    pipeline.add_adapter("ink", tiny / "ink.safetensors")
    same = {"width": 32, "height": 32, "steps": 2, "seed": 3}
    expected = pipeline.draw(Drawing(prompt="a fox", adapters={"ink": 0.6}, **same))[0]
    assert expected.digest in result.stdout
    default = run("draw", "a fox", *common, "--seed", 3, "--out", out)
    weighted = pipeline.draw(Drawing(prompt="a fox", adapters={"ink": 0.8}, **same))[0]
    assert weighted.digest in default.stdout


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--out", "x.gif"], "--out must end with"),
        (["--size", "big"], "WIDTHxHEIGHT"),
        (["--image-lora", "ink"], "NAME=SOURCE"),
        (["--adapter", "ink"], "no adapter 'ink'"),
        (["--image-model", "/nowhere"], "is no image model"),
    ],
)
def test_draw_refuses(tiny, words, text):
    result = run("draw", "x", "--image-model", tiny / "model", *words)
    assert result.exit_code in (1, 2)
    assert text in result.stderr


def test_texts_of_settings():
    assert parse_size("1024x768") == (1024, 768)
    assert parse_image_lora("ink=/a/b.safetensors") == ImageLora("ink", "/a/b.safetensors", 1.0)
    assert parse_image_lora("ink=hf:o/r:f.safetensors@0.6").weight == 0.6
    assert parse_image_lora("ink=hf:o/r@main@-1").source == "hf:o/r@main"
