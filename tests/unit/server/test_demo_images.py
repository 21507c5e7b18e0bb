"""The demo's image model behind the routes: edits of all APIs, its only size, and its words."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
import torch
from diffusers import FluxImg2ImgPipeline, FluxInpaintPipeline, FluxPipeline
from PIL import Image

from loramux.config.images import DEMO, demo_images, parse_image_lora
from tests.image_factory import file_of, mask_file, open_image
from tests.image_server import image_client

SIDE = 64
STEPS = 8
STRENGTH = 0.6
SEED = 3
PROMPT = "a cat"
FOX = "a fox on a yellow background"


@pytest.fixture(scope="module")
def server():
    _, loras = demo_images()
    with image_client(DEMO, family="model") as client:
        for lora in map(parse_image_lora, loras):
            client.add(lora.name, lora.source)
        yield client


@pytest.fixture(scope="module")
def fox(server) -> bytes:
    body = {"prompt": FOX, "seed": 1, "steps": STEPS}
    reply = server.post("/v1/images/generations", json=body)
    assert reply.status_code == 200, reply.text
    return base64.b64decode(reply.json()["data"][0]["b64_json"])


@pytest.fixture(scope="module")
def stock(fox):
    """Draws from the fox with diffusers' own pipelines."""
    parts = FluxPipeline.from_pretrained(DEMO / "model", dtype=torch.float32).components

    def draw(mask: bytes | None = None):
        kind = FluxImg2ImgPipeline if mask is None else FluxInpaintPipeline
        pipe = kind(**parts)
        pipe.set_progress_bar_config(disable=True)
        masked = {} if mask is None else {"mask_image": open_image(mask)}
        return pipe(
            PROMPT,
            image=open_image(fox),
            height=SIDE,
            width=SIDE,
            strength=STRENGTH,
            num_inference_steps=STEPS,
            guidance_scale=3.5,
            max_sequence_length=12,
            generator=torch.Generator().manual_seed(SEED),
            output_type="np",
            **masked,
        ).images[0]

    return draw


def is_same(text: str, expected) -> bool:
    with Image.open(io.BytesIO(base64.b64decode(text))) as image:
        pixels = np.asarray(image).astype(np.float32) / 255
    return float(np.abs(pixels - expected).max()) <= 0.5 / 255 + 1e-4


@pytest.mark.parametrize("mask", [None, mask_file((SIDE, SIDE))], ids=["whole", "masked"])
def test_an_edit_is_that_of_diffusers_on_all_routes(server, stock, fox, mask):
    """The demo's AutoencoderTiny encodes to latents, not to a distribution of them."""
    expected = stock(mask)
    image = base64.b64encode(fox).decode()
    masked = None if mask is None else base64.b64encode(mask).decode()
    common = {"prompt": PROMPT, "seed": SEED}
    files = {"image": ("fox.png", fox, "image/png")}
    if mask is not None:
        files["mask"] = ("mask.png", mask, "image/png")
    fields = common | {"strength": STRENGTH, "steps": STEPS}
    edit = server.post("/v1/images/edits", data=fields, files=files)
    assert edit.status_code == 200, edit.text
    assert is_same(edit.json()["data"][0]["b64_json"], expected)
    body = {"init_images": [image], "denoising_strength": STRENGTH, "steps": STEPS, "mask": masked}
    body |= {"distilled_cfg_scale": 3.5, "mask_blur": 0}
    drawn = server.post("/sdapi/v1/img2img", json=common | body)
    assert drawn.status_code == 200, drawn.text
    assert is_same(drawn.json()["images"][0], expected)
    body = {"model_type": "multimodal_generation", "model_name": "model", "image_b64": image}
    body |= {"mask_b64": masked, "strength": STRENGTH, "num_inference_steps": STEPS}
    predicted = server.post("/model/predict", json=common | body | {"guidance_scale": 3.5})
    assert predicted.status_code == 200, predicted.text
    assert is_same(predicted.json()["image_b64"], expected)


def test_a_source_of_another_shape_is_drawn_in_the_models_size(server):
    wide = file_of(Image.new("RGB", (300, 100), "yellow"))
    files = {"image": ("a.png", wide, "image/png")}
    reply = server.post("/v1/images/edits", data={"prompt": PROMPT, "steps": 4}, files=files)
    assert reply.json()["size"] == "64x64"


def test_other_sizes_are_refused_in_the_shape_of_each_api(server):
    text = "This model draws 64x64, got 256x256"
    size = {"width": 256, "height": 256}
    reply = server.post("/v1/images/generations", json={"prompt": "a fox", "size": "256x256"})
    assert (reply.status_code, text in reply.json()["error"]["message"]) == (400, True)
    reply = server.post("/sdapi/v1/txt2img", json={"prompt": "a fox", "sampler_name": "", **size})
    assert (reply.status_code, text in reply.json()["detail"]) == (422, True)
    body = {"model_type": "diffusion", "model_name": "model", "prompt": "a fox"}
    reply = server.post("/model/predict", json=body | size)
    assert (reply.status_code, text in reply.json()["detail"][0]["msg"]) == (422, True)


def test_an_absent_size_is_the_models(server):
    reply = server.post("/sdapi/v1/txt2img", json={"prompt": "a fox", "steps": 1})
    info = json.loads(reply.json()["info"])
    assert (info["width"], info["height"]) == (SIDE, SIDE)
    body = {"model_type": "diffusion", "model_name": "model", "prompt": "a fox"}
    drawn = server.post("/model/predict", json=body).json()
    assert (drawn["width"], drawn["height"]) == (SIDE, SIDE)
    reply = server.post("/v1/images/generations", json={"prompt": "a fox", "width": 64, "steps": 1})
    assert reply.json()["size"] == "64x64"


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (FOX, ()),
        ("Kitten", ()),
        ("a red fox in the snow", ("not learnt", "red, in, the, snow")),
        ("a yellow background", ("names no object", "apple, banana")),
        ("dragon", ("names no object", "dragon")),
    ],
)
def test_words_that_the_model_has_not_learnt_are_warned_of(server, prompt, words):
    drawn = {"prompt": prompt, "steps": 1}
    plain = server.post("/v1/images/generations", json=drawn).json()
    told = " ".join(plain.get("warnings", []))
    assert all(word in told for word in words) and bool(told) == bool(words), told
    streamed = server.post("/v1/images/generations", json=drawn | {"stream": True}).text
    assert ('"warnings"' in streamed) == bool(words)
    info = json.loads(server.post("/sdapi/v1/txt2img", json=drawn).json()["info"])
    assert info.get("warnings", []) == plain.get("warnings", [])
    body = {"model_type": "diffusion", "model_name": "model", "prompt": prompt}
    metadata = server.post("/model/predict", json=body).json()["metadata"]
    assert metadata.get("warnings", []) == plain.get("warnings", [])


def test_a_prompt_that_is_cut_is_warned_of(server):
    body = {"prompt": "a fox " * 10, "steps": 1}
    (warning,) = server.post("/v1/images/generations", json=body).json()["warnings"]
    assert warning == "The prompt has 22 tokens, and the model reads the first 12."


def test_the_engine_is_probed_with_a_size_that_it_draws(server):
    server.portal.call(lambda: server.engine.probe(30.0))
