"""sheaf's client, and sheaf-serve's own tests of LoRA over HTTP, against an image server.

The tests of the second half are those of test_modal_server_lora, test_smoke_lora and the endpoint
of test_streaming in the source archive of sheaf-serve 0.13.0 (Apache-2.0): requests and asserts on
answers are the same, and what they ask of a stub's calls is asked of the answer's receipt.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from sheaf.api.diffusion import DiffusionRequest, DiffusionResponse
from sheaf.client import AsyncSheafClient, SheafClient, SheafError, ValidationError

from tests.clients.live import Live, image_server
from tests.image_pixels import pixel_bytes

CLIENT = "sheaf-serve"
shows = pytest.mark.shows
SMALL: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 2, "seed": 1}
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """LORAMUX_IMAGES_URL names a server that runs already."""
    if running := os.environ.get("LORAMUX_IMAGES_URL"):
        yield Live(running)
        return
    adapters = (
        "--image-lora",
        "sketch={folder}/ink.safetensors@0.8",
        "wc={folder}/night.safetensors",
    )
    flags = (*adapters, "--image-default-lora", "sketch")
    with image_server(tmp_path_factory.mktemp("sheaf"), *flags, name="flux") as started:
        yield started


def asked(**fields: Any) -> DiffusionRequest:
    return DiffusionRequest(model_name="flux", prompt="a cat on the moon", **SMALL | fields)


def used(metadata: dict[str, Any]) -> list[tuple[str, float]]:
    return [(one["name"], one["weight"]) for one in metadata["serving"]["adapters"]]


@shows("images", "adapters")
def test_the_sync_client_predicts_with_each_selection(server: Live) -> None:
    with SheafClient(base_url=server.url, timeout=120) as client:
        assert client.health("flux") and client.ready("flux")
        pictures = set()
        for fields, wanted in (
            ({}, [("sketch", 0.8)]),
            ({"adapters": ["wc"]}, [("wc", 1.0)]),
            (
                {"adapters": ["sketch", "wc"], "adapter_weights": [0.5, 0.7]},
                [("sketch", 0.5), ("wc", 0.7)],
            ),
            ({"adapters": ["flux"]}, []),
        ):
            request = asked(**fields)
            answer = client.predict("flux", request)
            assert isinstance(answer, DiffusionResponse)
            assert answer.request_id == request.request_id
            assert (answer.height, answer.width, answer.seed) == (64, 64, 1)
            assert base64.b64decode(answer.image_b64).startswith(PNG)
            assert used(answer.metadata) == wanted
            pictures.add(pixel_bytes(answer.image_b64))
        assert len(pictures) == 4


@shows("images", "stream", "adapters")
def test_the_async_client_predicts_and_streams(server: Live) -> None:
    async def work() -> tuple[Any, list[dict[str, Any]]]:
        async with AsyncSheafClient(base_url=server.url, timeout=120) as client:
            request = asked(num_inference_steps=3, adapters=["wc"])
            answer = await client.predict("flux", request)
            return answer, [event async for event in client.stream("flux", request)]

    answer, events = asyncio.run(work())
    assert [(one["type"], one["step"]) for one in events[:-1]] == [
        ("progress", step) for step in (1, 2, 3)
    ]
    assert events[-1]["type"] == "result" and events[-1]["done"] is True
    assert pixel_bytes(events[-1]["image_b64"]) == pixel_bytes(answer.image_b64)


@shows("errors")
def test_errors_are_those_of_the_client(server: Live) -> None:
    with SheafClient(base_url=server.url, timeout=120) as client:
        with pytest.raises(ValidationError, match=r"Unknown adapter\(s\) \['nope'\]"):
            client.predict("flux", asked(adapters=["nope"]))
        with pytest.raises(SheafError, match="No deployment named"):
            client.predict("other", asked())


def payload(adapters: list[str] | None = None, weights: list[float] | None = None) -> Any:
    body: dict[str, Any] = {"model_type": "diffusion", "model_name": "flux", "prompt": "a cat"}
    body |= SMALL
    if adapters is not None:
        body["adapters"] = adapters
    if weights is not None:
        body["adapter_weights"] = weights
    return body


def predict(server: Live, body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/flux/predict", json=body, timeout=120)


@shows("adapters")
@pytest.mark.parametrize(
    ("adapters", "weights", "wanted"),
    [
        (None, None, [("sketch", 0.8)]),
        (["wc"], None, [("wc", 1.0)]),
        (["sketch"], [0.3], [("sketch", 0.3)]),
        (["sketch", "wc"], [0.5, 0.7], [("sketch", 0.5), ("wc", 0.7)]),
    ],
)
def test_default_override_and_weights(
    server: Live, adapters: list[str] | None, weights: list[float] | None, wanted: Any
) -> None:
    answer = predict(server, payload(adapters, weights))
    assert answer.status_code == 200, answer.text
    assert base64.b64decode(answer.json()["image_b64"]).startswith(PNG)
    assert answer.json()["height"] == 64
    assert used(answer.json()["metadata"]) == wanted


@shows("errors")
def test_an_unknown_adapter_is_a_422(server: Live) -> None:
    answer = predict(server, payload(["nope"]))
    assert answer.status_code == 422
    assert "Unknown adapter" in answer.json()["detail"]


@shows("adapters")
def test_concurrent_mixed_adapters(server: Live) -> None:
    bodies = [
        payload(),
        payload(["wc"]),
        payload(),
        payload(["wc"]),
        payload(["sketch", "wc"], [0.5, 0.5]),
        payload(["sketch"]),
        payload(["wc"]),
        payload(["sketch", "wc"], [0.5, 0.5]),
    ]
    with ThreadPoolExecutor(8) as pool:
        statuses = [answer.status_code for answer in pool.map(lambda b: predict(server, b), bodies)]
    assert statuses == [200] * 8


def stream(server: Live, name: str, body: Any) -> tuple[httpx.Response, list[dict[str, Any]]]:
    with httpx.stream("POST", f"{server.url}/{name}/stream", json=body, timeout=120) as answer:
        answer.read()
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    return answer, [json.loads(line) for line in lines]


@shows("stream")
def test_a_stream_has_progress_and_one_result(server: Live) -> None:
    answer, events = stream(server, "flux", payload())
    assert answer.status_code == 200
    assert "text/event-stream" in answer.headers["content-type"]
    assert len([one for one in events if one["type"] == "progress"]) == 2
    (result,) = [one for one in events if one["type"] == "result"]
    assert result["done"] is True


@shows("errors")
def test_streams_of_unknown_deployments_and_other_model_types(server: Live) -> None:
    assert stream(server, "no-such-model", payload())[0].status_code == 404
    tabular = {"model_type": "tabular", "model_name": "flux", "context_X": [[1, 2]]}
    assert stream(server, "flux", tabular)[0].status_code == 422
