"""A1111's API on a tiny FLUX pipeline: drawings, tags, samplers, fields that are not served."""

from __future__ import annotations

import base64
import io
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from loramux.diffusion.samplers import SAMPLERS as OURS
from loramux.errors import InvalidRequest
from loramux.server.app import create_app
from loramux.server.context import ServerOptions
from loramux.server.images.context import ImageModel
from loramux.server.images.sdapi_words import (
    SAMPLERS,
    find_sampler,
    read_prompt,
    served_samplers,
)
from loramux.types.image import SourceImage
from tests.image_factory import (
    ATTENTION,
    file_of,
    make_adapter,
    make_pipeline,
    mask_file,
    picture_file,
    request_for,
)
from tests.image_pixels import pixel_bytes, texts_of
from tests.image_server import image_client, save_adapters
from tests.stock_pipeline import StockPipeline
from tests.unit.server.asgi_client import post as asgi_post
from tests.unit.server.scripted_images import ScriptedImages

pytestmark = pytest.mark.slow

WEIGHTS = {"ink": 0.8, "night": 1.0}
SIZE = {"width": 32, "height": 32}
BODY = {"prompt": "a red hill", "steps": 3, "seed": 7, "sampler_name": "Euler", **SIZE}


@pytest.fixture(scope="module")
def adapters():
    pipe = make_pipeline("flux")
    return {name: make_adapter(pipe, name, ATTENTION, rank=2) for name in WEIGHTS}


@pytest.fixture(scope="module")
def server(tmp_path_factory, adapters):
    folder = tmp_path_factory.mktemp("sdapi")
    with image_client(folder) as client:
        for name, path in save_adapters(folder, adapters).items():
            client.add(name, path, WEIGHTS[name])
        yield client


@pytest.fixture(scope="module")
def stock(adapters):
    pipeline = StockPipeline("flux", list(adapters.values()))

    def draw(selection=(), **fields):
        given = {"prompt": "a red hill", "seed": 7, "max_sequence_length": 512, **fields}
        return pipeline.draw(request_for("flux", "x", selection=selection, **given)).numpy()

    return draw


def post(server, name="txt2img", **fields):
    return server.post(f"/sdapi/v1/{name}", json=BODY | fields)


def drawn(server, name="txt2img", **fields):
    reply = post(server, name, **fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def pixels_of(reply):
    return [pixel_bytes(one) for one in reply["images"]]


def is_same(text: str, expected) -> bool:
    with Image.open(io.BytesIO(base64.b64decode(text))) as image:
        pixels = np.asarray(image).astype(np.float32) / 255
    return float(np.abs(pixels - expected).max()) <= 0.5 / 255 + 1e-4


def encoded(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("prompt", "selection"),
    [
        ("a red hill", ()),
        ("a red hill <lora:night:0.5>", (("night", 0.5),)),
        ("<lora:ink:1:1>a red hill<lora:night:-0.4>", (("ink", 1.0), ("night", -0.4))),
        ("a red hill<lora:ink>", (("ink", 0.8),)),
        ("a red hill <lora:ink:0>", ()),
    ],
)
def test_tags_name_adapters(server, stock, prompt, selection):
    reply = drawn(server, prompt=prompt)
    assert is_same(reply["images"][0], stock(selection))
    info = json.loads(reply["info"])
    assert [texts_of(one)["parameters"] for one in reply["images"]] == info["infotexts"]
    assert info["infotexts"][0].startswith(f"{prompt}\nSteps: 3, Sampler: Euler, CFG scale: 7, ")
    assert info["prompt"] == reply["parameters"]["prompt"] == prompt
    assert (info["seed"], info["all_seeds"]) == (7, [7])
    assert "Seed: 7, Size: 32x32" in info["infotexts"][0]


def test_brackets_with_a_backslash_are_text(server, stock):
    reply = drawn(server, prompt=r"a \(red\) hill")
    assert is_same(reply["images"][0], stock(prompt="a (red) hill"))


def test_weights_of_words_reach_a_model_that_has_them():
    images = ScriptedImages()
    images.card = replace(images.card, weighs_words=True)  # type: ignore[assignment]
    app = create_app(None, ServerOptions(), images=ImageModel(backend=images, names=images.names))
    for prompt in ("a (red) hill", r"a \(red\) hill"):
        assert (
            asgi_post(app, "/sdapi/v1/txt2img", {"prompt": prompt, "steps": 1}).status_code == 200
        )
    weighed, plain = images.drawn
    assert (weighed.prompt, weighed.weighs_words) == ("a (red) hill", True)
    assert (plain.prompt, plain.weighs_words) == ("a (red) hill", False)


def test_guidance_is_true_cfg_beside_the_distilled_scale(server, stock):
    reply = drawn(server, negative_prompt="blue", cfg_scale=3.0, distilled_cfg_scale=1.5)
    expected = stock(negative_prompt="blue", true_cfg_scale=3.0, guidance_scale=1.5)
    assert is_same(reply["images"][0], expected)


def test_several_images_have_seeds_in_a_row(server):
    reply = drawn(server, batch_size=2, n_iter=2)
    assert len(reply["images"]) == 4
    info = json.loads(reply["info"])
    assert info["all_seeds"] == [7, 8, 9, 10]
    assert len(info["infotexts"]) == len(info["all_prompts"]) == 4
    assert pixels_of(drawn(server, seed=9)) == pixels_of(reply)[2:3]
    assert drawn(server, send_images=False)["images"] == []


def test_a_random_seed_is_reported(server):
    first, second = (drawn(server, seed=-1) for _ in range(2))
    seed = json.loads(first["info"])["seed"]
    assert seed >= 0 and pixels_of(first) != pixels_of(second)
    assert pixels_of(drawn(server, seed=seed)) == pixels_of(first)


def test_images_begin_with_an_image(server, stock):
    image = {"init_images": [encoded(picture_file())], "steps": 4}
    reply = drawn(server, "img2img", denoising_strength=0.6, **image)
    source = SourceImage(image=picture_file(), strength=0.6)
    assert is_same(reply["images"][0], stock(steps=4, source=source))
    assert reply["parameters"]["init_images"] is None
    assert json.loads(reply["info"])["denoising_strength"] == 0.6
    masked = {"mask": encoded(mask_file()), "mask_blur": 0, "denoising_strength": 1}
    reply = drawn(server, "img2img", **image, **masked)
    source = SourceImage(image=picture_file(), mask=mask_file(), strength=1.0)
    assert is_same(reply["images"][0], stock(steps=4, source=source))
    left = file_of(Image.open(io.BytesIO(mask_file())).transpose(Image.Transpose.ROTATE_180))
    inverted = masked | {"mask": encoded(left), "inpainting_mask_invert": 1}
    assert pixels_of(drawn(server, "img2img", **image, **inverted)) == pixels_of(reply)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt": "x <lora:nope:1>"}, "Unknown adapter(s) ['nope']; deployment 'flux' has"),
        ({"prompt": "x <lora:ink:x>"}, "must have one weight"),
        ({"prompt": "x <lora:ink:1:0.5>"}, "must have one weight"),
        ({"prompt": "x <lora:ink:nan>"}, "must have one weight"),
        ({"prompt": "x <hypernet:ink:1>"}, "tags are <lora:name:weight>"),
        ({"prompt": "a (red:1.3) hill"}, "Weights of words are not supported by this model"),
        ({"prompt": "a ((red)) hill"}, "write 'red' without brackets"),
        ({"prompt": "a [red] hill"}, "Weights of words"),
        ({"negative_prompt": "(blue)"}, "write 'blue' without brackets"),
        ({"prompt": "a [red:blue:0.5] hill"}, "'[red:blue:0.5]' changes the prompt"),
        ({"prompt": "a [red|blue] hill"}, "changes the prompt"),
        ({"prompt": "a hill AND a tree"}, "AND in a prompt is not supported"),
        ({"prompt": "a hill BREAK a tree"}, "BREAK in a prompt is not supported"),
        ({"prompt": "<lora:ink:1>"}, "prompt must not be empty"),
        ({"negative_prompt": "<lora:ink:1>"}, "named in prompt"),
        ({"prompt": "x <lora:ink:1> <lora:ink:0.5>"}, "ink"),
        ({"sampler_name": "Euler a"}, "This model has no sampler 'Euler a'. Did you mean Euler?"),
        ({"scheduler": "exponential"}, "no scheduler 'exponential'"),
        ({"batch_size": 3, "n_iter": 4}, "at most 10, got 12"),
        ({"batch_size": 0}, ">= 1"),
        ({"steps": 0}, "num_inference_steps"),
        ({"width": 30}, "nearest is 32"),
        ({"seed": -2}, "seed"),
        ({"eta": 0.5}, "eta must be 1"),
        ({"enable_hr": True}, "enable_hr is not supported: send false"),
        ({"styles": ["x"]}, "styles is not supported"),
        ({"subseed_strength": 0.5}, "send 0 or leave it out"),
        ({"script_name": "xyz"}, "script_name"),
        ({"alwayson_scripts": {"ControlNet": {"args": [{"model": "x"}]}}}, "script 'ControlNet'"),
        ({"override_settings": {"sd_model_checkpoint": "other"}}, "'other' is not served"),
        ({"override_settings": {"sd_vae": "x"}}, "sd_vae cannot be changed"),
        ({"made_up": 1}, "made_up is not known here"),
        ({"init_images": ["x"]}, "init_images is not known"),
        ({"prompt": 3}, "Expected `str`"),
        ({"cfg_scale": 1e30}, "true_cfg_scale must be in 0 to 100"),
    ],
)
def test_what_would_change_the_picture_is_refused(server, fields, text):
    """In the shape that A1111's clients read."""
    reply = post(server, **fields)
    assert reply.status_code == 422, reply.text
    error = reply.json()
    assert set(error) == {"error", "detail", "body", "errors"}
    assert text in error["detail"] and error["detail"] == error["errors"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "init_images"),
        ({"init_images": []}, "init_images"),
        ({"init_images": ["?"]}, "base64"),
        ({"init_images": ["aGk="]}, "cannot be read as PNG"),
        ({"init_images": [encoded(picture_file())] * 2}, "got 2"),
        ({"init_images": [encoded(picture_file())], "denoising_strength": 0}, "strength"),
        ({"init_images": [encoded(picture_file())], "resize_mode": 1}, "resize_mode"),
        (
            {"init_images": [encoded(picture_file())], "mask": "x", "inpaint_full_res": True},
            "inpaint_full_res is not supported: send false",
        ),
        (
            {"init_images": [encoded(picture_file())], "mask": "x", "inpainting_fill": 0},
            "inpainting_fill is not supported: send 1",
        ),
        (
            {"init_images": [encoded(picture_file())], "mask_blur": 2, "mask_blur_x": 3},
            "send mask_blur",
        ),
    ],
)
def test_other_images_are_refused(server, fields, text):
    reply = post(server, "img2img", **fields)
    assert (reply.status_code, text in reply.json()["detail"]) == (422, True), reply.text


def test_fields_that_change_nothing_are_accepted(server):
    plain = pixels_of(drawn(server))
    harmless: dict[str, Any] = {
        "enable_hr": False,
        "hr_scale": 2,
        "hr_upscaler": "Latent",
        "denoising_strength": 0.7,
        "subseed": -1,
        "subseed_strength": 0.0,
        "styles": [],
        "restore_faces": False,
        "eta": 1.0,
        "s_churn": 0,
        "s_noise": 1,
        "script_args": [],
        "script_name": None,
        "override_settings": {"sd_model_checkpoint": "flux", "CLIP_stop_at_last_layers": 1},
        "alwayson_scripts": {"ADetailer": {"args": [False]}, "ControlNet": {"args": []}},
        "scheduler": "automatic",
        "save_images": False,
    }
    assert pixels_of(drawn(server, **harmless)) == plain


def test_lists_of_models_adapters_and_samplers(server):
    def get(name):
        reply = server.get(f"/sdapi/v1/{name}")
        assert reply.status_code == 200, reply.text
        return reply.json()

    loras = {one["name"]: one for one in get("loras")}
    assert list(loras) == ["ink", "night"]
    assert loras["ink"]["metadata"]["ss_network_dim"] == 2
    (model,) = get("sd-models")
    assert model["model_name"] == "flux" and model["sha256"] in server.engine.card.digest
    assert model["title"] == f"flux [{model['hash']}]"
    assert [one["name"] for one in get("samplers")] == ["Euler"]
    assert [one["name"] for one in get("schedulers")] == ["automatic", "uniform"]
    options = get("options")
    assert options["sd_model_checkpoint"] == model["title"]
    assert get("progress")["progress"] == 0
    same = {"sd_model_checkpoint": model["title"]}
    assert server.post("/sdapi/v1/options", json=same).json() is None
    reply = server.post("/sdapi/v1/options", json={"samples_format": "jpg"})
    assert (reply.status_code, "samples_format" in reply.json()["detail"]) == (422, True)


def test_progress_shows_what_runs(server):
    """Asked for again and again while two images are drawn."""
    shown = []
    with ThreadPoolExecutor(1) as pool:
        drawing = pool.submit(post, server, steps=60, batch_size=2)
        while not drawing.done():
            shown.append(server.get("/sdapi/v1/progress").json())
    assert drawing.result().status_code == 200
    running = [one for one in shown if one["state"]["job_count"]]
    assert running and all(one["state"]["job_count"] == 2 for one in running)
    parts = [one["progress"] for one in running]
    assert parts == sorted(parts) and 0 < parts[-1] <= 1


def test_samplers_of_a_unet(server):
    card = replace(server.engine.card, samplers=tuple(OURS))
    assert set(served_samplers(card)) == set(SAMPLERS)
    cases = {
        (None, None): "",
        ("Euler a", "automatic"): "euler_a",
        ("k_euler_a", None): "euler_a",
        ("DPM++ 2M", "automatic"): "dpmpp_2m_karras",
        ("DPM++ 2M Karras", None): "dpmpp_2m_karras",
        ("DPM++ 2M", "Uniform"): "dpmpp_2m",
        ("DDIM", "uniform"): "ddim",
        ("UniPC", None): "unipc",
    }
    for (name, scheduler), ours in cases.items():
        assert find_sampler(card, name, scheduler) == ours
    for name, scheduler in (("Restart", None), ("Heun", "karras"), ("DPM++ 2S a", None)):
        with pytest.raises(InvalidRequest):
            find_sampler(card, name, scheduler)


def test_prompts_are_read_without_their_tags():
    read = read_prompt("a <lora:x y:0.5>, b<lora:z:te=1:unet=1> (c) [d] <3")
    assert (read.text, read.names, read.weights) == ("a , b (c) [d] <3", ("x y", "z"), (0.5, 1.0))
