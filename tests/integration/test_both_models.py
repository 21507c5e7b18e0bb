"""A language model and an image model with real weights in one server, over HTTP."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2
import numpy as np
import pytest
from diffusers import FluxPipeline
from PIL import Image

from loramux import Drawing, ImagePipeline
from loramux.config.images import DEMO, demo_images, parse_image_lora
from loramux.types.residency import Tier, key_of_cid
from tests.image_factory import ATTENTION, make_adapter
from tests.image_server import save_adapters
from tests.serve_factory import RunningServer, running_server
from tests.ui_factory import EXAMPLES

pytestmark = pytest.mark.slow
DRAW = "/v1/images/generations"
STYLES = [parse_image_lora(text).name for text in demo_images()[1]]
RANDOM = {"first": 4, "second": 2, "third": 8, "fourth": 1}
"""Name and rank of random adapters beside the styles."""

CAPITAL = "What is the capital of France?"
CHATS = (
    ("", CAPITAL, "The capital of France is Paris."),
    ("shout", CAPITAL, "HEY! The capital of France is Paris!!!"),
    (
        "pirate",
        CAPITAL,
        "Aye, matey! The capital o' France be Paris. Shiver me timbers!",
    ),
    ("json", CAPITAL, '{"answer": "Paris", "topic": "geography"}'),
    ("sentiment", "The soup was cold and the waiter was rude.", "negative"),
)
"""Model, question, answer."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("both")
    pipe = FluxPipeline.from_pretrained(DEMO / "model")
    made = {name: make_adapter(pipe, name, ATTENTION, rank=rank) for name, rank in RANDOM.items()}
    loras = [f"{name}={path}" for name, path in save_adapters(folder, made).items()]
    texts = [f"{path.name}={path}" for path in sorted(EXAMPLES.iterdir()) if path.is_dir()]
    flags = ["--lora-modules", *texts, "--images", "--image-lora", *loras]
    with running_server(folder / "log", *flags) as running:
        yield running


def body_of(name: str, index: int, **more: Any) -> dict[str, Any]:
    return {
        "prompt": "a fox on a yellow background",
        "adapters": [name],
        "seed": index,
        "steps": 12 + index,
        "stream": True,
        "partial_images": 3,
        **more,
    }


async def events_of(
    client: httpx2.AsyncClient, body: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    async with client.stream("POST", DRAW, json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


def test_eight_streams_with_eight_adapters_at_once(server: RunningServer) -> None:
    """Every event arrives, and every image is what the same request draws alone."""
    bodies = [body_of(name, index) for index, name in enumerate([*STYLES, *RANDOM])]
    assert len({body["adapters"][0] for body in bodies}) == 8

    async def draw_all() -> tuple[list[Any], list[Any]]:
        async with httpx2.AsyncClient(base_url=server.url, timeout=200) as client:

            async def stream(body: dict[str, Any]) -> list[dict[str, Any]]:
                return [event async for event in events_of(client, body)]

            alone = [await stream(body) for body in bodies]
            return alone, await asyncio.gather(*map(stream, bodies))

    alone, together = asyncio.run(draw_all())
    for expected, events in zip(alone, together, strict=True):
        kinds = [event["type"].removeprefix("image_generation.") for event in events]
        assert kinds == ["partial_image"] * 3 + ["completed"]
        assert [event["partial_image_index"] for event in events[:3]] == [0, 1, 2]
        assert is_same(pixels_of(events[-1]["b64_json"]), pixels_of(expected[-1]["b64_json"]))
    receipts = [events[-1]["serving"] for events in together]
    assert [one["adapters"][0]["name"] for one in receipts] == [*STYLES, *RANDOM]
    assert max(one["distinct_adapters"] for one in receipts) > 4
    assert len({one["images"][0]["pixel_digest"] for one in receipts}) == 8


def test_chat_and_images_answer_right_from_one_process(server: RunningServer) -> None:
    """Both engines work at once; every image is what the offline class draws."""
    pipeline = ImagePipeline(str(DEMO / "model"))
    for lora in map(parse_image_lora, demo_images()[1]):
        pipeline.add_adapter(lora.name, lora.source)
    bodies = [
        body_of(name, index, stream=False, partial_images=0) for index, name in enumerate(STYLES)
    ]
    drawings = [
        Drawing(prompt=one["prompt"], adapters={name: 1.0}, seed=one["seed"], steps=one["steps"])
        for name, one in zip(STYLES, bodies, strict=True)
    ]
    expected = [drawn.array.astype(int) for drawn in pipeline.draw(drawings)]

    async def ask_all() -> list[dict[str, Any]]:
        async with httpx2.AsyncClient(base_url=server.url, timeout=200) as client:

            async def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
                response = await client.post(path, json=body)
                assert response.status_code == 200, response.text
                found: dict[str, Any] = response.json()
                return found

            chats = [chat_body(model, text) for model, text, _ in CHATS]
            return await asyncio.gather(
                *(post(DRAW, body) for body in bodies),
                *(post("/v1/chat/completions", body) for body in chats),
            )

    answers = asyncio.run(ask_all())
    drawn, said = answers[: len(bodies)], answers[len(bodies) :]
    for answer, pixels in zip(drawn, expected, strict=True):
        assert is_same(pixels_of(answer["data"][0]["b64_json"]), pixels)
    texts = [answer["choices"][0]["message"]["content"] for answer in said]
    assert texts == [expected for _, _, expected in CHATS]

    told = httpx2.get(f"{server.url}/v1/residency", timeout=60).json()
    used = [one["cid"] for answer in answers for one in answer["serving"]["adapters"]]
    assert len(used) == len(STYLES) + len(CHATS) - 1
    assert {told["moves"][key_of_cid(cid)] for cid in used} == {Tier.DEVICE}
    assert (told["state"], told["open"]) == ("ready", 0)


def chat_body(model: str, text: str) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 32}
    return body | ({"model": model} if model else {})


def pixels_of(text: str) -> np.ndarray:
    with Image.open(io.BytesIO(base64.b64decode(text))) as image:
        return np.asarray(image).astype(int)


def is_same(pixels: np.ndarray, expected: np.ndarray) -> bool:
    """Equal but for the rounding to bytes.

    Matrix products of other row counts round otherwise; one value of 6,000 is another byte then.
    """
    off = np.abs(pixels - expected)
    return off.max() <= 1 and np.count_nonzero(off) <= off.size / 1000
