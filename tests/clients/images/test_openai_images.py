"""OpenAI's Python client draws and edits images."""

from __future__ import annotations

import base64
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.clients.live import Live
from tests.image_pixels import pixel_bytes

CLIENT = "openai"
shows = pytest.mark.shows
SMALL: dict[str, Any] = {"steps": 4, "seed": 7}


@pytest.fixture
def client(images: Live) -> Any:
    with OpenAI(base_url=images.v1, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def drawn(reply: Any) -> bytes:
    data = base64.b64decode(reply.data[0].b64_json)
    assert data.startswith(b"\x89PNG")
    return pixel_bytes(data)


@shows("images", "adapters", "stream")
def test_images_are_drawn_and_streamed(client: OpenAI) -> None:
    asked: dict[str, Any] = {"prompt": "a red hill", "size": "32x32"}
    base = drawn(client.images.generate(**asked, extra_body={**SMALL, "adapters": []}))
    ink = drawn(client.images.generate(**asked, model="ink", extra_body=SMALL))
    assert base != ink
    events = list(client.images.generate(**asked, stream=True, partial_images=1, extra_body=SMALL))
    kinds = [event.type for event in events]
    assert kinds == ["image_generation.partial_image", "image_generation.completed"]
    assert pixel_bytes(events[-1].b64_json) == ink


@shows("images", "adapters", "stream")
def test_images_are_edited(client: OpenAI, photo_file: bytes) -> None:
    """Its client sends one image as `image`, several as `image[]`, and lists with brackets."""
    more = {**SMALL, "strength": 0.6}
    plain = drawn(client.images.edit(image=photo_file, prompt="a hill", extra_body=more))
    listed = drawn(client.images.edit(image=[photo_file], prompt="a hill", extra_body=more))
    assert plain == listed
    two = {**more, "adapters": ["ink", "night"], "adapter_weights": [0.5, -0.4]}
    assert drawn(client.images.edit(image=photo_file, prompt="a hill", extra_body=two)) != plain
    masked = client.images.edit(image=photo_file, mask=photo_file, prompt="x", extra_body=more)
    assert drawn(masked) != plain
    events = list(
        client.images.edit(image=photo_file, prompt="a hill", stream=True, extra_body=more)
    )
    assert [event.type for event in events] == ["image_edit.completed"]
    assert pixel_bytes(events[0].b64_json) == plain


@shows("errors")
def test_errors_are_those_of_the_client(client: OpenAI, photo_file: bytes) -> None:
    with pytest.raises(openai.UnprocessableEntityError, match="Unknown adapter"):
        client.images.edit(image=photo_file, prompt="x", extra_body={"adapters": ["nope"]})
    with pytest.raises(openai.BadRequestError, match="cannot be read"):
        client.images.edit(image=b"GIF89a", prompt="x")
    with pytest.raises(openai.BadRequestError, match="got 2"):
        client.images.edit(image=[photo_file, photo_file], prompt="x")
