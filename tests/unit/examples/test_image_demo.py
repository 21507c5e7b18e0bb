"""The demo's image model: it draws on a CPU what stock diffusers draws, and its tools fit it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from PIL import Image
from safetensors.torch import load_file
from typer.testing import CliRunner

from examples.images.icons import OBJECTS, SIDE
from examples.images.scenes import ALSO, BACKGROUNDS, captions, make_scenes
from examples.images.train import model_facts
from loramux import Drawing, ImagePipeline
from loramux.cli.main import app
from loramux.config.file import load_serve_config
from loramux.config.images import DEMO, demo_images, parse_image_lora, with_demo
from loramux.config.serve import ServeConfig
from loramux.diffusion.pipeline import load_pipeline
from loramux.errors import InvalidRequest, UnsupportedModel
from loramux.launch.images import image_base_names

MODEL = DEMO / "model"
MAX_BYTES = 12_000_000
PROMPT = "a fox on a yellow background"
STEPS = 4


@pytest.fixture(scope="module")
def stock():
    return FluxPipeline.from_pretrained(MODEL, dtype=torch.float32)


@pytest.fixture(scope="module")
def pipeline():
    model, loras = demo_images()
    made = ImagePipeline(model)
    for lora in map(parse_image_lora, loras):
        made.add_adapter(lora.name, lora.source)
    return made


def peft_tensors(path: Path, stock: FluxPipeline) -> dict[str, torch.Tensor]:
    """Read one of the three formats into diffusers' names."""
    if path.is_dir():
        tensors = load_file(path / "adapter_model.safetensors")
        return {name.replace("base_model.model.", "transformer."): t for name, t in tensors.items()}
    tensors = load_file(path)
    layers = {name.replace(".", "_"): name for name, _ in stock.transformer.named_modules()}
    found = {}
    for name, tensor in tensors.items():
        layer, _, part = name.removeprefix("lora_transformer_").partition(".")
        if part == "lora_down.weight":
            found[f"transformer.{layers[layer]}.lora_A.weight"] = tensor
        elif part == "lora_up.weight":
            rank, alpha = tensor.shape[1], tensors[f"lora_transformer_{layer}.alpha"]
            found[f"transformer.{layers[layer]}.lora_B.weight"] = tensor * (alpha / rank)
    return found or tensors


@pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute:UserWarning")
def test_one_batch_of_all_styles_is_what_diffusers_draws(stock, pipeline):
    _, loras = demo_images()
    sources = {lora.name: Path(lora.source) for lora in map(parse_image_lora, loras)}
    assert 4 <= len(sources) <= 6
    for name, path in sources.items():
        stock.load_lora_weights(peft_tensors(path, stock), adapter_name=name)
    first, second, *_ = sources
    selections = [{}, *({name: 1.0} for name in sources), {first: 0.5, second: 0.6}]
    drawn = pipeline.draw(
        [Drawing(prompt=PROMPT, adapters=each, seed=3, steps=STEPS) for each in selections]
    )
    assert {one.facts.max_images for one in drawn} == {len(selections)}
    assert {one.array.shape for one in drawn} == {(SIDE, SIDE, 3)}
    for one, selection in zip(drawn, selections, strict=True):
        if selection:
            stock.set_adapters(list(selection), list(selection.values()))
        else:
            stock.disable_lora()
        expected = stock(
            PROMPT,
            height=SIDE,
            width=SIDE,
            num_inference_steps=STEPS,
            max_sequence_length=stock.tokenizer_2.model_max_length,
            generator=torch.Generator().manual_seed(3),
            output_type="np",
        ).images[0]
        stock.enable_lora()
        assert np.abs(one.pixels.numpy() - expected).max() < 1e-5, selection
    assert len({one.digest for one in drawn}) == len(selections)


def test_the_model_knows_the_words_of_all_captions(stock):
    texts = [text for name in OBJECTS for colour in BACKGROUNDS for text in captions(name, colour)]
    ids = stock.tokenizer_2(texts).input_ids
    assert max(map(len, ids)) <= stock.tokenizer_2.model_max_length
    assert not any(stock.tokenizer_2.unk_token_id in row for row in ids)
    assert len(set(map(tuple, ids))) == len(set(texts))
    assert stock.tokenizer_2.unk_token_id in stock.tokenizer_2("submarine").input_ids


def test_the_weights_are_small_and_come_with_their_licences():
    files = [file for file in DEMO.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < MAX_BYTES
    assert "Apache License" in (DEMO / "LICENSE-NOTO-EMOJI").read_text()
    assert "MIT License" in (DEMO / "LICENSE-FLUENT-EMOJI").read_text()


def run(*words):
    return CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "240"})


def test_draw_needs_no_model_and_puts_each_style_on_a_sheet(pipeline, tmp_path):
    out = tmp_path / "sheet.png"
    result = run("draw", PROMPT, "--each", "--enlarge", 2, "--seed", 3, "--steps", 2, "--out", out)
    assert result.exit_code == 0, result.output
    styles = ["base", *sorted(pipeline.adapters)]
    assert [
        line.split()[-1].removesuffix(":1")
        for line in result.stdout.splitlines()
        if line.startswith("Digest")
    ] == styles
    alone = pipeline.draw(Drawing(prompt=PROMPT, seed=3, steps=2))[0]
    with Image.open(out) as sheet:
        assert sheet.size == (2 * SIDE * len(styles), 2 * SIDE)
        first = np.asarray(sheet)[::2, : 2 * SIDE : 2].astype(int)
    assert np.abs(first - alone.array).max() <= 1
    refused = run("draw", PROMPT, "--each", "--adapter", "night")
    assert refused.exit_code == 2 and "leave out --adapter" in refused.stderr


def test_the_demos_model_has_a_name_unless_another_is_given():
    images = with_demo(load_serve_config({"images": True}).images)
    given = replace(images, served_image_model_name=("own",))
    configs = [{"images": images}, {"images": given}]
    configs += [{"images": images, "served_model_name": ("text",)}]
    names = [image_base_names(ServeConfig(**config)) for config in configs]
    assert names == [("small-flux",), ("own",), ("text",)]


def test_images_means_the_demo(tmp_path):
    own = load_serve_config({"images": True, "image_lora": ["mine=mine.safetensors"]}).images
    images = with_demo(own)
    assert images.image_model == str(MODEL)
    assert [parse_image_lora(text).name for text in images.image_lora] == [
        *sorted(path.stem for path in (DEMO / "adapters").iterdir()),
        "mine",
    ]
    plain = load_serve_config({}).images
    assert with_demo(plain) == plain
    with pytest.raises(InvalidRequest, match="Install loramux again"):
        demo_images(tmp_path)
    both = load_serve_config({"images": True, "image_model": "other"}).images
    with pytest.raises(InvalidRequest, match="leave it out"):
        with_demo(both)


def test_a_folder_names_size_and_length_of_its_images(tmp_path):
    for file in MODEL.iterdir():
        (tmp_path / file.name).symlink_to(file)
    defaults = tmp_path / "loramux.json"
    defaults.unlink()
    broken = ("{}", "[]", '{"size": 0}', '{"size": "64"}', "{", '{"max_sequence_length": 0}')
    broken += ('{"sizes": ["64"]}', '{"size": 32, "sizes": ["64x64"]}', '{"objects": [1]}')
    for text in (*broken, '{"size": 64, "steps": 4}'):
        defaults.write_text(text)
        with pytest.raises(UnsupportedModel, match=r"loramux\.json"):
            load_pipeline(tmp_path)
        defaults.unlink()
    assert json.loads((MODEL / "loramux.json").read_text()) == model_facts()


def test_scenes_show_what_their_captions_say(tmp_path):
    icons = np.zeros((len(OBJECTS), SIDE, SIDE, 4), np.uint8)
    icons[:, 16:48, 16:48] = (255, 0, 0, 255)
    np.savez(tmp_path / "icons.npz", base=icons)
    scenes = make_scenes(tmp_path / "icons.npz")
    for picture, (name, texts) in enumerate(zip(scenes.names, scenes.captions, strict=True)):
        (colour,) = [one for one in BACKGROUNDS if one and f" {one} " in texts[0]] or [""]
        assert {name, f"a {name}"} <= {text.split(" on a ")[0] for text in texts}
        assert len(texts) == 2 + 2 * (name in ALSO)
        image = scenes.images["base"][picture]
        paper = torch.tensor(BACKGROUNDS[colour]) / 127.5 - 1
        assert torch.allclose(image[:, 0, 0], paper) and image[0, 32, 32] == 1
        blocks = scenes.images["pixel"][picture].unflatten(1, (16, 4)).unflatten(3, (16, 4))
        assert torch.equal(blocks, blocks[:, :, :1, :, :1].expand_as(blocks))
        assert scenes.images["night"][picture].mean() < image.mean()
