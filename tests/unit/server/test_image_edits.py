"""Drawings that begin with an image over HTTP: OpenAI's edits, sheaf's, and others' adapters."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from loramux.server.images.openai import MAX_PARTS
from loramux.types.image import SourceImage
from tests.image_factory import (
    ATTENTION,
    LENGTH,
    file_of,
    make_adapter,
    make_pipeline,
    mask_file,
    picture_file,
    request_for,
)
from tests.image_pixels import pixel_bytes
from tests.image_server import image_client, save_adapters
from tests.stock_pipeline import StockPipeline

pytestmark = pytest.mark.slow

WEIGHTS = {"ink": 0.8, "night": 1.0}
SIDE = 32
FIELDS = {"steps": 4, "seed": 7, "max_sequence_length": LENGTH, "prompt": "a red hill"}


@pytest.fixture(scope="module")
def adapters():
    pipe = make_pipeline("flux")
    return {name: make_adapter(pipe, name, ATTENTION, rank=2) for name in WEIGHTS}


@pytest.fixture(scope="module")
def server(tmp_path_factory, adapters):
    folder = tmp_path_factory.mktemp("edits")
    with image_client(folder) as client:
        for name, path in save_adapters(folder, adapters).items():
            client.add(name, path, WEIGHTS[name])
        client.names.set_default("ink")
        yield client


@pytest.fixture(scope="module")
def stock(adapters):
    """Draws with diffusers from a source image."""
    pipeline = StockPipeline("flux", list(adapters.values()))

    def draw(selection=(("ink", 0.8),), **source):
        given = {"image": picture_file(), **source}
        fields = {"steps": 4, "seed": 7, "selection": selection, "prompt": "a red hill"}
        return pipeline.draw(
            request_for("flux", "x", source=SourceImage(**given), **fields)
        ).numpy()

    return draw


def transparent_right(size=(SIDE, SIDE)) -> bytes:
    mask = Image.new("RGBA", size, (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), (size[0] // 2, 0, *size))
    return file_of(mask)


def edit(server, image=None, mask=None, **fields):
    files: dict[str, Any] = {"image": ("a.png", image or picture_file(), "image/png")}
    if mask is not None:
        files["mask"] = ("mask.png", mask, "image/png")
    given = {name: value for name, value in (FIELDS | fields).items() if value is not None}
    return server.post("/v1/images/edits", data=given, files=files)


def pixels_of(text: str):
    with Image.open(io.BytesIO(base64.b64decode(text))) as image:
        return np.asarray(image).astype(np.float32) / 255


def is_same(text: str, expected) -> bool:
    return float(np.abs(pixels_of(text) - expected).max()) <= 0.5 / 255 + 1e-4


def image_of(reply) -> str:
    assert reply.status_code == 200, reply.text
    return reply.json()["data"][0]["b64_json"]


def test_an_edit_is_that_of_diffusers(server, stock):
    """The default adapter, the default strength, and the size of the source."""
    reply = edit(server)
    assert is_same(image_of(reply), stock(strength=0.8))
    assert reply.json()["size"] == "32x32"
    assert reply.json()["serving"]["adapters"][0]["name"] == "ink"
    assert reply.json()["usage"]["output_tokens"] == 8 * 8 * 4


@pytest.mark.parametrize(
    ("fields", "selection"),
    [
        ({"adapters": ""}, ()),
        ({"adapters": "[]"}, ()),
        ({"adapters[]": "night"}, (("night", 1.0),)),
        ({"adapters": "night", "adapter_weights": "0.5"}, (("night", 0.5),)),
        (
            {"adapters[]": ["ink", "night"], "adapter_weights[]": ["0.5", "-0.4"]},
            (("ink", 0.5), ("night", -0.4)),
        ),
        (
            {"adapters": '["ink", "night"]', "adapter_weights": "[0.5, -0.4]"},
            (("ink", 0.5), ("night", -0.4)),
        ),
        ({"lora": '{"name": "night", "scale": 0.5}'}, (("night", 0.5),)),
    ],
)
def test_adapters_of_a_form(server, stock, fields, selection):
    assert is_same(image_of(edit(server, strength="0.6", **fields)), stock(selection, strength=0.6))


def test_masks_mark_by_transparency_or_white(server, stock):
    expected = stock(mask=mask_file(), strength=1.0)
    assert is_same(image_of(edit(server, mask=mask_file(), strength=1)), expected)
    assert is_same(image_of(edit(server, mask=transparent_right(), strength=1)), expected)


def test_json_with_base64_is_the_same(server):
    data = base64.b64encode(picture_file()).decode()
    body = {**FIELDS, "image": [data], "mask": base64.b64encode(mask_file()).decode()}
    other = {**body, "image": f"data:image/png;base64,{data}"}
    expected = pixel_bytes(image_of(edit(server, mask=mask_file())))
    for sent in (body, other):
        reply = server.post("/v1/images/edits", json=sent)
        assert pixel_bytes(image_of(reply)) == expected


def test_a_large_source_is_scaled_to_the_model(server):
    """The tiny model's default are 128x128 pixels."""
    side = server.engine.card.default_size
    reply = edit(server, picture_file(size=(8 * side, 2 * side)), max_sequence_length=None)
    assert reply.json()["size"] == f"{2 * side}x{side // 2}"
    assert edit(server, picture_file(size=(43, 38))).json()["size"] == "40x36"
    assert edit(server, picture_file(size=(43, 38)), size="32x32").json()["size"] == "32x32"


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"image": b"GIF89a"}, 400, "image cannot be read as PNG, JPEG or WebP"),
        ({"image": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + b"\0\1\0\0" * 3}, 400, "65536x65536 pixels"),
        ({"image": picture_file()[:-60]}, 400, "image cannot be read"),
        ({"mask": b"x"}, 400, "mask cannot be read"),
        ({"image": b""}, 400, "image is empty"),
        ({"strength": 0}, 400, "strength must be over 0"),
        ({"strength": "x"}, 400, "strength"),
        ({"n": 11}, 400, "<= 10"),
        ({"adapters": "nope"}, 422, "Unknown adapter"),
        ({"model": "nope"}, 404, "does not exist"),
        ({"lora": "{"}, 400, "not valid JSON"),
        ({"lora[name]": "ink"}, 400, "one field with JSON"),
        ({"prompt": ["a", "b"]}, 400, "comes 2 times"),
        ({"input_fidelity": "high"}, 400, "send strength"),
        ({"response_format": "url"}, 400, "b64_json"),
        ({"prompt": None}, 400, "prompt"),
    ],
)
def test_bad_edits_are_refused(server, fields, status, text):
    if fields.get("image") == b"":
        reply = server.post(
            "/v1/images/edits", data=FIELDS, files={"image": ("a.png", b"", "image/png")}
        )
    else:
        reply = edit(server, **fields)
    assert reply.status_code == status, reply.text
    assert text in reply.json()["error"]["message"]


def raw(server, body: bytes, kind: str = "multipart/form-data; boundary=b"):
    reply = server.post("/v1/images/edits", content=body, headers={"content-type": kind})
    return reply.status_code, reply.json()["error"]["message"]


def part(name: str, content: bytes = b"x") -> bytes:
    return b'--b\r\nContent-Disposition: form-data; name="' + name.encode() + b'"\r\n\r\n' + content


@pytest.mark.parametrize(
    ("body", "kind", "status", "text"),
    [
        (b"", "multipart/form-data", 400, "no valid boundary"),
        (b"", "multipart/form-data; boundary=b", 400, "incomplete"),
        (b"--b\r\n", "multipart/form-data; boundary=b", 400, "incomplete"),
        (b"--b--\r\n", "multipart/form-data; boundary=b", 400, "prompt"),
        (b"x", "text/plain", 415, "multipart/form-data"),
        (b"x", "application/x-www-form-urlencoded", 415, "multipart/form-data"),
        (b"--b\r\nx\r\n--b--", "multipart/form-data; boundary=b", 400, "no headers"),
        (b"--b\r\nA: b\r\n\r\nx\r\n--b--", "multipart/form-data; boundary=b", 400, "no name"),
        (
            part("prompt", b"\xff") + b"\r\n--b--",
            "multipart/form-data; boundary=b",
            400,
            "not valid UTF-8",
        ),
        (
            part("prompt", b"x" * 2**19) + b"\r\n--b--",
            "multipart/form-data; boundary=b",
            413,
            "bytes",
        ),
        (
            b"\r\n".join(part(f"f{i}") for i in range(MAX_PARTS + 2)) + b"\r\n--b--",
            "multipart/form-data; boundary=b",
            413,
            "parts",
        ),
        (
            part("image") + b"\r\n" + part("prompt") + b"\r\n--b--",
            "multipart/form-data; boundary=b",
            400,
            "image must be a file",
        ),
    ],
)
def test_other_forms_are_refused(server, body, kind, status, text):
    found, message = raw(server, body, kind)
    assert (found, text in message) == (status, True), message


def test_one_image_is_edited_at_a_time(server):
    two = [("image[]", ("a.png", picture_file(), "image/png"))] * 2
    reply = server.post("/v1/images/edits", data=FIELDS, files=two)
    assert (reply.status_code, "got 2" in reply.text) == (400, True)
    reply = server.post("/v1/images/edits", json={**FIELDS, "image": "http://x/a.png"})
    assert (reply.status_code, "not an address" in reply.text) == (400, True)
    limit = 16 * 2**20
    reply = server.post("/v1/images/edits", json={**FIELDS, "image": "A" * limit})
    assert reply.status_code == 413


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"lora": {"name": "night", "scale": 0.5}}, {"adapters": ["night"], "weights": [0.5]}),
        (
            {"lora": {"lora_name": "night", "lora_scale": 2}},
            {"adapters": ["night"], "weights": [2]},
        ),
        ({"lora": {"adapter": "night"}}, {"adapters": ["night"]}),
        (
            {"loras": [{"path": "ink", "scale": 0.5}, {"path": "night", "scale": -1}]},
            {"adapters": ["ink", "night"], "weights": [0.5, -1]},
        ),
        ({"image_loras": [{"path": "ink"}]}, {"adapters": ["ink"]}),
        ({"loras": []}, {"adapters": []}),
    ],
)
def test_adapters_in_the_words_of_other_servers(server, fields, same):
    own: dict[str, Any] = {"adapters": same["adapters"]}
    if "weights" in same:
        own["adapter_weights"] = same["weights"]
    size = {"size": "32x32"}
    one, other = (
        server.post("/v1/images/generations", json=FIELDS | size | each) for each in (fields, own)
    )
    assert pixel_bytes(image_of(one)) == pixel_bytes(image_of(other))


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"lora": {"name": "nope"}}, 422, "Unknown adapter(s) ['nope']"),
        ({"loras": [{"path": "/etc/passwd"}]}, 422, "['ink', 'night']"),
        ({"lora": {"name": "ink"}, "adapters": ["night"]}, 400, "send one of them"),
        ({"lora": {"name": "ink", "path": "night"}}, 400, "needs one of name"),
        ({"lora": {"scale": 1}}, 400, "needs one of name"),
        ({"lora": {"name": "ink", "int_id": 3}}, 400, "int_id"),
        ({"loras": [{"path": "ink", "scale": 1}, {"path": "night"}]}, 400, "a scale, or none"),
        ({"lora": "ink"}, 400, "lora"),
    ],
)
def test_other_words_that_name_nothing_are_refused(server, fields, status, text):
    reply = server.post("/v1/images/generations", json=FIELDS | fields)
    assert reply.status_code == status, reply.text
    assert text in reply.json()["error"]["message"]


def sheaf_body(**fields):
    image = base64.b64encode(picture_file()).decode()
    fixed = {"model_type": "multimodal_generation", "model_name": "flux", "image_b64": image}
    return fixed | {"prompt": "a cat", "num_inference_steps": 4, "seed": 5} | fields


def test_sheaf_edits_images(server):
    def predict(**fields):
        reply = server.post("/flux/predict", json=sheaf_body(**fields))
        assert reply.status_code == 200, reply.text
        return reply.json()

    plain = predict()
    assert plain["model_type"] == "multimodal_generation"
    assert (plain["width"], plain["height"], plain["seed"]) == (32, 32, 5)
    masked = predict(mask_b64=base64.b64encode(mask_file()).decode(), adapters=["night"])
    assert [one["name"] for one in masked["metadata"]["serving"]["adapters"]] == ["night"]
    weak = predict(strength=0.3)
    assert len({pixel_bytes(one["image_b64"]) for one in (plain, masked, weak)}) == 3
    stream = server.post("/flux/stream", json=sheaf_body(strength=0.5))
    events = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data")]
    assert [one["type"] for one in events] == ["progress", "progress", "result"]
    assert events[-1]["model_type"] == "multimodal_generation"


def test_sheaf_refuses_in_its_shape(server):
    for fields in (
        {"image_b64": "no base64!"},
        {"image_b64": base64.b64encode(b"GIF89a").decode()},
        {"strength": 1.5},
        {"num_inference_steps": 0},
        {"mask_b64": "x"},
        {"model_type": "tabular"},
    ):
        reply = server.post("/flux/predict", json=sheaf_body(**fields))
        assert reply.status_code == 422
        assert reply.json()["detail"][0]["loc"][0] == "body"
