"""The routes for images on a tiny FLUX pipeline: OpenAI's and sheaf's, errors, receipts."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from loramux.backend.host import Health
from loramux.backend.images import ImageForm
from loramux.config.images import ImageConfig
from loramux.config.serve import ServeConfig
from loramux.diffusion.async_engine import AsyncImageEngine
from loramux.errors import InvalidRequest
from loramux.launch.images import engine_options
from loramux.server.app import create_app
from loramux.server.context import ServerOptions
from loramux.server.images.context import ImageModel
from loramux.server.images.names import ImageNames
from loramux.specs import BatchPolicy, LoRAAdapter, LoRAConfig, ModelSpec
from loramux.types.residency import Tier, key_of_cid
from tests.image_factory import (
    ATTENTION,
    LENGTH,
    dora_tensors,
    make_adapter,
    make_pipeline,
    request_for,
)
from tests.image_pixels import pixel_bytes, texts_of
from tests.image_server import image_client, save_adapters
from tests.stock_pipeline import StockPipeline
from tests.unit.server.asgi_client import post
from tests.unit.server.scripted_images import ScriptedImages

WEIGHTS = {"ink": 0.8, "night": 1.0, "clay": 1.0}


@pytest.fixture(scope="module")
def adapters():
    pipe = make_pipeline("flux")
    return {
        name: make_adapter(pipe, name, ATTENTION, rank=rank)
        for name, rank in (("ink", 4), ("night", 2), ("clay", 8))
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory, adapters):
    """Yield a client of an application whose engine draws with three adapters; `ink` is the
    default.
    """
    folder = tmp_path_factory.mktemp("images")
    options = ServerOptions(allow_runtime_lora_updating=True)
    with image_client(folder, started=False, options=options) as client:
        assert client.get("/health").status_code == 503
        assert client.post("/v1/images/generations", json={"prompt": "x"}).status_code == 503
        client.portal.call(client.engine.start)
        for name, path in save_adapters(folder, adapters).items():
            client.add(name, path, WEIGHTS[name])
        client.names.set_default("ink")
        yield client


@pytest.fixture(scope="module")
def stock(adapters):
    """Draws with diffusers, by the names of adapters and their weights."""
    pipeline = StockPipeline("flux", list(adapters.values()))

    def draw(prompt, seed, *selection, **fields):
        return pipeline.draw(
            request_for("flux", "x", prompt=prompt, seed=seed, selection=selection, **fields)
        ).numpy()

    return draw


BODY = {
    "prompt": "a red hill",
    "size": "32x32",
    "steps": 3,
    "seed": 7,
    "max_sequence_length": LENGTH,
}


def generate(server, **fields):
    return server.post("/v1/images/generations", json=BODY | fields)


def pixels_of(text: str):
    with Image.open(io.BytesIO(base64.b64decode(text))) as image:
        return np.asarray(image).astype(np.float32) / 255


def is_same(text: str, expected) -> bool:
    """Equal but for the rounding to bytes."""
    return float(np.abs(pixels_of(text) - expected).max()) <= 0.5 / 255 + 1e-4


def test_the_default_the_base_and_named_adapters(server, stock):
    cases = {
        (): ({}, (("ink", 0.8),)),
        ("base",): ({"adapters": []}, ()),
        ("night",): ({"adapters": ["night"]}, (("night", 1.0),)),
        ("two",): (
            {"adapters": ["ink", "night"], "adapter_weights": [0.5, -0.4]},
            (("ink", 0.5), ("night", -0.4)),
        ),
        ("model",): ({"model": "clay"}, (("clay", 1.0),)),
    }
    seen = []
    for fields, selection in cases.values():
        reply = generate(server, **fields)
        assert reply.status_code == 200, reply.text
        text = reply.json()["data"][0]["b64_json"]
        assert is_same(text, stock("a red hill", 7, *selection)), fields
        seen.append(pixel_bytes(text))
    assert len(set(seen)) == len(seen)


def test_a_reply_has_usage_and_a_receipt(server):
    reply = generate(server, n=2, adapters=["night"], guidance_scale=2.0).json()
    assert len(reply["data"]) == 2
    assert (reply["size"], reply["output_format"]) == ("32x32", "png")
    tokens = 8 * 8 * 3 * 2
    assert reply["usage"]["output_tokens"] == tokens
    serving = reply["serving"]
    card = server.names.adapters["night"].card
    assert serving["adapter_cid"] == card.cid
    assert serving["base_digest"] == server.engine.card.digest
    assert [one["seed"] for one in serving["images"]] == [7, 8]
    assert serving["images"][0]["size"] == "32x32"
    assert serving["images"][0]["steps"] == 3
    again = generate(server, adapters=["night"], guidance_scale=2.0, seed=8).json()
    first, second = again["serving"]["images"][0], serving["images"][1]
    assert first["pixel_digest"] == second["pixel_digest"]


def test_a_png_says_how_it_was_drawn_and_by_which_receipt(server):
    """A1111's API draws the same pixels from the text; the receipt is found by its id."""
    chosen = {"adapters": ["ink", "night"], "adapter_weights": [0.5, -0.4]}
    fields = {
        "prompt": "a (red) hill \u0394",
        "negative_prompt": "fog, [blue]",
        "guidance_scale": 3.5,
    }
    asked = fields | {"true_cfg_scale": 2.0, "max_sequence_length": 512, "n": 2} | chosen
    replied = generate(server, **asked)
    reply = replied.json()
    first, second = (texts_of(one["b64_json"]) for one in reply["data"])
    prompt, negative, facts = first["parameters"].split("\n")
    assert prompt == "a \\(red\\) hill \u0394 <lora:ink:0.5> <lora:night:-0.4>"
    assert negative == r"Negative prompt: fog, \[blue\]"
    model_hash = server.engine.card.digest.removeprefix("sha256:")[:10]
    assert facts.startswith(
        "Steps: 3, Sampler: Euler, CFG scale: 2, Distilled CFG Scale: 3.5, Seed: 7, Size: 32x32, "
        f'Model hash: {model_hash}, Model: flux, Lora weights: "ink: 0.5, night: -0.4", Version: '
    )
    assert second["parameters"] == first["parameters"].replace("Seed: 7", "Seed: 8")
    found = {one["loramux-receipt"] for one in (first, second)}
    assert found == {reply["serving"]["id"]}
    body = {"prompt": prompt, "negative_prompt": negative.removeprefix("Negative prompt: ")}
    body |= {"steps": 3, "seed": 7, "cfg_scale": 2, "distilled_cfg_scale": 3.5}
    again = server.post("/sdapi/v1/txt2img", json=body | {"width": 32, "height": 32}).json()
    # The first was drawn in one batch with the second.
    off = np.abs(pixels_of(again["images"][0]) - pixels_of(reply["data"][0]["b64_json"])).max()
    assert off <= 1 / 255 + 1e-4
    assert texts_of(again["images"][0])["parameters"] == first["parameters"]
    assert json.loads(again["info"])["infotexts"] == [first["parameters"]]


@pytest.mark.parametrize(("kind", "start"), [("jpeg", b"\xff\xd8"), ("webp", b"RIFF")])
def test_other_encodings(server, kind, start):
    reply = generate(server, output_format=kind, output_compression=80).json()
    assert base64.b64decode(reply["data"][0]["b64_json"]).startswith(start)
    assert texts_of(reply["data"][0]["b64_json"]) == {}
    assert reply["output_format"] == kind


def events_of(response):
    return [
        json.loads(line.removeprefix("data: "))
        for line in response.text.splitlines()
        if line.startswith("data: ")
    ]


def test_dora_draws_alone_and_is_in_no_sum(server, adapters, tmp_path):
    path = tmp_path / "dora.safetensors"
    save_file(dora_tensors(make_pipeline("flux"), adapters["clay"]), path)
    server.add("dora", path)
    half = {"adapters": ["dora"], "adapter_weights": [0.5]}
    drawn = [generate(server, **asked) for asked in ({"model": "dora"}, half)]
    assert [one.status_code for one in drawn] == [200, 200]
    assert drawn[0].json()["data"] != drawn[1].json()["data"]
    assert generate(server, adapters=["dora", "ink"], adapter_weights=[1, 0]).status_code == 200
    for asked in ({"adapters": ["ink", "dora"]}, {"model": "dora+ink"}):
        refused = generate(server, **asked)
        assert refused.status_code == 400
        assert "`dora` cannot be used in a sum" in refused.json()["error"]["message"]
    server.portal.call(server.names.unload, "dora")


def test_a_stream_has_partial_images(server, stock):
    response = generate(server, stream=True, partial_images=2, steps=6)
    events = events_of(response)
    kinds = [one["type"].removeprefix("image_generation.") for one in events]
    assert kinds == ["partial_image", "partial_image", "completed"]
    assert [one["partial_image_index"] for one in events[:2]] == [0, 1]
    assert [len(texts_of(one["b64_json"])) for one in events] == [0, 0, 2]
    final = pixels_of(events[-1]["b64_json"])
    assert is_same(events[-1]["b64_json"], stock("a red hill", 7, ("ink", 0.8), steps=6))
    distances = [float(np.abs(pixels_of(one["b64_json"]) - final).mean()) for one in events]
    assert distances[0] > distances[1] > distances[2] == 0
    assert events[-1]["usage"]["total_tokens"] > 0
    assert "event: image_generation.completed" in response.text


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"model": "nope"}, 404, "does not exist"),
        ({"adapters": ["nope"]}, 422, "Unknown adapter"),
        ({"adapters": ["ink", "ink"]}, 400, "Name it once"),
        ({"adapters": ["ink"], "adapter_weights": [1, 2]}, 400, "must match adapters length"),
        ({"adapter_weights": [1]}, 400, "adapter_weights needs adapters"),
        ({"adapters": ["ink"], "adapter_weights": [1000]}, 400, "must be in"),
        ({"model": "clay", "adapters": ["ink"]}, 400, "name the base"),
        ({"size": "33x32"}, 400, "nearest is 32"),
        ({"size": "huge"}, 400, "WIDTHxHEIGHT"),
        ({"size": "32x32", "width": 32}, 400, "Give size, or"),
        ({"response_format": "url"}, 400, "b64_json"),
        ({"background": "transparent"}, 400, "background"),
        ({"prompt": " "}, 400, "prompt"),
        ({"n": 11}, 400, "<= 10"),
        ({"steps": 500}, 400, "num_inference_steps"),
        ({"stream": True, "n": 2}, 400, "one image"),
        ({"partial_images": 1}, 400, "needs stream"),
        ({"sampler": "ddim"}, 400, "no sampler"),
        ({"stream": True, "size": "33x32"}, 400, "nearest is 32"),
        ({"guidance_scale": 1e30}, 400, "guidance_scale must be in 0 to 100, got 1e+30"),
        ({"adapter": ["night"]}, 400, "adapter is no field of this route: send adapters"),
        ({"weights": [0.5]}, 400, "send adapter_weights"),
        ({"lora_scale": 0.5}, 400, "send adapter_weights"),
        ({"num_steps": 4}, 400, "send num_inference_steps"),
        ({"cfg_scale": 4}, 400, "send guidance_scale"),
        ({"adaptors": ["night"]}, 400, "send adapters"),
        ({"strength": 0.5}, 400, "use POST /v1/images/edits"),
        ({"clip_skip": 2}, 400, "leave it out"),
    ],
)
def test_bad_requests_are_refused(server, fields, status, text):
    reply = generate(server, **fields)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert text in error["message"]
    assert error["code"] == status


def test_fields_that_mean_nothing_here_are_ignored(server):
    plain, other = (
        generate(server, **fields).json()["data"][0]["b64_json"]
        for fields in ({}, {"metadata": {"a": 1}, "adapter": None, "store": True})
    )
    assert pixel_bytes(other) == pixel_bytes(plain)


def test_a_load_of_a_missing_file_is_not_found(server, tmp_path):
    body = {"lora_name": "x", "lora_path": str(tmp_path / "nowhere")}
    reply = server.post("/v1/load_lora_adapter", json=body)
    assert reply.status_code == 404 and str(tmp_path) not in reply.text


def test_models_lists_adapters_with_their_base(server):
    models = {one["id"]: one for one in server.get("/v1/models").json()["data"]}
    assert list(models) == ["flux", "ink", "night", "clay"]
    assert models["ink"]["parent"] == "flux"
    assert models["ink"]["is_default"] and not models["night"]["is_default"]


def sheaf_body(**fields):
    fixed = {"model_type": "diffusion", "model_name": "flux", "prompt": "a cat"}
    small = {"height": 64, "width": 64, "num_inference_steps": 2, "seed": 5}
    return fixed | small | fields


@pytest.mark.parametrize(
    ("asked", "weights", "selection"),
    [
        ([], None, (("ink", 0.8),)),
        (["night"], None, (("night", 1.0),)),
        (["ink"], [0.3], (("ink", 0.3),)),
        (["flux"], None, ()),
    ],
)
def test_sheaf_predicts_with_the_selection_it_documents(server, asked, weights, selection):
    request_id = str(uuid.uuid4())
    body = sheaf_body(adapters=asked, adapter_weights=weights, request_id=request_id)
    reply = server.post("/flux/predict", json=body)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    assert found["request_id"] == request_id
    assert (found["model_type"], found["model_name"]) == ("diffusion", "flux")
    assert (found["height"], found["width"], found["seed"]) == (64, 64, 5)
    served = found["metadata"]["serving"]["adapters"]
    assert [(one["name"], one["weight"]) for one in served] == list(selection)
    assert pixels_of(found["image_b64"]).shape == (64, 64, 3)


def test_sheaf_refuses_in_its_words(server):
    def detail(body, status=422):
        reply = server.post("/flux/predict", json=body)
        assert reply.status_code == status
        return reply.json()["detail"]

    known = "deployment 'flux' has: ['clay', 'ink', 'night']"
    assert detail(sheaf_body(adapters=["x"])) == f"Unknown adapter(s) ['x']; {known}"
    for fields in (
        {"prompt": " "},
        {"height": 60},
        {"width": 65},
        {"num_inference_steps": 201},
        {"guidance_scale": -1},
        {"adapters": ["ink"], "adapter_weights": [1, 2]},
        {"adapter_weights": [1]},
        {"model_type": "tabular"},
        {"request_id": "x"},
        {"adapter": ["ink"]},
        {"lora_scale": 0.5},
        {"guidance_scale": 1e30},
    ):
        (first,) = detail(sheaf_body(**fields))
        assert first["loc"][0] == "body" and first["msg"]
    reply = server.post("/other/predict", json=sheaf_body())
    assert (reply.status_code, reply.json()["detail"]) == (404, "No deployment named 'other'")


def test_sheaf_without_adapters_says_so():
    images = ScriptedImages()
    app = create_app(None, ServerOptions(), images=ImageModel(backend=images, names=images.names))
    name = images.card.name
    reply = post(app, f"/{name}/predict", sheaf_body(model_name=name, adapters=["ink"]))
    assert reply.status_code == 422
    wanted = f"Request specifies adapters ['ink'] but deployment '{name}' has no LoRA configured."
    assert reply.json()["detail"] == wanted


def test_sheaf_health_and_ready(server):
    assert server.get("/flux/health").status_code == 200
    assert server.get("/flux/ready").status_code == 200
    assert server.get("/other/ready").status_code == 404


def test_sheaf_streams_progress_and_the_result(server):
    events = events_of(server.post("/flux/stream", json=sheaf_body(num_inference_steps=3)))
    assert events[:3] == [
        {"type": "progress", "step": step, "total_steps": 3, "done": False} for step in (1, 2, 3)
    ]
    assert len(events) == 4
    assert (events[3]["type"], events[3]["done"], events[3]["seed"]) == ("result", True, 5)
    assert server.post("/flux/stream", json=sheaf_body(adapters=["x"])).status_code == 422


def test_eight_streams_with_different_adapters_at_once(server):
    """All progress events and all right images; the images share forwards."""
    choices = [[], ["flux"], ["ink"], ["night"], ["clay"], ["ink", "night"], ["night", "clay"], []]
    bodies = [
        sheaf_body(adapters=choice, num_inference_steps=20, seed=index)
        for index, choice in enumerate(choices)
    ]

    def stream(body):
        return events_of(server.post("/flux/stream", json=body))

    alone = [stream(body)[-1]["image_b64"] for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(stream, bodies))
    for events, expected in zip(together, alone, strict=True):
        assert [one["step"] for one in events[:-1]] == list(range(1, 21))
        off = np.abs(pixels_of(events[-1]["image_b64"]) - pixels_of(expected)).max()
        assert off <= 1 / 255 + 1e-4
    assert max(one[-1]["metadata"]["serving"]["distinct_adapters"] for one in together) > 1


def test_a_client_that_leaves_frees_its_image(server):
    """Closing the iterator of an image ends it before the next step."""

    async def leave_after_one_step():
        num_before = server.engine.stats.num_steps
        updates = server.engine.submit(request_for("flux", "leaver", steps=200), ImageForm())
        async for update in updates:
            assert update.step == 1
            break
        await updates.aclose()
        # The probe is drawn after the images that are open.
        await server.engine.probe(30.0)
        while server.engine.stats.num_running or server.engine.stats.num_steps == num_before:
            await asyncio.sleep(0.01)
        return server.engine.stats.num_steps - num_before

    assert server.portal.call(leave_after_one_step) < 150


@pytest.mark.slow
def test_a_dead_engine_fails_open_images_and_is_replaced(server):
    """kill -9 during an image: 503, also for health, until another engine draws the same."""
    before = server.post("/v1/images/generations", json=BODY).json()["data"][0]["b64_json"]
    long = {**BODY, "steps": 200, "size": "128x128"}
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(server.post, "/v1/images/generations", json=long)
        while not server.engine.stats.num_running:
            time.sleep(0.01)
        os.kill(server.engine.engine_pid, signal.SIGKILL)
        assert reply.result().status_code == 503
    assert "not complete" in reply.result().json()["error"]["message"]
    assert server.get("/health").status_code == 503
    while server.engine.health is not Health.READY:
        time.sleep(0.05)
    after = server.post("/v1/images/generations", json=BODY).json()["data"][0]["b64_json"]
    assert np.array_equal(pixels_of(after), pixels_of(before))


def test_a_spec_of_sheaf_is_checked(tmp_path):
    (tmp_path / "flux").mkdir()
    fields = {"name": "flux", "model_type": "diffusion", "backend": "flux"}
    kwargs = {"model_id": str(tmp_path / "flux"), "torch_dtype": "bfloat16"}
    lora = LoRAConfig(
        adapters={"sketch": LoRAAdapter(source="/a/b.safetensors", weight=0.8)}, default="sketch"
    )
    kwargs |= {"device": "cuda:1", "enable_model_cpu_offload": True, "variant": "fp16"}
    config = ModelSpec(**fields, backend_kwargs=kwargs, lora=lora).config
    assert (config.images.image_dtype, config.engine.device) == ("bfloat16", "cuda:1")
    assert (config.images.image_offload, config.images.image_variant) == (True, "fp16")
    hub = {"model_id": "black-forest-labs/FLUX.1-schnell", "revision": "refs/pr/1"}
    hub["torch_dtype"] = torch.float16
    images = ModelSpec(**fields, backend_kwargs=hub).config.images
    assert images.image_model == "black-forest-labs/FLUX.1-schnell@refs/pr/1"
    assert images.image_dtype == "float16"
    assert config.served_model_name == ("flux",)
    assert config.images.image_lora == ("sketch=/a/b.safetensors@0.8",)
    assert config.images.image_default_lora == "sketch"
    for broken in (
        lambda: LoRAConfig(adapters={}, default="x"),
        lambda: LoRAAdapter(source=""),
        lambda: LoRAAdapter(source="x", weight=-1),
        lambda: ModelSpec(**fields, lora=lora, batch_policy=BatchPolicy(bucket_by="x")),
        lambda: ModelSpec(**(fields | {"model_type": "tabular"})),
        lambda: ModelSpec(**(fields | {"backend": "chronos"})),
        lambda: ModelSpec(**fields).config,
        lambda: ModelSpec(**fields, backend_kwargs=kwargs | {"oops": 1}),
        lambda: ModelSpec(**fields, backend_kwargs=kwargs | {"torch_dtype": "int8"}),
        lambda: ModelSpec(**fields, backend_kwargs=kwargs | {"device": "tpu"}),
        lambda: ModelSpec(**fields, backend_kwargs=kwargs | {"enable_model_cpu_offload": "yes"}),
    ):
        with pytest.raises(InvalidRequest):
            broken()


@pytest.mark.parametrize(
    "fields",
    [{"image_lora": ("ink",)}, {"image_lora": ("a=x", "a=y")}, {"batching": "off"}],
)
def test_settings_are_checked(fields):
    with pytest.raises(InvalidRequest):
        ImageConfig(image_model="x", **fields)


def test_the_default_must_exist():
    config = ServeConfig(images=ImageConfig(image_model="x"))
    with pytest.raises(InvalidRequest, match="not among the adapters"):
        ImageNames(AsyncImageEngine(engine_options(config)), ("flux",)).set_default("ink")


def test_routers_learn_load_and_adapters(server):
    cid = server.names.find("night").cid
    answer = generate(server, adapters=["night"])
    assert answer.headers["x-loramux-cid"] == cid
    assert generate(server, adapters=["night"]).headers["x-loramux-tier"] == "device"
    assert generate(server, adapters=[]).headers["x-loramux-cid"] == ""
    told = server.get("/v1/residency").json()
    assert told["state"] == "ready" and told["full"] and told["base"] == "flux"
    assert told["moves"][key_of_cid(cid)] == Tier.DEVICE
    asked = {"since": told["generation"], "instance": told["instance"], "wait_s": 0.01}
    again = server.get("/v1/residency", params=asked).json()
    assert not again["full"] and again["moves"] == {} and again["open"] == 0
    assert again["step_s"] > 0
    assert server.get("/live").status_code == 200
    assert server.get("/v1/residency", params={"since": "x"}).status_code == 400
